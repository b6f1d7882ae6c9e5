"""A pipeline that has finished is launched again: its sinks decide about the rows of the earlier job."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.execution.unlisted_checkpoints import PipelineStateMissing
from dagster_checkpoints.pipeline import Pipeline, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import SinkHoldsEarlierRows, SinkPathInUse
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted
from dagster_checkpoints.storage import open_store

ROWS = "k string, v long"


def copying(lab: Any, **options: Any) -> Pipeline:
    """Two instances that copy one folder each into one table."""

    @bounded_source(instances=["a", "b"])
    def numbers(context):
        return lab.stream(context.instance, ROWS, files_per_trigger=10)

    @stage(sink=lab.sink(**options))
    def copied(numbers):
        return numbers

    return Pipeline("copying", [numbers, copied])


def test_a_new_start_of_a_finished_pipeline_needs_a_choice_about_its_rows(lab: Any) -> None:
    for name in "ab":
        lab.put(name, ROWS, [(name, n) for n in range(20)])
    expected = [(name, n) for name in "ab" for n in range(20)]
    first = lab.start(copying(lab))
    first.finished()
    lab.check(expected)

    spark, lab.spark = lab.spark, None
    refused = lab.start(copying(lab))
    with pytest.raises(SinkHoldsEarlierRows) as caught:
        refused.result()
    assert not refused.of(JobStarted)
    for part in ("stage 'copied' of pipeline 'copying'", str(lab.folder / "out"), "'keep'", "'replace'", "job 1"):
        assert part in str(caught.value)
    (lab.folder / "others").mkdir()
    (lab.folder / "others" / "part-0.parquet").write_text("")
    elsewhere = lab.start(Pipeline("elsewhere", [copying(lab).stage("numbers"), renamed(lab)]))
    with pytest.raises(SinkPathInUse, match=r"part-0\.parquet"):
        elsewhere.result()
    lab.spark = spark
    lab.check(expected)

    second = lab.start(copying(lab, at_new_start="replace"))
    assert second.finished().job_id == 2, "a run that was refused has begun no job"
    lab.check(expected)
    lab.start(copying(lab, at_new_start="keep")).finished()
    lab.check(expected * 2)


@pytest.mark.parametrize(("choice", "what"), [("replace", "be replaced"), ("keep", "be kept, beside the same rows")])
def test_rows_of_a_job_that_an_empty_storage_does_not_know_are_not_replaced_unless_the_run_says_so(
    lab: Any, choice: str, what: str
) -> None:
    """As where the file system of the storage is not mounted: the table is kept in another place."""
    for name in "ab":
        lab.put(name, ROWS, [(name, n) for n in range(20)])
    expected = [(name, n) for name in "ab" for n in range(20)]
    lab.start(copying(lab, at_new_start=choice)).finished()
    unmounted = open_store(str(lab.folder / "mount"))
    for _ in range(2):  # the first one leaves a state.json
        refused = lab.start(copying(lab, at_new_start=choice), storage=lab.storage("copying", unmounted))
        with pytest.raises(SinkHoldsEarlierRows, match=rf"knows no job.*{what}.*not mounted\?.*restore_from: 'none'"):
            refused.result()
    lab.check(expected)
    lab.start(copying(lab, at_new_start=choice)).finished()  # the storage is there again
    lab.check(expected * (2 if choice == "keep" else 1))
    begun = lab.start(copying(lab, at_new_start=choice), storage=lab.storage("copying", unmounted), restore_from="none")
    begun.finished()
    lab.check(expected * (3 if choice == "keep" else 1))


def renamed(lab: Any) -> Any:
    @stage(sink=lab.sink("others"))
    def copied(numbers):
        return numbers

    return copied


def test_a_lost_state_is_named_and_the_newest_checkpoint_goes_on_without_a_row_lost_or_doubled(lab: Any) -> None:
    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    def pipeline() -> Pipeline:
        @stage(sink=lab.sink("copies", at_new_start="replace"))
        def copied(live):
            return live

        return Pipeline("lost", [live, copied])

    def read_all(job: Any, rows: int) -> None:
        job.wait_until(lambda: lab.count("copies") == rows)
        done = len(job.of(CheckpointDone))
        job.wait_until(lambda: len(job.of(CheckpointDone)) > done)  # whose metadata holds no transaction
        job.cancel()
        job.result()

    expected = [("a", n) for n in range(30)]
    lab.put("live", ROWS, expected[:10])
    read_all(lab.start(pipeline()), 10)
    folder = lab.folder / "store" / "lost"
    (folder / "state.json").unlink()
    before = sorted(str(path) for path in folder.rglob("*"))

    refused = lab.start(pipeline())
    with pytest.raises(PipelineStateMissing) as caught:
        refused.result()
    assert not refused.of(JobStarted)
    assert sorted(str(path) for path in folder.rglob("*")) == before
    lab.check(expected[:10], "copies")

    newest = str(caught.value).partition("restore_from: '")[2].partition("'")[0]
    lab.put("live", ROWS, expected[10:20])
    read_all(lab.start(pipeline(), restore_from=newest), 20)
    lab.put("live", ROWS, expected[20:])
    resumed = lab.start(pipeline())
    resumed.wait_until(lambda: lab.count("copies") == 30)
    resumed.drain()
    resumed.finished()
    lab.check(expected, "copies")
