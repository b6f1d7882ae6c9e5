"""Union list state: after any restore each instance sees the items of all instances, each once; a source with offsets in it."""

from __future__ import annotations

import copy
import threading
from typing import Any

from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline, Stage, StageKind, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone, CheckpointNotDone, JobRestarting, JobStarted
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore
from dagster_checkpoints.state.metadata import OperatorState

ROWS = "k string, v long"


class Offsets(Stage):
    """A source whose instances add the test's items to one union list and one list."""

    kind = StageKind.UNBOUNDED_SOURCE

    def __init__(self, lab: Any, adds: dict[str, list[str]], seen: dict[str, list[list[str]]], **options: Any) -> None:
        super().__init__(**options)
        self.lab, self.adds, self.seen = lab, adds, seen

    def for_instance(self) -> Stage:
        return self  # the object is shared by the instances, and the test reads the items that they saw

    def open(self, context: Any) -> None:
        state = context.state
        self.seen[context.instance] = [list(state.union("u")), list(state.list("l"))]
        for item in self.adds.get(context.instance, ()):
            state.union("u").add(item)
            state.list("l").add(item)

    def transform(self, context: Any) -> Any:
        return self.lab.stream(context.instance, ROWS)


def test_each_instance_gets_all_union_items_on_any_restore_and_no_restore_multiplies_them(lab: Any) -> None:
    for instance in "xyz":
        lab.put(instance, ROWS, [("a", 1)])
    seen: dict[str, list[list[str]]] = {}

    def run(adds: dict[str, list[str]]) -> int | None:
        """One run that takes a checkpoint and is cancelled. Returns the items that the instances were restored with."""
        source = Offsets(lab, adds, seen, name="live", instances=["x", "y", "z"], sink=lab.sink("rows"))
        job = lab.start(Pipeline("union", [source]))
        job.wait_for(CheckpointDone)
        job.cancel()
        assert job.result().status == "CANCELED"
        return job.wait_for(JobStarted).restored_checkpoint

    assert run({"x": ["x1", "x2"], "z": ["z1"]}) is None
    assert seen == {instance: [[], []] for instance in "xyz"}
    assert run({"y": ["y1"]}) is not None
    everything = ["x1", "x2", "z1"]
    assert seen == {"x": [everything, ["x1", "x2"]], "y": [everything, []], "z": [everything, ["z1"]]}
    run({})
    assert [seen[instance][0] for instance in "xyz"] == [["x1", "x2", "y1", "z1"]] * 3
    assert [seen[instance][1] for instance in "xyz"] == [["x1", "x2"], ["y1"], ["z1"]]


def test_an_instance_that_replaces_union_items_replaces_its_own_items() -> None:
    def written(store: OperatorStateStore) -> list[bytes]:
        return [item for state in store.snapshot() for item in state.items]

    def restored() -> OperatorStateStore:
        return OperatorStateStore([OperatorState("u", "union", (b"1", b"2"))], [OperatorState("u", "union", (b"2",))])

    store = restored()
    assert (list(store.union("u")), written(store)) == ([1, 2], [b"2"])
    store.union("u").add(3)
    assert (list(store.union("u")), written(store)) == ([1, 2, 3], [b"2", b"3"])
    store.union("u").update([2, 4])
    assert (list(store.union("u")), written(store)) == ([2, 4], [b"2", b"4"])
    store = restored()
    store.union("u").clear()
    assert (list(store.union("u")), written(store)) == ([], [])


FILES = (("x", 3), ("y", 8))


class Parts(Stage):
    """A source in the old style: each instance numbers its rows, and keeps how many it has read in a union list, by its name.

    Each micro-batch takes a second until `free` is set. If `broken` is set, the next one of `y` fails.
    """

    kind = StageKind.BOUNDED_SOURCE

    def __init__(self, lab: Any, **options: Any) -> None:
        super().__init__(name="parts", instances=["x", "y"], sink=lab.sink("parts"), **options)
        self.lab, self.free, self.broken = lab, threading.Event(), threading.Event()
        self.opened: list[tuple[str, dict[str, int]]] = []

    def for_instance(self) -> Stage:
        return copy.copy(self)

    def open(self, context: Any) -> None:
        self.instance, self.offsets = context.instance, context.state.union("offsets")
        self.read = dict(self.offsets).get(self.instance, 0)
        self.opened.append((self.instance, dict(self.offsets)))

    def transform(self, context: Any) -> Any:
        return self.lab.stream(context.instance, ROWS).withColumn("number", F.col("v"))

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        self.free.wait(1.0)
        if self.instance == "y" and self.broken.is_set():
            self.broken.clear()
            raise RuntimeError("an engine without a plane")
        rows, first = batch.agg(F.count("*"), F.min("v")).first()
        numbered = batch.withColumn("number", F.col("v") + (self.read - first))
        self.read += rows
        self.offsets.update([[self.instance, self.read]])
        return numbered


def test_a_source_that_keeps_offsets_in_union_list_state_declines_while_it_is_partly_finished(lab: Any) -> None:
    """One instance ends early. No checkpoint completes then; a failure repeats what it has read since the last one."""
    for instance, files in FILES:
        for file in range(files):
            lab.put(instance, ROWS, [(instance, 2 * file), (instance, 2 * file + 1)])
    lab.put("live", ROWS, [("live", 0)])
    parts = Parts(lab)

    @unbounded_source(sink=lab.sink("live"))
    def live(context: Any) -> Any:
        return lab.stream("live", ROWS)

    def start() -> Any:
        return lab.start(
            Pipeline("old_style", [parts, live]),
            interval=0.3,
            restart=FixedDelayRestart(3, 0.1),
            checkpoints={"initial_delay": 0.0, "tolerable_failed_checkpoints": 0},
        )

    job = start()
    declined = job.wait_for(CheckpointNotDone, lambda event: event.reason == "CHECKPOINT_DECLINED_TASK_CLOSING")
    assert "Stage 'parts' has the union list state 'offsets', and its instances 'x' have finished" in declined.message
    begun = job.checkpoints()
    assert begun and not any(done.stages["parts"].finished_instances for done in begun)
    last = max(done.checkpoint_id for done in begun)
    parts.broken.set()
    job.wait_for(JobRestarting, lambda event: "an engine without a plane" in event.cause)
    again = job.wait_for(JobStarted, lambda event: event.attempt == 2)
    assert again.restored_checkpoint == last < declined.checkpoint_id
    parts.free.set()
    done = job.wait_for(CheckpointDone, lambda event: "parts" in event.finished_stages)
    job.wait_for(CheckpointDone, lambda event: event.checkpoint_id > done.checkpoint_id)
    job.cancel()
    assert job.result().status == "CANCELED"

    lab.put("live", ROWS, [("live", 1)])
    job = start()
    assert "parts" in job.wait_for(JobStarted).finished_stages
    job.wait_until(lambda: job.execution.rows().get("live") == 2)
    job.drain()
    job.finished()
    assert sorted(parts.opened[:2]) == [("x", {}), ("y", {})]
    seen, same = (offsets for _, offsets in parts.opened[2:])  # the finished source is not opened a third time
    assert seen == same and sum(seen.values()) == begun[-1].stages["parts"].rows > 0
    lab.check([(instance, v, v) for instance, files in FILES for v in range(2 * files)], "parts")
    lab.check([("live", 0), ("live", 1)], "live")
