"""Other instances, and the event time of an instance that gets the rows of other ones than before."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.pipeline import FunctionSplitSource, Pipeline, Stage, StageInput, unbounded_source
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EnumeratorState,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
    WatermarkAt,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.rescaled_checkpoint import with_instances
from dagster_checkpoints.state.restore import validate_restore

SINK: Any = object()
BY_KEY = StageInput(key="k")
ONE_TO_ONE = StageInput()


class Plain(Stage):
    def transform(self, context: Any, **rows: Any) -> Any: ...


def pipeline(merged: str, counted: StageInput = BY_KEY) -> Pipeline:
    """live -> merged -> passed, instance by instance, -> counted."""

    @unbounded_source(watermark=("ts", "1 minute"), instances=list("abc"))
    def live(context: Any) -> None: ...

    def of(name: str, source: str, instances: str, how: StageInput = ONE_TO_ONE) -> Any:
        return Plain(name, inputs={source: how}, instances=list(instances), sink=SINK)

    stages = [live, of("merged", "live", merged), of("passed", "merged", "abc"), of("counted", "passed", "abc", counted)]
    return Pipeline("p", stages, chaining=False)


def task(stage: str, watermark: int | None, channels: list[ChannelSnapshot], valve: int | None, *, state: bool) -> TaskSnapshot:
    own = StageInstanceSnapshot(state_plan=("count",) if state else ())
    return TaskSnapshot({stage: own}, QuerySnapshot(7), tuple(channels), watermark=watermark, valve_watermark=valve)


def checkpoint(of: Pipeline, times: tuple[int | None, ...], *stateful: str) -> CheckpointMetadata:
    """A checkpoint in which instance i of each stage is as far as `times[i]`; `passed` emits 5 ms behind its input.

    Rows are in flight from `passed[0]`, in front of its last watermark.
    """
    inputs, readers = recorded_inputs(of), range(3)
    stages = tuple(StageMetadata(s.name, s.parallelism, s.instances, inputs=inputs[s.name]) for s in of.stages)
    sent = [None if ms is None else ms - 5 for ms in times]

    def one(source: str, stage: str) -> dict[int, TaskSnapshot]:
        known = [[ChannelSnapshot(f"{source}[{i}]->{stage}[{i}]", 7, times[i])] for i in readers]
        output = sent if stage == "passed" else times
        return {i: task(stage, output[i], known[i], times[i], state=stage in stateful) for i in readers}

    def into_counted(reader: int) -> TaskSnapshot:
        by_key = inputs["counted"][0].key is not None
        senders = readers if by_key else [reader]
        in_flight = [(Segment((), 2), WatermarkAt(time)) if s == 0 and (time := sent[0]) is not None else () for s in readers]
        before = [1 if s == 0 else sent[s] for s in readers]
        known = [ChannelSnapshot(f"passed[{s}]->counted[{reader}]", 7, before[s], in_flight=in_flight[s]) for s in senders]
        return task("counted", 1, known, 1, state="counted" in stateful)

    tasks = {
        "live": {i: task("live", times[i], [], None, state=False) for i in readers},
        "merged": one("live", "merged"),
        "passed": one("merged", "passed"),
        "counted": {i: into_counted(i) for i in readers},
    }
    metadata = CheckpointMetadata("p", 3, stages, tuple(ChainMetadata(name, (name,), tasks[name]) for name in tasks))
    assert decode(encode(metadata), "x") == metadata
    return metadata


def tasks_of(metadata: CheckpointMetadata, stage: str) -> list[TaskSnapshot]:
    return list(next(chain.tasks for chain in metadata.chains if chain.name == stage).values())


AHEAD = "instance {instance!r} of {stage!r} is at event time 400 ms, and would get rows from {begin} on, .* dropped as late"


@pytest.mark.parametrize(
    ("times", "instance", "begin"),
    [((400, 20, 30), "a", "20 ms"), ((20, 400, 20), "b", "20 ms"), ((400, 400, None), "a", "the beginning")],
)
@pytest.mark.parametrize("stateful", ["counted", "none"])
def test_an_instance_that_is_ahead_of_the_rows_that_it_would_get_is_refused(
    times: tuple[int | None, ...], instance: str, begin: str, stateful: str
) -> None:
    before = checkpoint(pipeline("abc"), times, stateful)
    with pytest.raises(InstancesChanged, match=AHEAD.format(instance=instance, stage="passed", begin=begin)):
        validate_restore(pipeline("x"), before)


@pytest.mark.parametrize("time", [None, 400])
def test_instances_that_are_as_far_as_each_other_go_on(time: int | None) -> None:
    rescaled = with_instances(
        FittedCheckpoint(pipeline("x"), checkpoint(pipeline("abc"), (time, time, time), "counted"))
    ).metadata
    assert [t.valve_watermark for t in tasks_of(rescaled, "merged")] == [time]
    assert [t.valve_watermark for t in tasks_of(rescaled, "passed")] == [time] * 3
    assert [t.valve_watermark for t in tasks_of(rescaled, "counted")] == [1] * 3, "what was emitted is not emitted again"


@pytest.mark.parametrize(
    ("stateful", "counted", "text"),
    [
        ("passed", BY_KEY, "Stage 'merged' has other instances than in .* the instances of 'passed'"),
        ("counted", ONE_TO_ONE, "Stage 'merged' has other instances than in .* the instances of 'counted', which read 'passed'"),
    ],
)
def test_state_that_belongs_to_the_rows_of_one_instance_does_not_meet_those_of_others(
    stateful: str, counted: StageInput, text: str
) -> None:
    before = checkpoint(pipeline("abc", counted), (20, 20, 20), stateful)
    with pytest.raises(InstancesChanged, match=text):
        validate_restore(pipeline("x", counted), before)
    validate_restore(pipeline("x", counted), checkpoint(pipeline("abc", counted), (20, 20, 20)))


def of_splits(instances: str) -> Pipeline:
    days = FunctionSplitSource(
        lambda split: None, ["1"], schema="k string", name="days", instances=list(instances), watermark=("k", "1 hour")
    )
    counted = Plain("counted", inputs={"days": ONE_TO_ONE}, instances=list(instances), sink=SINK)
    return Pipeline("p", [days, counted], chaining=False)


def checkpoint_of_splits(times: tuple[int, int], *, state: bool) -> CheckpointMetadata:
    of, inputs = of_splits("ab"), recorded_inputs(of_splits("ab"))
    enumerator = EnumeratorState(("5",), ("3", "4"), complete=True)
    days, counted = (StageMetadata(s.name, 2, s.instances, inputs=inputs[s.name]) for s in of.stages)
    days = StageMetadata("days", 2, days.instances, inputs=inputs["days"], enumerator=enumerator)
    reads = {i: TaskSnapshot({"days": StageInstanceSnapshot()}, splits=(str(3 + i),), watermark=times[i]) for i in (0, 1)}
    known = [[ChannelSnapshot(f"days[{i}]->counted[{i}]", 7, times[i])] for i in (0, 1)]
    counts = {i: task("counted", times[i], known[i], times[i], state=state) for i in (0, 1)}
    chains = (ChainMetadata("days", ("days",), reads), ChainMetadata("counted", ("counted",), counts))
    return CheckpointMetadata("p", 3, (days, counted), chains)


@pytest.mark.parametrize("state", [True, False])
def test_the_reader_of_a_split_source_gets_splits_that_another_instance_had(state: bool) -> None:
    refused = AHEAD.format(instance="a", stage="counted", begin="20 ms")
    with pytest.raises(InstancesChanged, match=refused):
        validate_restore(of_splits("abc"), checkpoint_of_splits((400, 20), state=state))
    validate_restore(of_splits("abc"), checkpoint_of_splits((20, 20), state=state))
