"""A drain that reads bounded sources of every kind to their end first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dagster_checkpoints.pipeline import Pipeline, SplitSource, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.job.events import JobStarted

ROWS = "k string, ts timestamp, v long"
PARTS = [f"part-{number}" for number in range(4)]


class Parts(SplitSource):
    schema = ROWS

    def __init__(self, lab: Any, **options: Any) -> None:
        super().__init__(name="parts", **options)
        self.lab = lab

    def discover(self, context: Any) -> Iterable[str]:
        return PARTS

    def read(self, context: Any, split: str) -> Any:
        return self.lab.table(split, ROWS)


def backfills_and_a_feed(lab: Any) -> Pipeline:
    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        return lab.stream("history", ROWS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("fused"), inputs=dict.fromkeys(("history", "live"), StageInput(fuse=True)))
    def fused(history, live):
        return history.unionByName(live)

    @bounded_source(instances=["x", "y"])
    def archive(context):
        return lab.stream(f"archive-{context.instance}", ROWS)

    @stage(sink=lab.sink("behind"), instances=["0", "1"], inputs={"archive": StageInput(key="v")})
    def behind(archive):
        return archive

    return Pipeline("p", [history, live, fused, archive, behind, Parts(lab, sink=lab.sink("parts"))])


def test_a_drain_reads_bounded_sources_of_every_kind_to_their_end(lab: Any) -> None:
    bounded = {"fused": ("history",), "behind": ("archive-x", "archive-y"), "parts": tuple(PARTS)}
    for number in range(6):
        for name in ("history", "archive-x", "archive-y"):
            lab.put(name, ROWS, [(name, lab.at(number), number)])
    for name in PARTS:
        lab.put(name, ROWS, [(name, lab.at(0), 0)])
    lab.put("live", ROWS, [("live", lab.at(3), 0)])

    job = lab.start(backfills_and_a_feed(lab), interval=None)
    job.wait_for(JobStarted)
    answer = job.ask("stop", drain=True, bounded="finish").result(60)
    assert (answer.status, answer.details) == ("done", {}), job.story()
    assert job.finished().ended_by == "drain"
    for sink, names in bounded.items():
        rows = [row for name in names for row in lab.rows(lab.table(name, ROWS))]
        missing = lab.difference([*rows, *(lab.rows(lab.table("live", ROWS)) if sink == "fused" else [])], sink)
        assert missing.none, (sink, missing)
