"""A simulated task whose chain begins with fused sources: the shipped machine decides which of them have ended.

A step of the query is a micro-batch: it asks every source that has not ended, and reads some of its records. The machine is told
at once, or after later steps, as by the runtime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from dagster_checkpoints.execution.attempt_plan import TaskPlan
from dagster_checkpoints.execution.elements import WatermarkStatus
from dagster_checkpoints.execution.fused_sources import FusedSources
from dagster_checkpoints.execution.task_events import PinSnapshot, SourcesAsked
from dagster_checkpoints.execution.task_machine import TaskMachine, TaskTraits
from simulation.channels import Channel, Ghost, Snapshot, mix, source_row, source_watermark
from simulation.operators import Operator
from simulation.shapes import StageSpec, name_of
from simulation.task import RUNNING, Task
from simulation.violations import check

if TYPE_CHECKING:
    from simulation.process import Process

IDLE_AFTER = 1.0


@dataclass(slots=True, eq=False)
class FusedReader:
    """One fused source.

    Attributes:
        stage: number of its stage.
        splits: [split, position] of each of its splits.
        held: whether it is held to what is there.
        to_end: whether it ends when it has read that.
        bound: in a burst, the number of records that it has yet to read while it is not to end; None for all.
        ended: whether it was asked after it was held, and had nothing more.
        watermark: the latest watermark that was reported of it.
    """

    stage: int
    spec: StageSpec
    operator: Operator
    splits: list[list[int]] = field(default_factory=list)
    held: bool = False
    to_end: bool = False
    bound: int | None = None
    ended: bool = False
    watermark: int = MIN_WATERMARK_MS

    @property
    def name(self) -> str:
        return name_of(self.stage)

    @property
    def unread(self) -> list[list[int]]:
        return [split for split in self.splits if split[1] < self.spec.records_of(split[0])]

    def read(self, times: int) -> int:
        """Emit up to `times` records. Returns their number."""
        for count in range(times):
            unread = self.unread
            if not unread or self.bound == 0:
                return count
            if self.bound is not None:
                self.bound -= 1
            split = min(unread, key=itemgetter(1))
            uid, ts, key = source_row(self.stage, *split)
            split[1] += 1
            self.operator.forward(uid, ts, key)
        return times

    def time(self) -> int | None:
        """The watermark of the records that are not read yet; None if there are none, and none follow."""
        unread = self.unread if self.spec.kind == "bounded" else self.splits
        return source_watermark(min(position for _, position in unread)) if unread else None


class FusedTask(Task):
    """The task; see the module's text."""

    __slots__ = ("asked", "batches", "by_the_clock", "decided", "ran_under", "readers", "sources_stopped")

    def __init__(
        self, process: Process, number: int, channels: Sequence[Channel], restored: Snapshot | None, planned: TaskPlan
    ) -> None:
        super().__init__(process, number, channels, restored, planned)
        self.asked: deque[SourcesAsked] = deque()
        """What the machine was not told yet."""
        self.decided = self.ran_under = MIN_WATERMARK_MS
        """The event time that the machine has decided, and that of the newest micro-batch."""
        self.batches = 0
        self.by_the_clock = mix(process.scenario.seed, number) % 4 == 0
        """Whether the query has timers of processing time: it always has more to do."""
        self.sources_stopped = False

    def _make_machine(self, restored: Snapshot) -> TaskMachine:
        spec, process = self.process.shape.tasks[self.number], self.process
        numbered = list(zip(spec.stages, self.operators, strict=True))[: spec.fused]
        self.readers = [FusedReader(stage, process.shape.stages[stage], op) for stage, op in numbered]
        idle_after = IDLE_AFTER if process.scenario.idle else None
        sources = []
        for position, (reader, source) in enumerate(zip(self.readers, self.begins.fused, strict=True)):
            known = source.restored
            check(source.name == reader.name, "{}: source {} is planned as {}", self.id, reader.name, source.name)
            check(known is None or source.position == position, "{}: source {} is restored at {}", self.id, reader.name, source)
            # The pipeline declares no event time: rows have one all the same.
            sources.append(replace(source, position=position, event_time=True, idle_after=idle_after))
            reader.to_end = source.bounded
            splits = restored.ghost.fused.get(reader.stage) or [(split, 0) for split in range(reader.spec.splits)]
            reader.splits = [list(split) for split in splits]
            if known is not None:
                reader.ended, watermark = known.ended, known.watermark
                reader.watermark = MIN_WATERMARK_MS if watermark is None else watermark
        self.source = "bounded" if all(source.bounded for source in sources) else "unbounded"
        return TaskMachine(
            self.id,
            process.config,
            valve_watermark=restored.valve,
            traits=TaskTraits(finished_before=self.begins.after_finish, burst=process.requested_start.burst),
            fused=tuple(sources),
        )

    @property
    def fused(self) -> FusedSources:
        assert self.machine.fused is not None
        return self.machine.fused

    # Reading

    def can_read(self) -> bool:
        life = self.life
        if not self.started or self.done or life._paused or life._state is not RUNNING:
            return False
        return bool(self.asked) or self._may_read()

    def _may_read(self) -> bool:
        """Whether a source has records, or is to be asked again until it has ended or, in a burst, caught up; or whether
        event time has advanced since the newest micro-batch."""
        asks = not self.process.requested_start.burst or not self.fused.caught_up
        readable = any(not r.ended and ((r.held and asks) or (r.unread and r.bound != 0)) for r in self.readers)
        return readable or self.ran_under != self.decided

    def hold_to_burst(self) -> None:
        """The machine holds the sources."""

    def unread_in_burst(self) -> int:
        open_readers = [reader for reader in self.readers if not reader.ended]
        # A user who asks an unbounded source to end may be late: the suspend is under way. It is suspended before it has read the
        # rest, or has just ended, which moves event time: the next run goes on with both.
        if self.ran_under != self.fused.watermark and not any(r.to_end and r.spec.kind == "unbounded" for r in self.readers):
            return 1  # what is due under the newest event time is not emitted
        return sum(max(len(r.unread), 1) if r.spec.kind == "bounded" else r.bound or 0 for r in open_readers)

    def emit_records(self, times: int) -> bool:
        """A micro-batch with up to `times` records of each source; or the machine is told of earlier ones."""
        if not self.can_read():
            return False
        self.batches += 1
        late = self.batches % 3 == 0
        if not (self.asked and late) and self._may_read():
            self._run_micro_batch(times)
        if not late:
            self._tell()
        return True

    def _run_micro_batch(self, times: int) -> None:
        check(self.stopped_by is None, "{} reads a source after the stop's savepoint {}", self.id, self.stopped_by)
        if self.output.idle:
            self.send_event_time(WatermarkStatus(False))
        self._run_under_decided()
        moved: list[str] = []
        unmoved: list[str] = []
        for number, reader in enumerate(self.readers):
            if reader.ended:
                continue
            count = reader.read(times if self.batches >> number & 1 else 1)
            self.process.count("records")
            (moved if count else unmoved).append(reader.name)
        times_of = {r.name: time for r in self.readers if not r.ended and (time := r.time()) is not None}
        self.asked.append(SourcesAsked(tuple(moved), tuple(unmoved), times_of, self.ran_under))

    def _tell(self) -> None:
        while self.asked and self.machine.running:
            event = self.asked.popleft()
            idle = not (self.asked or event.moved or self.by_the_clock)
            event = replace(event, settled=idle and self.ran_under == self.decided)
            for reader in self.readers:
                if reader.name in event.unmoved and reader.to_end:
                    reader.ended = True
                reader.watermark = max(reader.watermark, event.watermarks.get(reader.name, MIN_WATERMARK_MS))
            self.handle(event)
            self._check_sources()

    def _check_sources(self) -> None:
        """The machine has ended exactly the sources that were held, asked again, and had nothing more."""
        if not self.machine.running:
            return
        ended = {reader.name for reader in self.readers if reader.ended}
        check(self.fused.ended == ended, "{} takes {} for ended, not {}", self.id, self.fused.ended, ended)
        if self.process.knows_event_time:
            least = min((r.watermark for r in self.readers if not r.ended), default=MAX_WATERMARK_MS)
            self.valve_seen = max(least, self.valve_seen)
            check(self.fused.watermark == self.valve_seen, "{}: event time is {}, not {}", self.id, self.fused.watermark, least)

    def fall_idle(self) -> bool:
        if not self.process.scenario.idle or not self.started or not self.machine.running or self.machine.paused or self.asked:
            return False
        silent = tuple(r.name for r in self.readers if not r.ended and not r.held and not r.unread)
        if not silent:
            return False
        self.handle(SourcesAsked(unmoved=silent))
        return True

    # Actions of the machine

    def advance(self, ms: int) -> None:
        if ms < MAX_WATERMARK_MS:
            self.decided = ms
        if not self.stateful or ms >= MAX_WATERMARK_MS:
            super().advance(ms)

    def _run_under_decided(self) -> None:
        """State knows only the event time that a micro-batch runs under: a checkpoint may come before that micro-batch."""
        if self.ran_under != self.decided:
            self.ran_under = self.decided
            super().advance(self.decided)

    def stop_source(self) -> None:
        self.sources_stopped = True
        self.asked.clear()

    def hold(self, sources: Sequence[str]) -> None:
        process = self.process
        for reader in self.readers:
            if reader.name in sources:
                check(not reader.ended, "{} reads {} again, which has ended", self.id, reader.name)
                self.process.count("held sources")
                # In a burst the sources are held a first time when the query begins.
                reader.to_end = reader.to_end or reader.held or not process.requested_start.burst
                left = sum(reader.spec.records_of(split) - position for split, position in reader.splits)
                numbers = (process.scenario.seed, process.number, process.attempt, reader.stage)
                reader.bound = None if reader.to_end else mix(*numbers) % (max(left, 0) + 1)
                reader.held = True
        # The query has asked them before they were held.
        self.asked = deque(
            replace(event, unmoved=tuple(name for name in event.unmoved if name not in sources)) for event in self.asked
        )

    def finish_operators(self) -> None:
        left = [reader.name for reader in self.readers if not reader.ended]
        check(not left or self.sources_stopped, "{} finishes before its sources {} have ended", self.id, left)
        super().finish_operators()

    # Snapshots

    def restore(self, snapshot: Snapshot, stages: Sequence[Sequence[object]]) -> None:
        super().restore(snapshot, stages)
        self.valve_seen = self.fused.watermark
        check(snapshot.valve is None or self.valve_seen == snapshot.valve, "{}: a restore moves event time", self.id)
        restored = self.process.restored
        assert restored is not None
        finished = {reader.name for reader in self.readers if reader.ended}
        recorded = restored.plan.fully_finished & {reader.name for reader in self.readers}
        check(recorded == finished, "{}: {} are restored as finished, not {}", self.id, recorded, finished)

    def restored_event_time(self, snapshot: Snapshot) -> int:
        self.decided = self.ran_under = snapshot.event_time
        return snapshot.event_time

    def pin(self, action: PinSnapshot) -> Snapshot:
        recorded = {source.source for source in action.inputs.fused if source.ended}
        ended = {reader.name for reader in self.readers if reader.ended}
        check(recorded == ended, "{} records {} as ended, not {}", self.id, recorded, ended)
        if ended and not self.machine.operators_finished:
            self.process.count("ended sources in checkpoints")
        return super().pin(action)

    def _content(self) -> str:
        done = sum(position for reader in self.readers for _, position in reader.splits)
        return f"{super()._content()}+{done}"

    def ghost(self) -> Ghost:
        ghost = super().ghost()
        fused = {r.stage: tuple((split, position) for split, position in r.splits) for r in self.readers}
        return Ghost(ghost.read, ghost.sent, ghost.written, ghost.splits, ghost.counted, fused)
