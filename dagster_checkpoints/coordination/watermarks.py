"""The watermark of a task: the minimum over its input channels.

One valve per task (or per streaming input). Watermarks are integers, milliseconds since 1970. Must not know:
records, Spark, after what time a channel counts as idle.

Source: Flink's StatusWatermarkValve. It differs in one point: a channel that has ended does not decide for
idle ones, so that an ended backfill beside an idle live feed does not fire the live feed's windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from dagster_checkpoints.coordination.errors import UnexpectedEvent, UnknownChannel

MAX_WATERMARK_MS = 10**15
"""No record follows: the year 33658, later than any timestamp that a user can write (the year 9999), so that a
window over 9999-12-31 fires too. The runtime translates it into Spark's own maximum, 253402300799000
(9999-12-31T23:59:59)."""
MIN_WATERMARK_MS = -(10**15)
"""No watermark yet; earlier than the year 1."""

Ended = Literal["none", "drain", "suspend"]


class ChannelWatermark(msgspec.Struct, frozen=True):
    """The state of one channel in a valve: the part of a snapshot that belongs to the channel.

    Attributes:
        watermark: its last watermark, epoch ms.
        idle: whether it is idle.
        ended: how it has ended.
        behind: whether it came back from idleness behind the task's watermark and has not caught up: it is left out of the
            minimum, as opposed to an active channel that is only behind, perhaps because it is new.
    """

    watermark: int = MIN_WATERMARK_MS
    idle: bool = False
    ended: Ended = "none"
    behind: bool = False


class ValveState(msgspec.Struct, frozen=True):
    """The state of a valve in a checkpoint."""

    watermark: int = MIN_WATERMARK_MS
    channels: Mapping[str, ChannelWatermark] = msgspec.field(default_factory=dict)


class _Channel(msgspec.Struct):
    watermark: int = MIN_WATERMARK_MS
    idle: bool = False
    ended: Ended = "none"
    aligned: bool = True
    """False for a channel that is idle, or came back from idleness behind the task's watermark and has not caught up."""

    @property
    def at_end(self) -> bool:
        return self.ended == "drain" or self.watermark >= MAX_WATERMARK_MS


class WatermarkValve:
    """The task's watermark: the minimum over its open channels; it never goes back.

    Each method returns the new watermark of the task if it moved, else None.
    """

    def __init__(self, channels: Iterable[str]) -> None:
        self._channels = {channel: _Channel() for channel in channels}
        self._output = MIN_WATERMARK_MS

    @property
    def watermark(self) -> int:
        """The task's watermark, MIN_WATERMARK_MS as long as a channel has none."""
        return self._output

    @property
    def is_idle(self) -> bool:
        """Whether all open channels are idle: the task is then idle for its consumers."""
        channels = [c for c in self._channels.values() if not c.at_end]
        return bool(channels) and all(c.idle for c in channels)

    def advance(self, channel: str, ms: int) -> int | None:
        """A watermark has arrived. An earlier one than before is ignored; an idle channel is active again."""
        state = self._open(channel)
        self._wake(state)
        if ms > state.watermark:
            state.watermark = min(ms, MAX_WATERMARK_MS)
            state.aligned = state.aligned or state.watermark >= self._output
        return self._recompute()

    def idle(self, channel: str) -> int | None:
        """The channel is idle: it is left out of the minimum until it is active again."""
        state = self._known(channel)
        if state.ended != "none" or state.idle:
            return None
        state.idle = True
        state.aligned = False
        return self._recompute()

    def active(self, channel: str) -> int | None:
        """The channel is active again. If it is behind the task's watermark, it is left out until it has caught up."""
        state = self._known(channel)
        if state.ended == "none":
            self._wake(state)
        return self._recompute()

    def end(self, channel: str, drain: bool) -> int | None:
        """EndOfData has arrived: after a drain the channel counts as MAX_WATERMARK, after a suspend it keeps its
        last watermark."""
        state = self._known(channel)
        if state.ended == "none":
            self._wake(state)
            state.ended = "drain" if drain else "suspend"
        return self._recompute()

    def ended(self, channel: str) -> Ended:
        """How the channel has ended, or "none"."""
        return self._known(channel).ended

    def snapshot(self) -> ValveState:
        """The state for a checkpoint: all of it, so that a restored valve does with each event what this one does."""
        channels = self._channels.items()
        return ValveState(
            self._output,
            {name: ChannelWatermark(c.watermark, c.idle, c.ended, not (c.idle or c.aligned)) for name, c in channels},
        )

    def restore(self, state: ValveState) -> int | None:
        """Continue from a checkpoint's state. Channels that are not in it start without a watermark; channels that do not exist
        any more are ignored."""
        before = self._output
        self._output = max(self._output, state.watermark)
        for name, saved in state.channels.items():
            if name in self._channels:
                aligned = not (saved.idle or saved.behind)
                self._channels[name] = _Channel(saved.watermark, saved.idle, saved.ended, aligned)
        self._recompute()
        return self._output if self._output > before else None

    def _recompute(self) -> int | None:
        channels = self._channels.values()
        waiting = [c for c in channels if not c.at_end]
        if not channels:
            return None
        if not waiting:
            candidate = MAX_WATERMARK_MS
        elif all(c.idle for c in waiting):
            # No idle channel holds the others back; the result does not depend on which of them became idle last.
            candidate = max(c.watermark for c in waiting)
        else:
            candidate = min((c.watermark for c in waiting if c.aligned), default=MIN_WATERMARK_MS)
        if candidate <= self._output:
            return None
        self._output = candidate
        return candidate

    def _wake(self, state: _Channel) -> None:
        if state.idle:
            state.idle = False
            state.aligned = state.watermark >= self._output

    def _known(self, channel: str) -> _Channel:
        state = self._channels.get(channel)
        if state is None:
            raise UnknownChannel(
                f"Channel {channel!r} is not an input of this task, which has "
                f"{', '.join(self._channels) or 'no inputs'}. Feed a valve only the channels it was made with."
            )
        return state

    def _open(self, channel: str) -> _Channel:
        state = self._known(channel)
        if state.ended != "none":
            raise UnexpectedEvent(
                f"Channel {channel!r} delivered a watermark after its EndOfData ({state.ended}). Nothing may "
                "follow EndOfData; the channel's log or the position it was restored at is wrong."
            )
        return state
