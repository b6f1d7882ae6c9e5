"""Barrier handlers in every interleaving: a gate that reads its channels at random and performs the actions.

Upstream tasks write records, barriers, cancellation markers and ends; the gate reads, announces and lets time pass.
Checked at each action and at the end: every snapshot is a consistent cut, each checkpoint ends exactly once, and no
channel stays blocked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace

from dagster_checkpoints.coordination.barriers.events import (
    AbortAlignment,
    AlignmentTick,
    BarrierAnnounced,
    BarrierEvent,
    BarrierHandler,
    BarrierReceived,
    BlockChannel,
    CancellationReceived,
    ChannelCaptured,
    EndOfPartitionReceived,
    SnapshotInputsComplete,
    StartSnapshot,
    TakeSnapshot,
    TriggerReceived,
    UnblockChannels,
)
from dagster_checkpoints.coordination.barriers.single import (
    AlignedBarrierHandler,
    AlignedWithTimeoutBarrierHandler,
    UnalignedBarrierHandler,
)
from dagster_checkpoints.coordination.barriers.tracking import TrackingBarrierHandler
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier, CheckpointProperties

Mode = Literal["aligned", "unaligned", "with_timeout", "at_least_once"]
TIMEOUT = 5


@dataclass(frozen=True)
class Cancel:
    checkpoint_id: int


END = "end"
Element = int | CheckpointBarrier | Cancel | str  # an int is a record


@dataclass
class Channel:
    """A log, and the positions of its upstream task and of the gate."""

    log: list[Element] = field(default_factory=list)
    next_id: int = 1
    read: int = 0
    captured_to: int = 0
    blocked: bool = False

    @property
    def ended(self) -> bool:
        return self.log[-1:] == [END]

    @property
    def owes_barriers(self) -> bool:
        """Whether there are unread records."""
        return any(isinstance(element, CheckpointBarrier | Cancel) for element in self.log[self.read :])

    def index_of(self, checkpoint_id: int) -> int | None:
        """Position of the barrier; if it never came, of the end."""
        for i, element in enumerate(self.log):
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
                return i
        return len(self.log) - 1 if self.ended else None

    def has_read(self, checkpoint_id: int) -> bool:
        index = self.index_of(checkpoint_id)
        return index is not None and index < self.read

    def records(self, start: int, stop: int) -> list[int]:
        return [element for element in self.log[start:stop] if isinstance(element, int)]


class Gate(RuleBasedStateMachine):
    mode: Mode

    @initialize(channels=st.integers(1, 4))
    def begin(self, channels: int) -> None:
        names = "abcd"[:channels]
        self.channels = {name: Channel() for name in names}
        self.handler: BarrierHandler = {
            "aligned": lambda: AlignedBarrierHandler(names),
            "unaligned": lambda: UnalignedBarrierHandler(names),
            "with_timeout": lambda: AlignedWithTimeoutBarrierHandler(names, timeout=TIMEOUT),
            "at_least_once": lambda: TrackingBarrierHandler(names),
        }[self.mode]()
        self.barriers: list[CheckpointBarrier] = []
        self.noticed: set[int] = set()
        self.records = 0
        self.now = 0.0
        self.outcome: dict[int, str] = {}
        self.started: dict[int, dict[str, int]] = {}
        """By checkpoint that overtook: the position up to which each channel had been read."""
        self.in_flight: dict[int, set[str]] = {}

    # Rules

    @rule(savepoint=st.sampled_from([False, False, True]))
    def the_coordinator_triggers(self, savepoint: bool) -> None:
        ended = all(channel.ended for channel in self.channels.values())
        if ended and any(channel.owes_barriers for channel in self.channels.values()):
            return  # a newer barrier would replace those; Flink's tasks do the same
        properties = CheckpointProperties.for_savepoint() if savepoint else CheckpointProperties()
        barrier = CheckpointBarrier(len(self.barriers) + 1, self.now, properties)
        self.barriers.append(barrier)
        if ended:
            self.tell(TriggerReceived(barrier))

    @rule(data=st.data(), several=st.integers(1, 4))
    def upstream_tasks_write(self, data: st.DataObject, several: int) -> None:
        for _ in range(several):
            names = [name for name, channel in self.channels.items() if not channel.ended]
            if names:
                what = data.draw(st.sampled_from([*["record"] * 6, *["barrier"] * 10, "cancel", "turned", "end"]))
                self.write(self.channels[data.draw(st.sampled_from(names))], what)

    def write(self, channel: Channel, what: str) -> None:
        if what == "end":
            self.end(channel)
        elif what == "record" or channel.next_id > len(self.barriers):
            self.records += 1
            channel.log.append(self.records)
        else:
            self.write_next(channel, what)

    def write_next(self, channel: Channel, what: str) -> None:
        barrier = self.barriers[channel.next_id - 1]
        channel.next_id += 1
        if what == "cancel":
            channel.log.append(Cancel(barrier.checkpoint_id))
        elif what == "turned" and not barrier.properties.is_savepoint:
            channel.log.append(replace(barrier, properties=CheckpointProperties(unaligned=True)))
        else:
            channel.log.append(barrier)

    def end(self, channel: Channel) -> None:
        """The coordinator aborts a checkpoint if a task finishes before it has acknowledged."""
        channel.log.append(END)
        for barrier in self.barriers[channel.next_id - 1 :]:
            self.notice(barrier.checkpoint_id)

    @precondition(lambda self: self.barriers)
    @rule(data=st.data(), seldom=st.integers(0, 5))
    def the_coordinator_aborts(self, data: st.DataObject, seldom: int) -> None:
        if seldom == 5:
            self.notice(data.draw(st.integers(max(1, len(self.barriers) - 2), len(self.barriers))))

    def notice(self, checkpoint_id: int) -> None:
        self.noticed.add(checkpoint_id)
        self.tell(CancellationReceived(None, checkpoint_id))

    @rule(data=st.data(), several=st.integers(1, 4))
    def the_gate_reads(self, data: st.DataObject, several: int) -> None:
        for _ in range(several):
            if ready := self.ready():
                self.read(data.draw(st.sampled_from(ready)))

    def ready(self) -> list[str]:
        return [n for n, c in self.channels.items() if not c.blocked and c.read < len(c.log)]

    def read(self, name: str) -> None:
        channel = self.channels[name]
        element = channel.log[channel.read]
        channel.read += 1
        match element:
            case CheckpointBarrier():
                self.tell(BarrierReceived(name, element))
            case Cancel(checkpoint_id):
                self.tell(CancellationReceived(name, checkpoint_id))
            case str():
                self.tell(EndOfPartitionReceived(name))

    @rule()
    def the_gate_announces(self) -> None:
        for name, channel in self.channels.items():
            for element in [] if channel.blocked else channel.log[max(channel.read, channel.captured_to) :]:
                if isinstance(element, CheckpointBarrier) and self.outcome.get(element.checkpoint_id) != "aborted":
                    self.tell(BarrierAnnounced(name, element))
                    break

    @rule(seconds=st.integers(1, TIMEOUT))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        deadline = self.handler.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.tell(AlignmentTick(self.now))
            assert self.handler.next_deadline() is None
        else:
            before = self.outcome.copy(), self.started.copy()
            self.tell(AlignmentTick(self.now))
            assert (self.outcome, self.started) == before, "a tick that is not due is harmless"

    # Actions of the gate

    def tell(self, event: BarrierEvent) -> None:
        for action in self.handler.handle(event):
            match action:
                case BlockChannel(name):
                    assert self.mode != "at_least_once" and not self.channels[name].blocked
                    self.channels[name].blocked = True
                case UnblockChannels(names):
                    assert names and all(self.channels[name].blocked for name in names)
                    for name in names:
                        self.channels[name].blocked = False
                case TakeSnapshot(barrier):
                    self.snapshot(barrier.checkpoint_id)
                case StartSnapshot(barrier, names):
                    self.start(barrier, names)
                case ChannelCaptured(checkpoint_id, name):
                    self.captured(checkpoint_id, name)
                case SnapshotInputsComplete(checkpoint_id):
                    assert not self.in_flight[checkpoint_id]
                    self.finish(checkpoint_id, "complete")
                case AbortAlignment(checkpoint_id, _):
                    self.finish(checkpoint_id, "aborted")

    def finish(self, checkpoint_id: int, outcome: str) -> None:
        assert checkpoint_id not in self.outcome, "a checkpoint ends once"
        self.outcome[checkpoint_id] = outcome

    def snapshot(self, checkpoint_id: int) -> None:
        for name, channel in self.channels.items():
            index = channel.index_of(checkpoint_id)
            assert index is not None, f"{name} has neither brought its barrier nor ended"
            if self.mode == "at_least_once":
                assert channel.read > index, "every record before the barrier is in the state"
            else:
                assert channel.read == index + 1, "and none behind it"
        self.finish(checkpoint_id, "complete")

    def start(self, barrier: CheckpointBarrier, names: tuple[str, ...]) -> None:
        checkpoint_id = barrier.checkpoint_id
        assert checkpoint_id not in self.started, "a snapshot starts once"
        assert barrier.properties.unaligned and not barrier.properties.is_savepoint
        if self.mode == "with_timeout":
            turned = any(
                element == barrier for c in self.channels.values() for element in c.log if isinstance(element, CheckpointBarrier)
            )
            assert turned or self.now >= barrier.timestamp + TIMEOUT
        for name, channel in self.channels.items():
            if name in names:
                assert not channel.has_read(checkpoint_id), "its records behind the barrier would be in the state"
            else:
                assert channel.index_of(checkpoint_id) == channel.read - 1, "its records in front would be nowhere"
        self.started[checkpoint_id] = {name: channel.read for name, channel in self.channels.items()}
        self.in_flight[checkpoint_id] = set(names)

    def captured(self, checkpoint_id: int, name: str) -> None:
        channel = self.channels[name]
        self.in_flight[checkpoint_id].remove(name)
        index = channel.index_of(checkpoint_id)
        assert index is not None, "records that arrive before the barrier would be lost"
        if channel.log[index] == END:
            assert channel.read == index + 1, "an end counts when it has been read"
        read = self.started[checkpoint_id][name]
        state, in_flight = channel.records(0, read), channel.records(read, index)
        assert state + in_flight == channel.records(0, index), "each record is in the state or in flight, once"
        channel.captured_to = max(channel.captured_to, index + 1)

    @invariant()
    def a_blocked_channel_waits_for_a_barrier(self) -> None:
        # Before the first rule there is no handler.
        channels = getattr(self, "channels", {})
        if any(channel.blocked for channel in channels.values()):
            assert isinstance(self.handler, AlignedBarrierHandler | UnalignedBarrierHandler | AlignedWithTimeoutBarrierHandler)
            pending = self.handler.pending_id
            assert pending is not None and pending not in self.outcome
            assert not all(channel.blocked for channel in channels.values())
            assert self.handler.blocked == tuple(name for name, channel in channels.items() if channel.blocked)

    def teardown(self) -> None:
        """All upstream tasks write their remaining elements, and the gate reads everything: then every checkpoint has ended."""
        if not hasattr(self, "channels"):
            return
        for channel in self.channels.values():
            while not channel.ended and channel.next_id <= len(self.barriers):
                self.write_next(channel, "barrier")
        while ready := self.ready():
            self.read(ready[0])
        assert all(channel.read == len(channel.log) for channel in self.channels.values())
        assert not any(channel.blocked for channel in self.channels.values())
        for barrier in self.barriers:
            self.check_ended(barrier.checkpoint_id)

    def check_ended(self, checkpoint_id: int) -> None:
        if checkpoint_id in self.started:
            assert checkpoint_id in self.outcome
        if checkpoint_id in self.outcome or checkpoint_id in self.noticed:
            return
        # An announced barrier may come before the marker of an older checkpoint, which has no effect then.
        assert self.mode in ("unaligned", "with_timeout")
        cancelled = [c for c in self.channels.values() if Cancel(checkpoint_id) in c.log]
        assert cancelled or any(newer > checkpoint_id for newer in self.outcome)


@pytest.mark.parametrize("mode", ["aligned", "unaligned", "with_timeout", "at_least_once"])
def test_every_interleaving(mode: Mode) -> None:
    machine = type(f"Gate_{mode}", (Gate,), {"mode": mode})
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None))  # type: ignore[no-untyped-call]
