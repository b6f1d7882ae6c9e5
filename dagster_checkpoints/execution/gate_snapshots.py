"""The snapshots at an input gate: which are due, what the gate puts into them, and what it captures behind them.

Parts of the input gate, which decides when a snapshot is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from dagster_checkpoints.coordination.barriers.events import ChannelCaptured, SnapshotInputsComplete, StartSnapshot, TakeSnapshot
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.watermarks import MIN_WATERMARK_MS, ChannelWatermark, ValveState
from dagster_checkpoints.execution.elements import BarrierMark, CancelMark, Element
from dagster_checkpoints.execution.input_channel import InputChannel
from dagster_checkpoints.execution.task_events import PinnedChannel, PinnedInputs, PinSnapshot
from dagster_checkpoints.state.metadata import ChannelSnapshot


class InputsCaptured(msgspec.Struct, frozen=True):
    """The in-flight data of an unaligned snapshot is complete.

    Attributes:
        captured: by channel, the elements that were read after the snapshot and belong to it.
    """

    checkpoint_id: int
    captured: dict[str, tuple[Element, ...]]


class PinDue(msgspec.Struct, frozen=True):
    """A `PinSnapshot` to perform, and when the snapshot's alignment began, seconds."""

    pin: PinSnapshot
    since: float


DueAction = TakeSnapshot | StartSnapshot | ChannelCaptured | SnapshotInputsComplete
"""The actions of a barrier handler that wait until the query has caught up."""
_SNAPSHOTS = (TakeSnapshot, StartSnapshot)
"""Those that begin a snapshot."""


class SnapshotDue(msgspec.Struct, frozen=True):
    """An action that is due.

    Attributes:
        since: when its alignment began, seconds.
    """

    action: DueAction
    since: float

    @property
    def checkpoint_id(self) -> int:
        action = self.action
        return action.barrier.checkpoint_id if isinstance(action, _SNAPSHOTS) else action.checkpoint_id

    @property
    def takes_snapshot(self) -> bool:
        """Whether a snapshot is taken, and not only its inputs completed."""
        return isinstance(self.action, _SNAPSHOTS)

    @property
    def stops_job(self) -> bool:
        """Whether the snapshot is the last one of the task, for the savepoint of a stop."""
        return isinstance(self.action, _SNAPSHOTS) and self.action.barrier.properties.stops_job

    @property
    def overtakes(self) -> bool:
        """Whether the snapshot does not wait until the query has caught up."""
        return isinstance(self.action, StartSnapshot)


class GateSnapshots:
    """The snapshots that the barriers at a gate have asked for.

    Args:
        channels: the gate's channels by name.
        valve: returns the state of event time that a snapshot taken now holds.
        timeout: seconds from the creation of a barrier that is no savepoint's until it overtakes what the query has not
            consumed, too; None for never.

    Attributes:
        due: the actions that wait until the query has caught up, or until the barrier overtakes, in order. No element is read
            while they wait, so they all belong to the same positions.
        memory: the state at the barriers of checkpoints whose snapshots are still to come.
    """

    def __init__(
        self, channels: Mapping[str, InputChannel], valve: Callable[[], ValveState], timeout: float | None = None
    ) -> None:
        self.due: deque[SnapshotDue] = deque()
        self.memory = BarrierMemory()
        self._channels = channels
        self._valve = valve
        self._captures = Captures()
        self._timeout = timeout
        self._alignment_began: float | None = None

    def next_deadline(self) -> float | None:
        """When the barrier whose snapshot is due overtakes, by the clock of the barriers' timestamps; None if it does not."""
        action = self.due[0].action if self.due else None
        if self._timeout is None or not isinstance(action, TakeSnapshot) or action.barrier.properties.is_savepoint:
            return None
        return action.barrier.timestamp + self._timeout

    def tick(self, now: float) -> None:
        """Time has passed: the barrier whose snapshot is due may overtake what the query has not consumed."""
        deadline = self.next_deadline()
        if deadline is not None and now >= deadline:
            due = self.due.popleft()
            assert isinstance(due.action, TakeSnapshot)
            barrier = due.action.barrier.overtaking()
            self.due.appendleft(SnapshotDue(SnapshotInputsComplete(barrier.checkpoint_id), due.since))
            self.due.appendleft(SnapshotDue(StartSnapshot(barrier, ()), due.since))

    def retains(self, channel: InputChannel) -> bool:
        """Whether elements of the channel belong to a snapshot that is not stored yet."""
        return channel.captured is not None or self._captures.contain(channel.name)

    def alignment_begins(self, now: float) -> None:
        """A barrier blocks its channel."""
        if self._alignment_began is None:
            self._alignment_began = now

    def alignment_ends(self) -> None:
        """The checkpoint was given up."""
        self._alignment_began = None

    def add(self, action: DueAction, now: float) -> None:
        """The barrier handler asks for this action."""
        self.due.append(SnapshotDue(action, now if self._alignment_began is None else self._alignment_began))
        self._alignment_began = None

    def drop(self, checkpoint_id: int) -> None:
        """The checkpoint was aborted: none of its actions is due any more."""
        kept = [due for due in self.due if due.checkpoint_id != checkpoint_id]
        self.due.clear()
        self.due.extend(kept)

    def give_up(self, checkpoint_id: int) -> bool:
        """Discard an unaligned snapshot whose inputs are not complete; returns whether there was one."""
        return self._captures.give_up(checkpoint_id, self._channels.values())

    def take_next(self) -> PinDue | InputsCaptured | None:
        """Perform the first action that is due; returns what the task has to do for it."""
        due = self.due.popleft()
        action = due.action
        match action:
            case TakeSnapshot():
                return self._pin(action.barrier, due.since)
            case StartSnapshot():
                pin = self._pin(action.barrier, due.since, overtaking=True)
                self._captures.begin(action.barrier.checkpoint_id, [self._channels[name] for name in action.in_flight])
                return pin
            case ChannelCaptured():
                self._captures.end(action.checkpoint_id, self._channels[action.channel])
                return None
            case SnapshotInputsComplete():
                return self._captures.complete(action.checkpoint_id)

    def _pin(self, barrier: CheckpointBarrier, since: float, *, overtaking: bool = False) -> PinDue:
        inputs = pinned_inputs(self._channels.values(), self._valve(), barrier.checkpoint_id, self.memory)
        self.memory.forget(barrier.checkpoint_id)
        return PinDue(PinSnapshot(barrier, inputs, overtaking), since)


