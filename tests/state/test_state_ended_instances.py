"""A restore with other instances of a stage of which some have ended: what they leave to the new ones, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.pipeline import Pipeline, StageInput, TaskId, bounded_source, stage, unbounded_source
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.key_groups import key_groups_of, owner_of
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EndOfData,
    OperatorState,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    StaticTableSnapshot,
    TaskSnapshot,
)
from dagster_checkpoints.state.restore import RestorePlan, validate_restore

SINK: Any = object()
GROUPS = 128


def pipeline(feeds: str, counted: int, out: int = 1, *, pointwise: bool = False) -> Pipeline:
    """Sources, a stage whose instances are numbered, and one that reads it."""

    @unbounded_source(watermark=("ts", "1 minute"), instances=list(feeds), sink=SINK)
    def live(context: Any) -> None: ...

    how = StageInput(edge="pointwise") if pointwise else StageInput(key="k")

    @stage(inputs={"live": how}, instances=[f"c{n}" for n in range(counted)], sink=SINK)
    def counted_(live: Any) -> None: ...

    @stage(inputs={"counted_": StageInput()}, instances=[f"o{n}" for n in range(out)], sink=SINK)
    def out_(counted_: Any) -> None: ...

    return Pipeline("p", [live, counted_, out_])


@dataclass
class Case:
    """A checkpoint by the state of each instance: `f` has finished, `w` waits for its final checkpoint, `r` runs, `e` runs and
    has reached the end of all its inputs, `o` runs, and a barrier has overtaken these ends, behind the end of event time."""

    live: str
    counted: str
    out: str = "r"
    pointwise: bool = False
    in_flight: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By instance of `live` and of `counted`, the number of segments in flight."""

    @property
    def pipeline(self) -> Pipeline:
        return pipeline("abcdef"[: len(self.live)], len(self.counted), len(self.out), pointwise=self.pointwise)

    def checkpoint(self) -> CheckpointMetadata:
        of = self.pipeline
        inputs = recorded_inputs(of)
        states = {"live": self.live, "counted_": self.counted, "out_": self.out}
        stages = tuple(
            StageMetadata(
                each.name,
                each.parallelism,
                each.instances,
                tuple(i for i, state in enumerate(states[each.name]) if state == "f"),
                fully_finished=set(states[each.name]) == {"f"},
                inputs=inputs[each.name],
                rows=100,
                max_parallelism=GROUPS if each.name == "counted_" and not self.pointwise else 0,
            )
            for each in of.stages
        )
        chains = tuple(
            ChainMetadata(name, (name,), {i: self._task(of, name, i, state) for i, state in enumerate(each) if state != "f"})
            for name, each in states.items()
        )
        return CheckpointMetadata("p", 3, stages, chains)

    def _task(self, of: Pipeline, name: str, index: int, state: str) -> TaskSnapshot:
        item = f"{name}{index}".encode()
        states = tuple(OperatorState(kind[0], kind, (item,)) for kind in ("list", "broadcast"))  # type: ignore[arg-type]
        plan = ("count by k",) if name == "counted_" and not self.pointwise else ()
        runs = state in "reo"
        return TaskSnapshot(
            {name: StageInstanceSnapshot(states, (f"t {name}{index}",), 10, state_plan=plan if runs else None)},
            QuerySnapshot(7 + index) if runs else None,
            tuple(self._channels(of, name, index, state)),
            end_of_data="drain" if state == "w" else "none",
            watermark=100 + index if runs else 999,
            valve_watermark=200 + index if runs else 999,
        )

    def _channels(self, of: Pipeline, name: str, index: int, state: str) -> list[ChannelSnapshot]:
        if name == "live":
            return []
        source, senders = ("live", self.live) if name == "counted_" else ("counted_", self.counted)
        count = len(senders)
        readers = len(self.counted) if name == "counted_" else len(self.out)
        pointwise = self.pointwise if name == "counted_" else True
        read = [q for q in range(count) if index in _consumers(q, count, readers)] if pointwise else list(range(count))
        return [
            ChannelSnapshot(
                f"{source}[{q}]->{name}[{index}]",
                5,
                300 + index,
                ended="drain"
                if state in "we" or (senders[q] in "fw" and state != "o" and not self._rows(name, q, index))
                else "none",
                in_flight=(EndOfData(drain=True),) if state == "o" else self._rows(name, q, index),
            )
            for q in read
        ]

    def _rows(self, name: str, sender: int, reader: int) -> tuple[Segment, ...]:
        number = self.in_flight.get((sender, reader), 0) if name == "counted_" else 0
        return tuple(Segment((StateFile(f"{sender}-{reader}-{n}", "", 0),), 1) for n in range(number))


