"""A barrier handler with any events in any order: it does not wait for aborted checkpoints, and no channel stays blocked.

`test_coordination_barriers_random` reads channels as a gate does; here even the channels contradict each other.
"""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
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
some_channel = st.sampled_from("abc")
kinds = st.sampled_from([CheckpointProperties(), CheckpointProperties.for_savepoint(), CheckpointProperties(unaligned=True)])


class AnyOrder(RuleBasedStateMachine):
    mode: Mode

    @initialize(ended=st.sets(some_channel, max_size=2))
    def begin(self, ended: set[str]) -> None:
        self.handler: BarrierHandler = {
            "aligned": lambda: AlignedBarrierHandler("abc", ended=ended),
            "unaligned": lambda: UnalignedBarrierHandler("abc", ended=ended),
            "with_timeout": lambda: AlignedWithTimeoutBarrierHandler("abc", timeout=5, ended=ended),
            "at_least_once": lambda: TrackingBarrierHandler("abc", ended=ended),
        }[self.mode]()
        self.open = set("abc") - ended
        self.newest = 1
        self.kinds: dict[int, CheckpointProperties] = {}
        self.taken: list[int] = []
        self.over: set[int] = set()
        """Checkpoints aborted by the handler or by the coordinator before their snapshots."""
        self.blocked: set[str] = set()
        self.in_flight: dict[int, set[str]] = {}

    def barrier(self, back: int, kind: CheckpointProperties) -> CheckpointBarrier:
        """A savepoint is one on every channel; an upstream task may have made a checkpoint's barrier unaligned."""
        checkpoint_id = max(1, self.newest - back)
        self.newest = max(self.newest, checkpoint_id + 1)
        own = self.kinds.setdefault(checkpoint_id, kind)
        turned = not own.is_savepoint and self.mode in ("unaligned", "with_timeout") and kind.unaligned
        return CheckpointBarrier(checkpoint_id, 10.0 * checkpoint_id, replace(own, unaligned=turned))

    def tell(self, event: BarrierEvent) -> None:
        for action in self.handler.handle(event):
            match action:
                case TakeSnapshot(barrier) | StartSnapshot(barrier):
                    assert barrier.checkpoint_id not in self.over, "an aborted checkpoint is not taken"
                    assert barrier.checkpoint_id > max(self.taken, default=0), "one of each, and in their order"
                    assert not self.in_flight
                    self.taken.append(barrier.checkpoint_id)
                    if isinstance(action, StartSnapshot):
                        assert not barrier.properties.is_savepoint
                        self.in_flight[barrier.checkpoint_id] = set(action.in_flight)
                case ChannelCaptured(checkpoint_id, channel):
                    self.in_flight[checkpoint_id].remove(channel)
                case SnapshotInputsComplete(checkpoint_id):
                    assert not self.in_flight.pop(checkpoint_id)
                case AbortAlignment(checkpoint_id):
                    assert checkpoint_id not in self.taken or checkpoint_id in self.in_flight
                    self.in_flight.pop(checkpoint_id, None)
                    self.over.add(checkpoint_id)
                case BlockChannel(channel):
                    assert channel in self.open and channel not in self.blocked
                    self.blocked.add(channel)
                case UnblockChannels(channels):
                    assert channels and set(channels) <= self.blocked
                    self.blocked -= set(channels)

    @rule(channel=some_channel, back=st.integers(0, 3), kind=kinds)
    def a_barrier_is_next(self, channel: str, back: int, kind: CheckpointProperties) -> None:
        if channel not in self.blocked:
            self.tell(BarrierReceived(channel, self.barrier(back, kind)))

    @rule(channel=some_channel, back=st.integers(0, 3), kind=kinds)
    def a_barrier_is_announced(self, channel: str, back: int, kind: CheckpointProperties) -> None:
        self.tell(BarrierAnnounced(channel, self.barrier(back, kind)))

    @rule(back=st.integers(0, 3), kind=kinds)
    def the_task_is_triggered(self, back: int, kind: CheckpointProperties) -> None:
        self.tell(TriggerReceived(self.barrier(back, kind)))

    @rule(channel=some_channel, back=st.integers(-1, 3))
    def a_marker_cancels(self, channel: str, back: int) -> None:
        self.tell(CancellationReceived(channel, max(1, self.newest - back)))

    @rule(back=st.integers(-1, 3))
    def the_coordinator_has_aborted(self, back: int) -> None:
        checkpoint_id = max(1, self.newest - back)
        self.tell(CancellationReceived(None, checkpoint_id))
        self.over.add(checkpoint_id)
        assert checkpoint_id not in self.in_flight

    @rule(channel=some_channel)
    def a_channel_ends(self, channel: str) -> None:
        self.open.discard(channel)
        self.blocked.discard(channel)
        self.tell(EndOfPartitionReceived(channel))

    @rule(now=st.floats(0, 200, allow_nan=False))
    def time_passes(self, now: float) -> None:
        self.tell(AlignmentTick(now))

    @invariant()
    def what_is_over_is_not_waited_for(self) -> None:
        if not hasattr(self, "handler"):
            return
        pending = self.handler.pending_ids if isinstance(self.handler, TrackingBarrierHandler) else (self.pending_id,)
        assert not self.over & set(pending)
        assert not self.blocked or self.open - self.blocked, "some channel must still bring a barrier"
        assert not self.blocked or pending[0] is not None
        assert all(self.in_flight.values())
        deadline = self.handler.next_deadline()
        assert deadline is None or pending[0] is not None

    @property
    def pending_id(self) -> int | None:
        assert not isinstance(self.handler, TrackingBarrierHandler)
        return self.handler.pending_id  # type: ignore[attr-defined, no-any-return]

    def teardown(self) -> None:
        """When every channel has ended no checkpoint is pending."""
        if not hasattr(self, "handler"):
            return
        for channel in "abc":
            self.a_channel_ends(channel)
        assert not self.blocked and not self.in_flight
        if isinstance(self.handler, TrackingBarrierHandler):
            assert self.handler.pending_ids == ()
        else:
            assert self.pending_id is None


@pytest.mark.parametrize("mode", ["aligned", "unaligned", "with_timeout", "at_least_once"])
def test_any_order(mode: Mode) -> None:
    machine = type(f"AnyOrder_{mode}", (AnyOrder,), {"mode": mode})
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))  # type: ignore[no-untyped-call]
