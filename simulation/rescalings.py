"""A simulated checkpoint whose stages have other instances now: the snapshots and tallies of its tasks, as these would have them.

The shipped rules say what each task begins with: which state, channels, splits and transactions, and at which event time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from msgspec.structs import replace as replaced

from dagster_checkpoints.coordination.watermarks import MIN_WATERMARK_MS
from dagster_checkpoints.execution.elements import Mark
from dagster_checkpoints.execution.task_events import PinnedChannel
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.sinks.ledger import Commit, Staged
from dagster_checkpoints.state.metadata import (
    ChannelElement,
    ChannelSnapshot,
    LastCommit,
    OperatorState,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StateFile,
    StaticTableSnapshot,
    TaskSnapshot,
)
from dagster_checkpoints.state.rescaled_channels import SegmentShare
from dagster_checkpoints.state.restore import RestorePlan
from simulation.channels import Element, Ghost, Snapshot, key_group, tally, total
from simulation.operators import operator
from simulation.shapes import Shape, StageSpec, TaskSpec, name_of
from simulation.storage import Metadata

KEYED = ("window", "totals")
"""The kinds of stages with state by key, which the key groups of an instance decide."""


def recorded_task(snapshot: Snapshot, shape: Shape, spec: TaskSpec, overtaken: Mapping[str, tuple[Element, ...]]) -> TaskSnapshot:
    """A task as shipped metadata.

    Args:
        snapshot: its snapshot.
        shape: the pipeline.
        spec: the task.
        overtaken: by channel, the elements that a barrier has overtaken at its producer: on Spark all wait at the consumer.
    """
    parts = zip(spec.stages, snapshot.stages, strict=True)
    known = []
    for name, pinned in snapshot.channels.items():
        in_flight = tuple(map(_recorded_element, (*pinned.in_flight, *overtaken.get(name, ()))))
        known.append(replaced(pinned.snapshot, position=0, in_flight=in_flight))
    static = {shape.channels[n].edge: shape.channels[n].id.producer for n in spec.inputs if shape.channels[n].static}
    return TaskSnapshot(
        stages={
            name_of(n): _recorded_part(shape.stages[n], state, snapshot if n == spec.stages[-1] else Snapshot())
            for n, state in parts
        },
        query=QuerySnapshot(0, _state_files(spec, shape), sources=()),
        channels=tuple(known),
        static=tuple(StaticTableSnapshot(source, (_segment(snapshot.tables[edge]),)) for edge, source in static.items()),
        end_of_data="drain" if snapshot.after_finish else "none",
        watermark=snapshot.watermark,
        valve_watermark=snapshot.valve,
        fused=snapshot.fused,
        splits=snapshot.splits,
    )


def _state_files(spec: TaskSpec, shape: Shape) -> tuple[StateFile, ...]:
    """The state of a query by its operators: those of stages with state by key."""
    operators = sum(shape.stages[number].kind in KEYED for number in spec.stages)
    return tuple(StateFile(f"state/{number}/0/1.zip", "", 0) for number in range(operators))


def _segment(rows: Collection[Any]) -> Segment:
    """Rows as shipped metadata: a file each, whose path is the row."""
    return Segment(tuple(StateFile(json.dumps(row), "", 0) for row in rows), len(rows))


def _rows(segment: Segment) -> Iterator[Any]:
    return (json.loads(file.path) for file in segment.files)


def _recorded_element(element: Element) -> ChannelElement:
    return element if isinstance(element, Mark) else _segment([element])  # type: ignore[return-value]  # no mark of a barrier


def _elements(channel: ChannelSnapshot) -> Iterator[Element]:
    """The elements in flight on a channel, as the consumer gets them: of a share the rows of its key groups."""
    for element in channel.in_flight:
        if not isinstance(element, Segment):
            yield element
            continue
        for uid, ts, key in _rows(element):
            if not isinstance(element, SegmentShare) or key_group(key, element.key_groups) in element.groups:
                yield (uid, ts, key)


def _recorded_part(spec: StageSpec, state: Any, sink: Snapshot) -> StageInstanceSnapshot:
    """One instance of a stage as shipped metadata.

    Args:
        spec: the stage.
        state: its state.
        sink: what has the transactions of its sink.
    """
    if spec.kind == "broadcast":
        states = [OperatorState(name, "broadcast", (_text(value),)) for name, value in state.items()]
    elif spec.kind in ("buffer", "union"):
        kind = "list" if spec.kind == "buffer" else "union"
        states = [OperatorState(name, kind, tuple(map(_text, items))) for name, items in state.items()]  # type: ignore[arg-type]
    else:
        states = []
    names = tuple(msgspec.json.encode(transaction).decode() for transaction in sink.transactions)
    plan = (spec.kind,) if spec.kind in KEYED else ()
    last = None if sink.committed is None else LastCommit(msgspec.json.encode(sink.committed).decode(), "")
    return StageInstanceSnapshot(tuple(states), names, state_plan=plan, committed=last)


def transactions(texts: Collection[str]) -> tuple[Staged, ...]:
    """The transactions that shipped metadata holds."""
    return tuple([msgspec.json.decode(text, type=Staged) for text in texts])


def last_commit(recorded: LastCommit | None) -> Commit | None:
    """What a sink had committed last, from shipped metadata."""
    return None if recorded is None else msgspec.json.decode(recorded.transaction, type=Commit)


def with_instances(metadata: Metadata, before: Shape, after: Shape, variant: int, plan: RestorePlan) -> Metadata:
    """The checkpoint as if it had been taken with other instances.

    Args:
        metadata: the checkpoint.
        before: the pipeline that has taken it.
        after: the same pipeline with other instances.
        variant: index of `after` in the variants.
        plan: the plan of the restore into `after`.
    """
    made = _Rescaled(metadata, before, after, plan)
    states = {spec.id: made.snapshot(spec) for spec in after.tasks if spec.id in plan.tasks}
    for task, snapshot in states.items():
        snapshot.ghost = made.ghosts[task]
    return replace(metadata, variant=variant, states=states, ghosts=made.ghosts, finished=plan.finished)


class _Rescaled:
    """One checkpoint, and the plan of its restore."""

    def __init__(self, metadata: Metadata, before: Shape, after: Shape, plan: RestorePlan) -> None:
        self.metadata = metadata
        self.before = before
        self.after = after
        self.plan = plan
        self.shares = plan.shares
        self.old = {spec.id: spec for spec in before.tasks}
        self.names = {stage.name: stage.instances for stage in before.pipeline.stages}
        self.now = {stage.name: stage.instances for stage in after.pipeline.stages}
        self.ghosts = self._ghosts()

    def siblings(self, vertex: str) -> list[Snapshot | None]:
        """By old instance, its snapshot; None for a finished one."""
        return [self.metadata.states.get(TaskId(vertex, index)) for index in range(len(self.names[vertex]))]

    def origin(self, task: TaskId) -> TaskId | None:
        """The old instance of the same name."""
        name = self.now[task.vertex][task.index]
        old = self.names[task.vertex]
        return TaskId(task.vertex, old.index(name)) if name in old else None

    # Snapshots

    def snapshot(self, spec: TaskSpec) -> Snapshot:
        planned, siblings = self.plan.tasks[spec.id], self.siblings(spec.id.vertex)
        share = self.shares.get(spec.id)
        same = siblings[spec.id.index] if self.names[spec.id.vertex] == self.now[spec.id.vertex] else None
        continued = siblings[share.logs] if share is not None else same
        times = [s.event_time for s in (siblings if continued is None else (continued,)) if s is not None]
        return Snapshot(
            after_finish=planned.end_of_data == "drain",
            channels={c.channel: PinnedChannel(replaced(c, in_flight=()), tuple(_elements(c))) for c in planned.channels},
            valve=planned.valve_watermark,
            event_time=min(times, default=MIN_WATERMARK_MS),
            watermark=planned.watermark,
            stages=tuple([self._state(spec, position, planned, same) for position in range(len(spec.stages))]),
            tables=self._tables(spec, planned),
            transactions=self._transactions(spec, planned),
            committed=last_commit(planned.stages[name_of(spec.stages[-1])].committed),
            contents=same.contents if same is not None else (),
            files=same.files if same is not None else (),
            fused=planned.fused,
            splits=planned.splits,
        )

    def _state(self, spec: TaskSpec, position: int, planned: TaskSnapshot, same: Snapshot | None) -> Any:
        number = spec.stages[position]
        stage, part = self.after.stages[number], planned.stages[name_of(number)]
        if stage.kind in KEYED:
            share = self.shares.get(spec.id)
            if share is None:
                return same.stages[position] if same is not None else {}
            held = [self.metadata.states[TaskId(spec.id.vertex, index)].stages[position] for index in share.queries]
            return {
                name: value
                for state in held
                for name, value in state.items()
                if key_group(name[-1], share.number) in share.groups
            }
        found = {state.name: list(map(json.loads, state.items)) for state in part.operator_states}
        if stage.kind == "broadcast":
            return {name: value for name, (value,) in found.items()}
        if stage.kind == "buffer":
            return {name: tuple([tuple(item) for item in items]) for name, items in found.items()}
        return found if stage.kind == "union" else operator(number, stage, spec.id.index).snapshot()

    def _tables(self, spec: TaskSpec, planned: TaskSnapshot) -> dict[int, frozenset[int]]:
        """The static tables that the plan has."""
        held = {table.input: frozenset(uid for segment in table.segments for uid in _rows(segment)) for table in planned.static}
        edges = {c.edge: c.id.producer for c in (self.after.channels[n] for n in spec.inputs) if c.static}
        return {edge: held.get(source, frozenset()) for edge, source in edges.items()}

    def _transactions(self, spec: TaskSpec, planned: TaskSnapshot) -> tuple[Staged, ...]:
        return transactions(planned.stages[name_of(spec.stages[-1])].transactions)

    # Tallies

    def _ghosts(self) -> dict[TaskId, Ghost]:
        """The tallies of a task that is gone count for the first instance that there is."""
        ghosts = self.metadata.ghosts
        by_name = {task: spec.id for spec in self.after.tasks if (task := self.origin(spec.id)) is not None}
        taken: dict[TaskId, list[Ghost]] = {spec.id: [] for spec in self.after.tasks}
        for task, spec in self.old.items():
            ghost = ghosts[task]
            if task not in by_name and not self.before.stages[spec.stages[0]].enumerated:
                ghost = replaced(ghost, splits=(), retired=(*ghost.retired, *ghost.splits))
            taken[by_name.get(task, TaskId(task.vertex, 0))].append(ghost)
        static = {channel.edge for channel in self.after.channels if channel.static}
        return {spec.id: self._ghost(spec, taken[spec.id], static) for spec in self.after.tasks}

    def _ghost(self, spec: TaskSpec, parts: list[Ghost], static: set[int]) -> Ghost:
        of_any = [self.metadata.ghosts[task] for task in self.old if task.vertex == spec.id.vertex]
        edges = {self.after.channels[n].edge for n in spec.inputs} & static
        whole = {edge: max(ghost.read.get(edge, 0) for ghost in of_any) for edge in edges}
        if spec.id in self.plan.tasks:
            whole = {edge: tally(rows) for edge, rows in self._tables(spec, self.plan.tasks[spec.id]).items()}
        read = {edge: rows for edge, rows in total(ghost.read for ghost in parts).items() if edge not in static}
        counted: dict[int, int] = dict(total(ghost.counted for ghost in parts))
        splits = [split for ghost in parts for split in ghost.splits if self._is_kept(spec, split)]
        retired = [split for ghost in parts for split in ghost.retired]
        return Ghost(
            {**read, **whole},
            total(ghost.sent for ghost in parts),
            sum(ghost.written for ghost in parts),
            tuple(splits),
            counted,
            parts[0].fused if parts else {},
            tuple(retired),
        )

    def _is_kept(self, spec: TaskSpec, split: tuple[int, int]) -> bool:
        """Whether the position in a split is kept: the enumerator assigns those that were not begun again."""
        enumerator = self.plan.enumerators.get(name_of(spec.stages[0]))
        return enumerator is None or str(split[0]) in enumerator.finished


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()