def _consumers(producer: int, producers: int, consumers: int) -> range:
    """PROTOCOL 1: POINTWISE."""
    if producers >= consumers:
        return range(producer * consumers // producers, producer * consumers // producers + 1) if producers else range(0)
    return range(-(-producer * consumers // producers), -(-(producer + 1) * consumers // producers))


def counted(plan: RestorePlan) -> dict[int, TaskSnapshot]:
    return {task.index: snapshot for task, snapshot in plan.tasks.items() if task.vertex == "counted_"}


def items(tasks: Mapping[int, TaskSnapshot], kind: str) -> list[list[str]]:
    parts = [tasks[index].stages["counted_"].operator_states for index in sorted(tasks)]
    return [[item.decode() for state in states if state.kind == kind for item in state.items] for states in parts]


def committed(plan: RestorePlan) -> list[str]:
    held = [t for task in counted(plan).values() for t in task.stages["counted_"].transactions]
    return held + [t for gone in plan.removed if gone.stage == "counted_" for t in gone.snapshot.transactions]


@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("states", ["frr", "rfr", "wrr", "rwf", "ffr"])
def test_new_instances_go_on_from_those_that_had_not_ended(states: str, now: int) -> None:
    """Nothing is left of the others but the transactions of those that wait, and their broadcasts."""
    plan = validate_restore(pipeline("ab", now), Case("ff" if "f" in states else "ww", states).checkpoint())
    tasks, running = counted(plan), [index for index, state in enumerate(states) if state == "r"]
    assert sorted(tasks) == list(range(now)) and not [t for t in plan.finished if t.vertex == "counted_"]
    assert {task.end_of_data for task in tasks.values()} == {"none"}
    assert sorted(item for of in items(tasks, "list") for item in of) == [f"counted_{index}" for index in running]
    assert all(len(of) == 1 for of in items(tasks, "broadcast"))
    assert sorted(committed(plan)) == [f"t counted_{i}" for i, state in enumerate(states) if state != "f"]
    assert {(task.watermark, task.valve_watermark) for task in tasks.values()} == {(100 + running[0], 200 + running[0])}
    shares = [plan.shares[TaskId("counted_", index)] for index in range(now)]
    assert {share.logs for share in shares} == {running[0]} and {old for share in shares for old in share.queries} == set(running)
    assert {task.stages["counted_"].state_plan for task in tasks.values()} == {("count by k",)}
    assert sum(task.stages["counted_"].rows_out for task in tasks.values()) == 10 * len(states.replace("f", ""))


@pytest.mark.parametrize("states", ["ww", "wf"])
def test_if_all_instances_have_ended_the_new_ones_wait_too(states: str) -> None:
    plan = validate_restore(pipeline("a", 3), Case("w", states).checkpoint())
    tasks = counted(plan)
    assert {task.end_of_data for task in tasks.values()} == {"drain"} and {t.query for t in tasks.values()} == {None}
    assert items(tasks, "list") == [[], [], []]
    assert committed(plan) == [f"t counted_{i}" for i, state in enumerate(states) if state == "w"]
    assert {c.ended for task in tasks.values() for c in task.channels} == {"drain"}, "at-least-once would decline checkpoints"
    assert all(len(task.channels) == 1 for task in tasks.values())


def test_a_reader_sees_open_channels_again_behind_the_least_watermark_of_those_that_go_on() -> None:
    """What it has passed stays: its own event time is not that of a channel. The first instance had ended, and held it back no
    more."""
    plan = validate_restore(pipeline("ab", 3, pointwise=True), Case("fr", "ffrr", "r", pointwise=True).checkpoint())
    reader = plan.tasks[TaskId("out_", 0)]
    assert [(c.channel, c.ended, c.watermark) for c in reader.channels] == [
        (f"counted_[{index}]->out_[0]", "none", 300) for index in range(3)
    ]
    assert reader.valve_watermark == 200


@pytest.mark.parametrize(
    ("case", "now", "text"),
    [
        (
            Case("fw", "fr", in_flight={(0, 1): 1, (1, 1): 1}),
            pipeline("abx", 3),
            r"Instance 2 of 'live' would send rows to 'counted_', of which the instances 'c0' have ended in checkpoint 3",
        ),
        (Case("w", "wr", in_flight={(0, 1): 1}), pipeline("ax", 3), r"of which the instances 'c0' have ended in checkpoint 3"),
        (Case("w", "er", in_flight={(0, 1): 1}), pipeline("ax", 3), r"'c0' have ended in .*, or have read all their inputs"),
        (Case("w", "ww"), pipeline("ax", 3), r"Instance 1 of 'live' would send its rows to counted_\[0\], which has finished"),
        (
            Case("w", "ee"),
            pipeline("ax", 2),
            r"would send its rows to counted_\[0\], which has finished in .* or has reached the end",
        ),
        (
            Case("w", "oo"),
            pipeline("ax", 2),
            r"would send its rows to counted_\[0\], which has finished in .* or has reached the end",
        ),
        (
            Case("fr", "ffrr", "fr", pointwise=True),
            pipeline("ab", 3, 2, pointwise=True),
            r"Instance 0 of 'counted_' would send its rows to out_\[0\], which has finished",
        ),
        (
            Case("fr", "ffrr", "er", pointwise=True),
            pipeline("ab", 3, 2, pointwise=True),
            r"Instance 0 of 'counted_' would send its rows to out_\[0\], which has .* reached the end of all its inputs",
        ),
    ],
)
def test_rows_for_an_instance_or_for_keys_that_have_ended_are_refused(case: Case, now: Pipeline, text: str) -> None:
    validate_restore(case.pipeline, case.checkpoint())
    with pytest.raises(InstancesChanged, match=text):
        validate_restore(now, case.checkpoint())


def test_over_pointwise_edges_new_instances_process_the_rows_of_producers_that_run() -> None:
    plan = validate_restore(pipeline("ab", 6, 3, pointwise=True), Case("fr", "ffrr", "fr", pointwise=True).checkpoint())
    expected = {TaskId("counted_", index) for index in range(6)} | {TaskId("out_", index) for index in range(3)}
    assert {task for task in plan.tasks if task.vertex != "live"} == expected
    assert plan.finished == {TaskId("live", 0)} and not plan.after_finish


def with_a_table(parts: int) -> Pipeline:
    @unbounded_source(sink=SINK)
    def live(context: Any) -> None: ...

    @bounded_source
    def names(context: Any) -> None: ...

    @stage(inputs={"names": StageInput(key="k")}, instances=[f"d{n}" for n in range(parts)], sink=SINK)
    def dim(names: Any) -> None: ...

    @stage(inputs={"dim": StageInput(mode="static")}, sink=SINK)
    def joined(live: Any, dim: Any) -> None: ...

    return Pipeline("p", [live, names, dim, joined])


@pytest.mark.parametrize(("states", "ended"), [("ww", "drain"), ("fw", "drain"), ("wr", "none"), ("fr", "none")])
def test_a_static_input_has_ended_if_all_instances_that_send_it_had(states: str, ended: str) -> None:
    """A reader whose table is ready keeps it; one whose table is not waits for the new instances."""
    before = with_a_table(2)
    none, inputs = StageInstanceSnapshot(state_plan=()), recorded_inputs(before)
    finished = {"names": (0,), "dim": tuple(i for i, state in enumerate(states) if state == "f")}
    stages = tuple(
        StageMetadata(s.name, s.parallelism, s.instances, finished.get(s.name, ()), s.name == "names", inputs=inputs[s.name])
        for s in before.stages
    )
    read_all = "r" not in states
    table = (StaticTableSnapshot("dim", (Segment((), 2),)),) if read_all else ()
    known = [
        ChannelSnapshot(f"dim[{i}]->joined[0]", 3, ended="none" if state == "r" else "drain") for i, state in enumerate(states)
    ]
    of_dim = {
        i: TaskSnapshot({"dim": none}, end_of_data="drain" if state == "w" else "none")
        for i, state in enumerate(states)
        if state != "f"
    }
    chains = (
        ChainMetadata("live", ("live",), {0: TaskSnapshot({"live": none})}),
        ChainMetadata("names", ("names",)),
        ChainMetadata("dim", ("dim",), of_dim),
        ChainMetadata("joined", ("joined",), {0: TaskSnapshot({"joined": none}, channels=tuple(known), static=table)}),
    )
    plan = validate_restore(with_a_table(3), CheckpointMetadata("p", 3, stages, chains))
    joined = plan.tasks[TaskId("joined", 0)]
    assert joined.static == table
    ends = {c.ended for c in joined.channels if c.channel.startswith("dim")}
    assert ends == {"drain"} if read_all else ends <= {"none"}
    assert {snapshot.end_of_data for task, snapshot in plan.tasks.items() if task.vertex == "dim"} == {ended}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    """Keyed instances of which at least one runs, behind producers that have all ended; and how many there are now."""
    states = draw(st.lists(st.sampled_from("fwr"), min_size=1, max_size=5).filter(lambda found: "r" in found))
    senders = draw(st.sampled_from(["f", "ff", "fw", "ww"]))
    running = [i for i, state in enumerate(states) if state == "r"]
    places = st.tuples(st.sampled_from(range(len(senders))), st.sampled_from(running))
    in_flight = draw(st.dictionaries(places, st.integers(1, 3), max_size=4))
    return Case(senders, "".join(states), in_flight=in_flight), draw(st.integers(1, 6))


@given(cases())
def test_each_row_in_flight_and_each_key_of_a_running_instance_has_one_owner(drawn: tuple[Case, int]) -> None:
    case, now = drawn
    before = case.checkpoint()
    plan = validate_restore(pipeline("abcdef"[: len(case.live)], now), before)
    if now == len(case.counted):
        return
    tasks, readers = counted(plan), len(case.counted)
    got: dict[tuple[str, int], list[int]] = {}
    for index, task in tasks.items():
        for channel in task.channels:
            for element in channel.in_flight:
                if isinstance(element, Segment):
                    for group in getattr(element, "groups", range(GROUPS)):
                        got.setdefault((element.files[0].path, group), []).append(index)
    for (sender, reader), number in case.in_flight.items():
        for n in range(number):
            for group in key_groups_of(reader, readers, GROUPS):
                assert got[f"{sender}-{reader}-{n}", group] == [owner_of(group, now, GROUPS)]
    for old in (i for i, state in enumerate(case.counted) if state == "r"):
        held = key_groups_of(old, readers, GROUPS)
        owners = [i for i in range(now) if old in plan.shares[TaskId("counted_", i)].queries]
        assert owners == sorted({owner_of(group, now, GROUPS) for group in held})
