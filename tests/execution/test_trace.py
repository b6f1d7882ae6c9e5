"""Traces: values as JSON and back, machines recorded and replayed, and traces that cannot be read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace as changed
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, CheckpointProperties
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import (
    Acknowledged,
    CheckpointRequested,
    Declined,
    MetadataWritten,
    TaskStateChanged,
    Tick,
    TriggerTask,
)
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.execution.trace import (
    CorruptTrace,
    Created,
    Handled,
    Opaque,
    Recorder,
    about,
    class_of,
    decode,
    encode,
    made,
    name_of,
    read,
    replay,
)
from dagster_checkpoints.pipeline import EdgePattern, ExecutionGraph, TaskId, Vertex, VertexEdge
from dagster_checkpoints.state.metadata import TaskSnapshot

A, B = TaskId("A", 0), TaskId("B", 0)
GRAPH = ExecutionGraph((Vertex("A", ("a",), 1), Vertex("B", ("b",), 1)), (VertexEdge(0, 1, EdgePattern.ALL_TO_ALL),))

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
leaves = (
    plain
    | st.sampled_from(
        [TaskState.RUNNING, FailureReason.IO_EXCEPTION, A, CheckpointProperties(), CheckpointBarrier(3, 1.5), Tick()]
    )
    | st.datetimes(timezones=st.just(UTC))
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just(B), inner)
        | st.builds(lambda state: Declined(A, 3, message=str(state)), inner)
    ),
    max_leaves=12,
)


@given(values)
def test_a_value_is_read_back_unchanged(value: object) -> None:
    assert decode(encode(value)) == value


@given(st.frozensets(st.integers() | st.text()))
def test_a_set_is_read_back_and_is_written_in_a_fixed_order(value: frozenset[object]) -> None:
    assert decode(encode(value)) == value
    assert encode(frozenset(reversed(list(value)))) == encode(value)


def test_opaque_values_are_written_as_their_type() -> None:
    assert decode(encode(TaskSnapshot())) == Opaque("TaskSnapshot")
    assert decode(encode(object())) == Opaque("object")
    assert decode(encode(ValueError("bad"))) == Opaque("ValueError: bad")
    assert decode(encode(Opaque("x"))) == Opaque("x")
    assert decode(encode(datetime(2026, 1, 2, tzinfo=UTC))) == datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    "written",
    [
        {"~": "unknown", "v": 1},
        {"v": 1},
        {"~": "record", "v": ["coordination.events:Declined", {"nonsense": 1}]},
        {"~": "record", "v": ["coordination.events:NoSuchEvent", {}]},
        {"~": "record", "v": ["no.such.module:Declined", {}]},
        {"~": "record", "v": ["files.store:ObjectInfo", {}]},
        {"~": "enum", "v": ["coordination.plan:TaskState", "NO_SUCH_STATE"]},
        {"~": "moment", "v": "yesterday"},
    ],
)
def test_a_value_that_no_trace_can_hold_is_refused(written: Any) -> None:
    with pytest.raises(CorruptTrace):
        decode(written)


def test_the_error_for_an_unreadable_value_shows_its_beginning() -> None:
    written = {"~": "unknown", "v": "x" * 300}
    with pytest.raises(CorruptTrace) as found:
        decode(written)
    shown = str(written)[:200]
    assert str(found.value) == f"expected a value of a trace, found {shown} (ValueError: unknown kind 'unknown')"


def test_a_named_tuple_of_another_package_is_opaque() -> None:
    assert decode(encode(time.gmtime(0))) == Opaque("struct_time")


def test_a_class_has_one_name() -> None:
    assert class_of(name_of(CheckpointCoordinator)) is CheckpointCoordinator
    assert name_of(TaskId) == "pipeline.chains:TaskId" or class_of(name_of(TaskId)) is TaskId
    with pytest.raises(CorruptTrace, match="another version"):
        class_of("coordination.events:_USER_CHECKPOINT")


def recorded_run(break_off: Callable[[list[str]], list[str]] = lambda lines: lines) -> list[str]:
    lines: list[str] = []
    recorder = Recorder(lines.append)
    recorder.begin({"pipeline": "p"})
    coordinator = made(CheckpointCoordinator, "job", recorder, 0.0, graph=GRAPH, config=CheckpointConfig(interval=5.0))
    for event, now in (
        (TaskStateChanged(A, TaskState.RUNNING), 0.5),
        (TaskStateChanged(B, TaskState.RUNNING), 0.6),
        (CheckpointRequested("r"), 1.0),
        (Acknowledged(A, 1, TaskSnapshot()), 1.1),
        (Acknowledged(B, 1, TaskSnapshot()), 1.2),
        (MetadataWritten(1, "checkpoints/chk-1"), 1.3),
        (Tick(), 6.4),
    ):
        coordinator.handle(event, now)
    assert coordinator.latest_completed is not None  # attributes that are not recorded are the machine's
    return break_off(lines)


def test_a_recorded_run_is_replayed_with_the_same_actions() -> None:
    lines = recorded_run()
    assert about(lines[0]) == {"pipeline": "p"}
    entries = list(read(lines))
    assert list(replay(entries)) == []
    assert isinstance(entries[0], Created) and entries[0].arguments["graph"] == GRAPH
    triggers = [decode(a) for e in entries if isinstance(e, Handled) for a in e.actions]
    assert [a.task for a in triggers if isinstance(a, TriggerTask)] == [A, A]


def test_without_a_recorder_the_machine_is_plain() -> None:
    coordinator = made(CheckpointCoordinator, "job", None, 0.0, graph=GRAPH, config=CheckpointConfig(interval=None))
    assert type(coordinator) is CheckpointCoordinator


def test_the_lines_of_a_trace() -> None:
    lines: list[str] = []
    recorder = Recorder(lines.append)
    recorder.begin({"pipeline": "Zürich"})
    coordinator = made(CheckpointCoordinator, "job", recorder, 2.5, graph=GRAPH, config=CheckpointConfig(interval=None))
    coordinator.handle(Tick(), 3.5)
    tick = '{"~":"record","v":["coordination.events:Tick",{}]}'
    assert lines[0] == '{"trace":3,"about":{"pipeline":"Zürich"}}'
    assert lines[1].startswith('{"at":2.5,"machine":"job","kind":"coordination.coordinator:CheckpointCoordinator","arguments":{')
    assert lines[2:] == [f'{{"at":3.5,"machine":"job","event":{tick},"actions":[]}}']
    assert [entry.at for entry in read(lines)] == [2.5, 3.5]


def test_a_machine_with_other_actions_is_named() -> None:
    entries = list(read(recorded_run()))
    other = [changed(e, arguments={**e.arguments, "next_checkpoint_id": 7}) if isinstance(e, Created) else e for e in entries]
    differences = list(replay(other))
    assert differences[0].number == 4
    entry = differences[0].entry
    assert str(differences[0]) == (
        f"entry 4: job at 1.000 s took {entry.event}: expected {entry.actions}, found {differences[0].found}"
    )


def test_an_error_is_recorded_and_replayed() -> None:
    lines: list[str] = []
    recorder = Recorder(lines.append)
    recorder.begin({})
    coordinator = made(CheckpointCoordinator, "job", recorder, 0.0, graph=GRAPH, config=CheckpointConfig(interval=None))
    with pytest.raises(Exception, match="Z"):
        coordinator.handle(TaskStateChanged(TaskId("Z", 0), TaskState.RUNNING), 1.0)
    entries = list(read(lines))
    assert isinstance(entries[1], Handled) and entries[1].raised == "UnknownTask"
    assert list(replay(entries)) == []
    (difference,) = replay([entries[0], changed(entries[1], raised="")])
    assert difference.found == "UnknownTask" and str(difference).endswith(": expected [], found UnknownTask")
    (difference,) = replay([entries[0], changed(entries[1], raised="OtherError")])
    assert str(difference).endswith(": expected OtherError, found UnknownTask")


def test_the_last_line_of_a_killed_run_may_be_cut_off() -> None:
    lines = recorded_run()
    cut = [*lines[:-1], lines[-1][:20]]
    assert list(read(cut)) == list(read(lines))[:-1]
    with pytest.raises(CorruptTrace, match=f"line {len(lines)} cannot be read"):
        list(read([*cut, lines[-1]]))


NO_OBJECT = "[" + "1," * 100 + "1]"
OTHER_VERSION = {"trace": 99, "about": {"pipeline": "p" * 100}}


@pytest.mark.parametrize(
    ("first", "read_says", "about_says"),
    [
        ("", "expected a trace of version 3, found 'None' in its first line", "expected a trace of version 3, found '' in"),
        ("no json", "expected a trace of version 3, found 'None' in", "expected a trace of version 3, found 'no json' in"),
        (
            json.dumps(OTHER_VERSION),
            f"expected a trace of version 3, found {str(OTHER_VERSION)[:100]!r} in its first line",
            f"expected a trace of version 3, found {json.dumps(OTHER_VERSION)[:100]!r} in its first line",
        ),
        (
            NO_OBJECT,
            f"line 1: expected an object, found {NO_OBJECT[:100]!r}",
            f"line 1: expected an object, found {NO_OBJECT[:100]!r}",
        ),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(first: str, read_says: str, about_says: str) -> None:
    for lines in ([first], [] if not first else [first, "{}"]):
        with pytest.raises(CorruptTrace) as found:
            list(read(lines))
        assert str(found.value).startswith(read_says)
    with pytest.raises(CorruptTrace) as found:
        about(first)
    assert str(found.value).startswith(about_says)


def test_an_entry_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(CorruptTrace, match=r"^line 2: expected an object, found '\[\]'$"):
        list(read(['{"trace": 3, "about": {}}', "[]"]))


def test_an_event_of_an_unknown_machine_is_refused() -> None:
    with pytest.raises(CorruptTrace, match="never made"):
        list(replay([Handled(0.0, "job", Tick(), [])]))
