"""Union list state: after any restore each instance sees the items of all instances, each of them once."""

from __future__ import annotations

from typing import Any

from dagster_checkpoints.pipeline import Pipeline, Stage, StageKind
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore
from dagster_checkpoints.state import OperatorState

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
