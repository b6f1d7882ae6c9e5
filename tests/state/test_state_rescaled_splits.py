"""Other instances of a split source: its instances share its splits, so instances may come and go while one reads."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.execution.split_events import AssignSplit, NoMoreSplits, SplitRequest
from dagster_checkpoints.execution.splits import SplitEnumerator, enumerator_starts
from dagster_checkpoints.pipeline import FunctionSplitSource, Pipeline, StageInput, TaskId, stage
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EnumeratorState,
    OperatorState,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.restore import RestorePlan, validate_restore

SINK: Any = object()
ENUMERATOR = EnumeratorState(("5", "6"), ("3", "4"), ("1", "2"), complete=True)


def pipeline(instances: str, **how: Any) -> Pipeline:
    days = FunctionSplitSource(
        lambda split: None, ["1"], schema="k string", name="days", instances=list(instances), sink=SINK, watermark=("k", "1 hour")
    )

    @stage(inputs={"days": StageInput(**how)}, sink=SINK)
    def counted(days: Any) -> None: ...

    return Pipeline("p", [days, counted])


def snapshot(split: str, watermark: int, **fields: Any) -> TaskSnapshot:
    own = StageInstanceSnapshot((OperatorState("read", "list", (split.encode(),)),), (f"transaction {split}",), 10)
    return TaskSnapshot({"days": own}, splits=(split,), watermark=watermark, **fields)


def checkpoint(
    of: Pipeline,
    finished: tuple[int, ...] = (2,),
    tasks: dict[int, TaskSnapshot] | None = None,
    enumerator: EnumeratorState = ENUMERATOR,
) -> CheckpointMetadata:
    inputs, (days, counted) = recorded_inputs(of), of.stages
    tasks = {0: snapshot("3", 300), 1: snapshot("4", 400)} if tasks is None else tasks
    known = [
        ChannelSnapshot(f"days[{i}]->counted[0]", 5, 300 + 100 * i, i == 1, "drain" if i in finished else "none")
        for i in range(days.parallelism)
    ]
    reader = TaskSnapshot({"counted": StageInstanceSnapshot()}, channels=tuple(known))
    metadata = CheckpointMetadata(
        "p",
        3,
        (
            StageMetadata("days", days.parallelism, days.instances, finished, inputs=inputs["days"], enumerator=enumerator),
            StageMetadata("counted", 1, counted.instances, inputs=inputs["counted"]),
        ),
        (
            ChainMetadata("days", ("days",), tasks),
            ChainMetadata("counted", ("counted",), {0: reader}),
        ),
    )
    assert decode(encode(metadata), "x") == metadata
    return metadata


def restored(now: Pipeline, before: CheckpointMetadata) -> tuple[RestorePlan, SplitEnumerator]:
    plan = validate_restore(now, before)
    held = {task: snapshot.splits for task, snapshot in plan.tasks.items()}
    (start,) = enumerator_starts(now, plan.finished, plan.enumerators, held)
    return plan, SplitEnumerator(start)


def test_the_same_instances_read_on() -> None:
    plan, enumerator = restored(pipeline("abc"), checkpoint(pipeline("abc")))
    assert [plan.tasks[TaskId("days", i)].splits for i in (0, 1)] == [("3",), ("4",)]
    assert enumerator.asked(SplitRequest(TaskId("days", 1), ("4",), True)) == [(TaskId("days", 1), AssignSplit("5"))]


@pytest.mark.parametrize("instances", ["ac", "xyz", "bcad", "cb"])
def test_the_splits_that_are_not_finished_are_assigned_again_in_their_order(instances: str) -> None:
    """An instance that runs may be left out, one that has finished stays so under its name."""
    plan, enumerator = restored(pipeline(instances), checkpoint(pipeline("abc")))
    reading = [TaskId("days", i) for i, name in enumerate(instances) if name != "c"]
    assert [task for task in plan.tasks if task.vertex == "days"] == reading
    assert plan.finished == {TaskId("days", i) for i, name in enumerate(instances) if name == "c"}
    answers = [enumerator.asked(SplitRequest(reading[0], tuple(finished), True)) for finished in ["", "3", "4", "5", "6"]]
    assert answers == [[(reading[0], answer)] for answer in (*map(AssignSplit, "3456"), NoMoreSplits())]
    parts = [plan.tasks[task].stages["days"] for task in reading]
    assert sorted(item for part in parts for state in part.operator_states for item in state.items) == [b"3", b"4"]
    assert sum(part.rows_out for part in parts) == 20
    committed = [t for part in [*parts, *(gone.snapshot for gone in plan.removed)] for t in part.transactions]
    assert sorted(committed) == ["transaction 3", "transaction 4"]


def test_event_time_begins_with_that_of_the_slowest_instance() -> None:
    """Instance b was idle and ahead of a, whose split another one reads now."""
    plan, _ = restored(pipeline("bx"), checkpoint(pipeline("ab"), finished=()))
    assert {plan.tasks[TaskId("days", i)].watermark for i in (0, 1)} == {300}
    assert [(c.channel, c.watermark, c.idle) for c in plan.tasks[TaskId("counted", 0)].channels] == [
        ("days[0]->counted[0]", 300, False),
        ("days[1]->counted[0]", 300, False),
    ]


def test_a_static_input_ends_when_the_last_instance_ends() -> None:
    before = checkpoint(pipeline("abc", mode="static"))
    plan, _ = restored(pipeline("ac", mode="static"), before)
    assert {c.channel: c.ended for c in plan.tasks[TaskId("counted", 0)].channels if c.ended != "none"} == {
        "days[1]->counted[0]": "drain"
    }


def test_an_instance_behind_its_end_of_data_waits_on_under_its_name() -> None:
    tasks = {0: snapshot("3", 300), 1: TaskSnapshot({"days": StageInstanceSnapshot()}, end_of_data="drain")}
    state = EnumeratorState((), ("3",), ("1", "2", "4", "5", "6"), complete=True)
    plan = validate_restore(pipeline("bx"), checkpoint(pipeline("ab"), (), tasks, state))
    assert plan.after_finish == {TaskId("days", 0)}
    assert plan.tasks[TaskId("days", 0)].stages["days"].transactions == ("transaction 3",)
    assert not any(task.splits for task in plan.tasks.values())


@pytest.mark.parametrize("instances", ["abx", "x"])
def test_if_the_data_of_all_have_ended_a_new_instance_has_none(instances: str) -> None:
    """Found by the simulator: an unbounded source was asked to end before it had read all, and its reader had seen its end."""
    ended = TaskSnapshot({"days": StageInstanceSnapshot()}, end_of_data="drain", watermark=900)
    plan = validate_restore(pipeline(instances), checkpoint(pipeline("ab"), (), {0: ended, 1: ended}))
    assert plan.after_finish == {TaskId("days", i) for i in range(len(instances))}
    assert {plan.tasks[task].watermark for task in plan.after_finish} == {900}


def test_an_instance_must_be_left_that_reads() -> None:
    with pytest.raises(InstancesChanged, match=r"'days' has now \('c'\) have ended in checkpoint 3 .* no instance would read"):
        validate_restore(pipeline("c"), checkpoint(pipeline("abc")))
