"""The fused sources of one task: which of them have ended, and the event time of all of them together.

Several sources run in the query of the stage that reads them, and each keeps an end of its own:

    open ── bounded, or a request to end it ──> held to what is there now ── asked again, and nothing new ──> ended

In a burst (`execution.burst`) all sources are held from the beginning; an unbounded one that has nothing new, when the query has
run under the event time of all, has caught up, and has not ended: it can still be asked to end, and reads what is there by then.

A source that has ended is left out of the minimum of event time. Its stage finishes with the next checkpoint, which records it,
although the task runs on; when all sources have ended, so have the data of the task. A source that had ended in the restored
checkpoint is never read again.

It must not know: how the driver holds a source or asks it, offsets, Spark.

Source: PROTOCOL sections 1, 4 and 5; Flink's MultipleInputStreamTask with chained sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.watermarks import MIN_WATERMARK_MS, ChannelWatermark, ValveState, WatermarkValve
from dagster_checkpoints.execution.elements import WatermarkStatus
from dagster_checkpoints.execution.task_events import AdvanceEventTime, Forward, HoldSources, SourcesAsked
from dagster_checkpoints.state.metadata import FusedSourceSnapshot

FusedAction = HoldSources | AdvanceEventTime | Forward


class FusedSource(msgspec.Struct, frozen=True):
    """One fused source, as an attempt begins with it.

    Attributes:
        name: name of its stage.
        position: position of its stream among the streams of the query, from 0.
        bounded: whether it ends by itself, or was asked to end before the restart.
        event_time: whether it declares a watermark.
        idle_after: seconds without rows after which it is left out of the minimum; None if it never is.
        restored: the source in the restored checkpoint; None without one.
    """

    name: str
    position: int
    bounded: bool
    event_time: bool = True
    idle_after: float | None = None
    restored: FusedSourceSnapshot | None = None


class FusedSources:
    """The fused sources of one task; see the module's docstring.

    Args:
        sources: the sources, in the order of the chain.
        watermark: the watermark of all of them together in the restored checkpoint, epoch ms; None before the first.
        burst: whether unbounded sources are read up to what is there at the beginning.
    """

    def __init__(self, sources: Sequence[FusedSource], watermark: int | None = None, *, burst: bool = False) -> None:
        self._sources = {source.name: source for source in sources}
        restored = {s.name: s.restored for s in sources if s.restored is not None}
        self._ended = {name for name, source in restored.items() if source.ended}
        self._to_end = {source.name for source in sources if source.bounded} | self._ended
        self._held = {source.name for source in sources} if burst else self._to_end
        self._caught_up: set[str] = set()
        self._valve = WatermarkValve(source.name for source in sources if source.event_time)
        known = {name: _channel_watermark(source) for name, source in restored.items()}
        self._valve.restore(ValveState(MIN_WATERMARK_MS if watermark is None else watermark, known))
        self._moved_at: dict[str, float] = {}
        """When the driver last reported rows of a source; before its first report, when the query began."""
        self._idle = False
        """Whether the consumers were last sent that the task is idle; a restored task begins by sending that it is not."""

    @property
    def ended(self) -> frozenset[str]:
        """The sources that have ended."""
        return frozenset(self._ended)

    @property
    def all_ended(self) -> bool:
        """Whether every source has ended."""
        return len(self._ended) == len(self._sources)

    @property
    def caught_up(self) -> bool:
        """In a burst: whether every source has ended, or has read what it is held to."""
        return len(self._ended | self._caught_up) == len(self._sources)

    @property
    def all_held(self) -> bool:
        """Whether every source is held to what was there at a moment: the query will have no more rows."""
        return self._held >= self._sources.keys()

    @property
    def some_held(self) -> bool:
        """Whether a source is held to what was there at a moment, and has not ended: it may end at any moment."""
        return bool(self._held - self._ended)

    @property
    def backlog(self) -> bool:
        """Whether a bounded source has not ended."""
        return any(source.bounded and name not in self._ended for name, source in self._sources.items())

    @property
    def watermark(self) -> int:
        """The watermark of all sources together, epoch ms; MIN_WATERMARK_MS before there is one."""
        return self._valve.watermark

    def snapshot(self) -> tuple[FusedSourceSnapshot, ...]:
        """The sources' part of a checkpoint."""
        channels = self._valve.snapshot().channels
        return tuple(self._snapshot(source, channels.get(source.name)) for source in self._sources.values())

    def _snapshot(self, source: FusedSource, channel: ChannelWatermark | None) -> FusedSourceSnapshot:
        watermark = channel.watermark if channel is not None and channel.watermark > MIN_WATERMARK_MS else None
        idle, behind = channel is not None and channel.idle, channel is not None and channel.behind
        return FusedSourceSnapshot(source.name, source.position, source.name in self._ended, watermark, idle, behind)

    def begin(self, now: float) -> list[FusedAction]:
        """The query runs: hold the bounded sources, in a burst all of them, to what is there now.

        A restored query runs under the restored event time again: the checkpoint may come from before the batch that ran under
        it, and no source may have a row that moves event time.
        """
        self._moved_at = dict.fromkeys(self._sources, now)
        to_hold = tuple(name for name in self._sources if name in self._held and name not in self._ended)
        watermark = self._valve.watermark
        actions: list[FusedAction] = [AdvanceEventTime(watermark)] if watermark > MIN_WATERMARK_MS else []
        return [*actions, HoldSources(to_hold)] if to_hold else actions

    def end(self, source: str) -> list[FusedAction]:
        """A source is to end: it reads what is there now, and no more.

        Args:
            source: name of the source; nothing is done if it is to end already.
        """
        if source not in self._sources:
            raise UnexpectedEvent(f"{source!r} is none of the fused sources {', '.join(self._sources)} of this task.")
        if source in self._to_end:
            return []
        self._to_end.add(source)
        self._held.add(source)
        self._caught_up.discard(source)
        return [HoldSources((source,))]

    def asked(self, event: SourcesAsked, now: float) -> list[FusedAction]:
        """The query has asked its sources for rows, and has processed and committed what they had."""
        before = self._valve.watermark
        for name in event.moved:
            self._moved_at[name] = now
            if self._sources[name].event_time:
                self._valve.active(name)
        for name, ms in event.watermarks.items():
            if name not in self._ended:
                self._valve.advance(name, ms)
        settled = event.settled or (event.ran_under is not None and event.ran_under >= self._valve.watermark)
        for name in event.unmoved:
            self._not_moved(name, now, settled)
        actions: list[FusedAction] = []
        if self._valve.watermark > before:
            self._caught_up.clear()
            actions.append(AdvanceEventTime(self._valve.watermark))
        if self._valve.is_idle != self._idle:
            self._idle = self._valve.is_idle
            actions.append(Forward(WatermarkStatus(self._idle)))
        return actions

    def _not_moved(self, name: str, now: float, settled: bool) -> None:
        source = self._sources[name]
        if name in self._to_end:
            self._ended.add(name)
            if source.event_time:
                self._valve.end(name, drain=True)
            return
        if name in self._held and settled:
            self._caught_up.add(name)
        if source.event_time and source.idle_after is not None and now - self._moved_at[name] > source.idle_after:
            self._valve.idle(name)


def _channel_watermark(source: FusedSourceSnapshot) -> ChannelWatermark:
    watermark = MIN_WATERMARK_MS if source.watermark is None else source.watermark
    return ChannelWatermark(watermark, source.idle, "drain" if source.ended else "none", source.behind)
