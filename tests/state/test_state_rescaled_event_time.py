"""Other instances, and the event time of an instance that gets the rows of other ones than before."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.pipeline import FunctionSplitSource, Pipeline, Stage, StageInput, unbounded_source
from dagster_checkpoints.state import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EnumeratorState,
    InstancesChanged,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
    WatermarkAt,
    decode,
    encode,
    recorded_inputs,
    rescale,
    validate_restore,
)
from dagster_checkpoints.state.rescaling import with_event_time

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


@pytest.mark.parametrize(
    ("times", "least"),
    [((400, 20, 30), 20), ((20, 400, 20), 20), ((400, 400, None), None), ((400, 400, 400), 400)],
)
def test_an_instance_without_state_begins_with_the_event_time_of_the_rows_that_it_gets(
    times: tuple[int | None, ...], least: int | None
) -> None:
    before = checkpoint(pipeline("abc"), times, "counted")
    rescaled = rescale(pipeline("x"), before).metadata
    assert [t.valve_watermark for t in tasks_of(rescaled, "merged")] == [least]
    passed = tasks_of(rescaled, "passed")
    assert {channel.watermark for each in passed for channel in each.channels} == {least}
    assert [t.valve_watermark for t in passed] == [least] * 3
    begins = None if least is None else least - 5
    assert [t.watermark for t in passed] == [begins] * 3, "what it emits is as late as before"
    for each in tasks_of(rescaled, "counted"):
        assert each.valve_watermark == 1, "what has been emitted is not emitted again"
        first, *others = each.channels
        assert [c.position for c in each.channels] == [7] * 3
        assert {c.watermark for c in others} == {begins}, "no watermark that rows may still come in front of"
        marks = [element.ms for element in first.in_flight if isinstance(element, WatermarkAt)]
        assert isinstance(first.in_flight[0], Segment)
        assert [first.watermark, *marks] == ([None] if begins is None else [1, begins])


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
    before = checkpoint(pipeline("abc", counted), (400, 20, 30), stateful)
    with pytest.raises(InstancesChanged, match=text):
        validate_restore(pipeline("x", counted), before)
    validate_restore(pipeline("x", counted), checkpoint(pipeline("abc", counted), (400, 20, 30)))


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


def test_the_reader_of_a_split_source_gets_splits_that_another_instance_had() -> None:
    counted = tasks_of(rescale(of_splits("abc"), checkpoint_of_splits((400, 20), state=False)).metadata, "counted")
    assert [(t.valve_watermark, t.watermark) for t in counted] == [(20, 20), (20, 20), (None, None)]
    refused = r"instance 'a' of 'counted' is at event time 400 ms, and would get rows from 20 ms on, .* dropped as late"
    with pytest.raises(InstancesChanged, match=refused):
        validate_restore(of_splits("abc"), checkpoint_of_splits((400, 20), state=True))
    validate_restore(of_splits("abc"), checkpoint_of_splits((20, 20), state=True))


@pytest.mark.parametrize(
    ("watermarks", "valve", "sent", "begins"),
    [
        ([30, 20], 50, 45, (20, 15)),
        ([20], 50, None, (20, None)),
        ([20, None], 50, 45, (None, None)),
        ([50, 60], 50, 45, (50, 45)),
        ([20], None, None, (None, None)),
        ([], 50, 45, (50, 45)),  # all channels are idle, or have ended
    ],
)
def test_event_time_goes_back_to_the_earliest_channel_and_that_of_the_output_by_as_much(
    watermarks: list[int | None], valve: int | None, sent: int | None, begins: tuple[int | None, int | None]
) -> None:
    found = with_event_time(TaskSnapshot({}, watermark=sent, valve_watermark=valve), watermarks)
    assert (found.valve_watermark, found.watermark) == begins