class Captures:
    """Unaligned snapshots that were begun, and by channel the elements that were read after them so far."""

    def __init__(self) -> None:
        self._captured: dict[int, dict[str, tuple[Element, ...]]] = {}

    def begin(self, checkpoint_id: int, channels: Iterable[InputChannel]) -> None:
        """Keep the elements that are read on these channels from now on."""
        self._captured[checkpoint_id] = {}
        for channel in channels:
            channel.captured = []

    def end(self, checkpoint_id: int, channel: InputChannel) -> None:
        """The barrier of the channel was read, or announced behind elements that belong to the snapshot, too."""
        captured, channel.captured = channel.captured or [], None
        if channel.announced == checkpoint_id:
            captured = [*captured, *(e for e in channel.unread if not isinstance(e, BarrierMark | CancelMark))]
        if checkpoint_id in self._captured:
            self._captured[checkpoint_id][channel.name] = tuple(captured)

    def contain(self, channel: str) -> bool:
        """Whether elements of the channel were captured for a snapshot that is not complete."""
        return any(channel in captured for captured in self._captured.values())

    def complete(self, checkpoint_id: int) -> InputsCaptured | None:
        """The elements that belong to the snapshot; None if it was given up."""
        captured = self._captured.pop(checkpoint_id, None)
        return None if captured is None else InputsCaptured(checkpoint_id, captured)

    def give_up(self, checkpoint_id: int, channels: Iterable[InputChannel]) -> bool:
        """Discard a snapshot; returns False if none was begun, or it is complete."""
        if self._captured.pop(checkpoint_id, None) is None:
            return False
        for channel in channels:
            channel.captured = None
        return True


class BarrierMemory:
    """At-least-once: the state of a channel at its barrier. The elements behind the barrier are read again after a restore."""

    def __init__(self) -> None:
        self._before_end: set[int] = set()
        """Checkpoints of which a barrier was in front of its channel's end of data."""
        self._at_barrier: dict[tuple[int, str], tuple[ChannelWatermark, int]] = {}
        """By checkpoint and channel: the channel's event time, and the number of its held elements."""

    def remember(self, channel: InputChannel, checkpoint_id: int, valve: ValveState) -> None:
        """Remember the state of a channel on which a barrier is next."""
        if channel.ended != "none" or channel.ended_in_scan:
            return
        self._before_end.add(checkpoint_id)
        if not channel.static:
            self._at_barrier[checkpoint_id, channel.name] = (valve.channels[channel.name], len(channel.held))

    def ended_behind(self, checkpoint_id: int) -> bool:
        """Whether an upstream task emits again after a restore of the checkpoint: its data ended behind its barrier."""
        return checkpoint_id in self._before_end

    def at_barrier(self, checkpoint_id: int, channel: str) -> tuple[ChannelWatermark, int] | None:
        """The channel's event time at its barrier, and the number of elements that were held; None if they are the
        present ones."""
        return self._at_barrier.get((checkpoint_id, channel))

    def forget(self, upto: int) -> None:
        """Forget the state at barriers up to this checkpoint: its snapshot is taken, and subsumes earlier ones."""
        self._before_end = {i for i in self._before_end if i > upto}
        self._at_barrier = {key: known for key, known in self._at_barrier.items() if key[0] > upto}


def pinned_inputs(channels: Iterable[InputChannel], valve: ValveState, checkpoint_id: int, memory: BarrierMemory) -> PinnedInputs:
    """The inputs' part of a snapshot that is taken now."""
    return PinnedInputs(
        tuple(_pinned(c, valve, memory.at_barrier(checkpoint_id, c.name)) for c in channels), _known(valve.watermark)
    )


def _pinned(channel: InputChannel, valve: ValveState, then: tuple[ChannelWatermark, int] | None) -> PinnedChannel:
    if channel.static:
        ended = channel.ended_in_scan or channel.ended != "none"
        return PinnedChannel(ChannelSnapshot(channel.name, channel.scanned, ended="drain" if ended else "none"))
    known, held = valve.channels[channel.name], tuple(channel.held)
    if then is not None:
        known, held = then[0], held[: then[1]]  # the elements behind the barrier are read again
    # The first of held elements is behind the position; the rest are counted again after a restore.
    position = held[0][0] - 1 if held else channel.taken_in
    snapshot = ChannelSnapshot(channel.name, position, _known(known.watermark), known.idle, known.ended, behind=known.behind)
    return PinnedChannel(snapshot, tuple(element for _, element in held))


def _known(watermark: int) -> int | None:
    return None if watermark <= MIN_WATERMARK_MS else watermark
