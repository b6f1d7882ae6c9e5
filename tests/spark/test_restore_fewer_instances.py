"""A job that goes back to a savepoint from before it had more instances: their rows are taken back, also after the job's end."""

from __future__ import annotations

from typing import Any

from dagster_checkpoints.pipeline import Pipeline, StageContext, StageInput, bounded_source, stage
from dagster_checkpoints.spark.job.events import SavepointDone

ROWS = "k string, v long"


def pipeline(lab: Any, instances: int) -> Pipeline:
    @bounded_source
    def numbers(context: StageContext) -> Any:
        return lab.stream("numbers", ROWS)

    @stage(inputs={"numbers": StageInput(key="k")}, instances=[str(index) for index in range(instances)], sink=lab.sink())
    def kept(numbers: Any) -> Any:
        return numbers.select("k", "v")

    return Pipeline("back", [numbers, kept])


def test_a_savepoint_from_before_more_instances_is_restored_after_the_job_has_finished(lab: Any) -> None:
    for file in range(8):
        lab.put("numbers", ROWS, [(f"key-{key}", 10 * file + key) for key in range(10)])
    first = lab.start(pipeline(lab, 1), interval=3600.0)
    first.wait_until(lambda: first.execution.rows().get("numbers", 0) >= 10)
    savepoint = first.done("stop", drain=False)
    first.finished()
    assert first.of(SavepointDone) and 0 < lab.count() < 80, "the savepoint is from the middle"

    lab.start(pipeline(lab, 3)).finished()
    assert lab.count() == 80

    lab.start(pipeline(lab, 1), restore_from=savepoint.location).finished()
    lab.check(lab.table("numbers", ROWS))
