"""Fused sources of one task: which have ended, the event time of all of them, and what a checkpoint records."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import TriggerReceived
from dagster_checkpoints.coordination.checkpoints import CheckpointBarrier
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import UnexpectedEvent
from dagster_checkpoints.coordination.events import EndOfDataReached
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS
from dagster_checkpoints.execution.elements import BarrierMark, WatermarkStatus
from dagster_checkpoints.execution.fused_sources import FusedSource
from dagster_checkpoints.execution.task_events import (
    AdvanceEventTime,
    EndInput,
    Forward,
    HoldSources,
    PinnedInputs,
    PinSnapshot,
    QueryRunning,
    Report,
    SnapshotPinned,
    SourceEnded,
    SourcesAsked,
    SourcesRead,
    StartQuery,
    StopSource,
    StoreSnapshot,
    TaskOpened,
)
from dagster_checkpoints.execution.task_machine import TaskMachine, TaskTraits
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.metadata import FusedSourceSnapshot

TASK = TaskId("history", 0)
BARRIER = CheckpointBarrier(1, 0.0)

HISTORY_ENDED = Report(SourceEnded(TASK, "history"))


class Fused:
    """A task with a backfill and a live feed, whose query runs."""

    def __init__(
        self,
        *restored: FusedSourceSnapshot,
        idle_after: float | None = None,
        watermark: int | None = None,
        event_time: bool = True,
        now: float = 0.0,
        burst: bool = False,
    ) -> None:
        known = {source.source: source for source in restored}
        sources = (
            FusedSource("history", 0, bounded=True, event_time=event_time, restored=known.get("history")),
            FusedSource("live", 1, bounded=False, idle_after=idle_after, restored=known.get("live")),
        )
        self.machine = TaskMachine(TASK, CheckpointConfig(interval=None), (), watermark, TaskTraits(burst=burst), fused=sources)
        self.now = now
        self.began = [*self.do(TaskOpened()), *self.do(QueryRunning())]

    def do(self, event: Any) -> list[Any]:
        return self.machine.handle(event, self.now)

    def asked(self, *unmoved: str, **watermarks: int) -> list[Any]:
        """The sources with a watermark had rows, these others had none."""
        return self.do(SourcesAsked(tuple(watermarks), unmoved, watermarks))

    def settled(self, *unmoved: str) -> list[Any]:
        """The query has run under the newest event time, and these sources had nothing more."""
        return self.do(SourcesAsked(unmoved=unmoved, settled=True))

    def snapshot(self) -> dict[str, FusedSourceSnapshot]:
        [pin] = self.do(TriggerReceived(BARRIER))
        assert isinstance(pin, PinSnapshot)
        self.do(SnapshotPinned(1))
        return {source.source: source for source in pin.inputs.fused}


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_bounded_source_is_held_and_ends_when_it_has_no_more_rows() -> None:
    task = Fused()
    assert of(StartQuery, task.began)
    assert of(HoldSources, task.began) == [HoldSources(("history",))]
    assert task.asked(history=100, live=5000) == [AdvanceEventTime(100)]
    assert task.asked("live", history=200) == [AdvanceEventTime(200)]
    assert task.machine.ended_sources == frozenset()
    assert task.asked("history", live=6000) == [
        AdvanceEventTime(6000),
        HISTORY_ENDED,
    ]  # it does not hold the other one back any more
    assert task.machine.ended_sources == {"history"}
    assert task.machine.running
    assert task.asked("live") == []  # an unbounded source has no end of its own


def test_a_checkpoint_records_the_ended_sources_and_their_watermarks() -> None:
    task = Fused()
    task.asked(history=100, live=300)
    task.asked("history", "live")
    [pin] = task.do(TriggerReceived(BARRIER))
    history = FusedSourceSnapshot("history", 0, ended=True, watermark=100)
    assert pin.inputs.fused == (history, FusedSourceSnapshot("live", 1, watermark=300))
    assert pin.inputs.valve_watermark == 300
    forwarded, stored = task.do(SnapshotPinned(1))
    assert forwarded == Forward(BarrierMark(BARRIER))
    assert isinstance(stored, StoreSnapshot)
    assert stored.statistics.ended_sources == ("history",)


def test_a_checkpoint_before_the_first_watermark_records_none() -> None:
    task = Fused()
    [pin] = task.do(TriggerReceived(BARRIER))
    assert pin.inputs == PinnedInputs((), None, (FusedSourceSnapshot("history", 0), FusedSourceSnapshot("live", 1)))


def test_a_source_that_had_ended_is_not_held_again_and_the_minimum_is_restored() -> None:
    ended = FusedSourceSnapshot("history", 0, ended=True, watermark=100)
    task = Fused(ended, FusedSourceSnapshot("live", 1, watermark=300), watermark=300)
    assert not of(HoldSources, task.began)
    assert HISTORY_ENDED in task.began, "the job that waits for it learns of it in each attempt"
    assert task.machine.ended_sources == {"history"}
    assert of(AdvanceEventTime, task.began) == [AdvanceEventTime(300)], "the checkpoint may be from before a batch under it"
    assert task.snapshot() == {"history": ended, "live": FusedSourceSnapshot("live", 1, watermark=300)}
    assert task.asked(live=400) == [AdvanceEventTime(400)]


def test_a_source_that_had_not_ended_is_held_again() -> None:
    task = Fused(FusedSourceSnapshot("history", 0, watermark=100), FusedSourceSnapshot("live", 1, watermark=300), watermark=100)
    assert task.began[-2:] == [AdvanceEventTime(100), HoldSources(("history",))]
    assert task.asked(live=400) == []  # the backfill's watermark counts, though it had no rows yet
    assert task.asked(history=350) == [AdvanceEventTime(350)]


def test_the_data_end_when_every_source_has_ended() -> None:
    task = Fused()
    task.asked("history", live=300)
    assert task.do(EndInput("live")) == [HoldSources(("live",))]
    assert task.do(EndInput("live")) == []
    assert task.asked(live=400) == [AdvanceEventTime(400)]
    assert task.asked("live") == [AdvanceEventTime(MAX_WATERMARK_MS), life.FinishOperators()]
    reported = of(Report, task.do(life.OperatorsFinished()))
    assert reported == [Report(EndOfDataReached(TASK)), Report(SourceEnded(TASK))]
    assert task.asked("live") == []


# In a burst


def test_a_burst_holds_every_source_and_reports_when_it_has_read_them_and_run_under_their_event_time() -> None:
    task = Fused(burst=True)
    assert of(HoldSources, task.began) == [HoldSources(("history", "live"))]
    task.asked(history=100, live=300)
    assert task.asked("live", history=200) == [AdvanceEventTime(200)]
    assert task.asked("history", "live") == [AdvanceEventTime(300), HISTORY_ENDED], "the end of the backfill has moved event time"
    assert task.asked("live") == [], "a batch that Spark had planned before"
    assert task.settled("live") == [Report(SourcesRead(TASK))]
    assert task.settled("live") == []
    assert task.machine.ended_sources == {"history"} and task.machine.running


def test_a_source_that_has_caught_up_can_still_be_ended() -> None:
    task = Fused(burst=True)
    task.asked("history", live=300)
    task.settled("live")
    assert task.machine.fused is not None and task.machine.fused.caught_up
    assert task.do(EndInput("live")) == [HoldSources(("live",))], "it is held to what is there by now"
    assert not task.machine.fused.caught_up
    assert task.do(EndInput("live")) == []
    assert life.FinishOperators() in task.asked("live")


def test_it_is_known_whether_a_source_may_end_at_any_moment() -> None:
    task = Fused()
    fused = task.machine.fused
    assert fused is not None and fused.some_held and not fused.all_held, "the backfill is held"
    task.asked("history", live=300)
    assert not fused.some_held, "it has ended, and the live feed goes on"
    task.do(EndInput("live"))
    assert fused.some_held
    task.asked("live")
    assert not fused.some_held and fused.all_ended


def test_a_source_that_is_ended_before_the_query_runs_is_held_from_its_beginning() -> None:
    sources = (FusedSource("history", 0, bounded=True), FusedSource("live", 1, bounded=False))
    machine = TaskMachine(TASK, CheckpointConfig(interval=None), fused=sources)
    machine.handle(TaskOpened(), 0.0)
    machine.handle(EndInput("live"), 0.0)
    assert HoldSources(("history", "live")) in machine.handle(QueryRunning(), 0.0)


def test_all_sources_had_ended_in_the_restored_checkpoint() -> None:
    ended = (FusedSourceSnapshot(name, at, ended=True, watermark=9) for at, name in enumerate(("history", "live")))
    task = Fused.__new__(Fused)
    sources = [FusedSource(one.source, one.position, bounded=True, restored=one) for one in ended]
    task.machine, task.now = TaskMachine(TASK, CheckpointConfig(interval=None), fused=sources), 0.0
    opened = task.do(TaskOpened())
    assert opened[-1] == life.FinishOperators()
    assert not of(StartQuery, opened)


def test_a_drain_ends_the_task_whatever_its_sources_have_left() -> None:
    task = Fused()
    task.asked(history=100, live=200)
    assert task.do(EndInput()) == [StopSource(), life.FinishOperators()]


def test_a_source_that_is_silent_for_its_idle_time_does_not_hold_event_time_back() -> None:
    task = Fused(idle_after=10.0)
    task.asked(history=100, live=50)
    task.now = 9.0
    assert task.asked("live", history=200) == []
    task.now = 11.0
    assert task.asked("live", history=300) == [AdvanceEventTime(300)]
    assert task.asked("history") == [Forward(WatermarkStatus(True)), HISTORY_ENDED]  # only the idle one is left
    assert task.asked(live=400) == [AdvanceEventTime(400), Forward(WatermarkStatus(False))]


def test_the_idle_time_of_a_source_begins_with_its_query_and_has_to_be_over() -> None:
    task = Fused(idle_after=10.0, now=100.0)
    task.now = 110.0
    assert task.asked("live", history=200) == []
    task.now = 110.5
    assert task.asked("live", history=200) == [AdvanceEventTime(200)]


def test_a_source_that_was_idle_in_the_checkpoint_is_idle_again_and_event_time_does_not_go_back() -> None:
    task = Fused(idle_after=10.0)
    task.asked(history=300, live=50)
    task.now = 11.0
    assert task.asked("live", history=300) == [AdvanceEventTime(300)]
    taken = task.snapshot()
    assert taken["live"] == FusedSourceSnapshot("live", 1, watermark=50, idle=True)
    again = Fused(*taken.values(), idle_after=10.0, watermark=300)
    assert again.asked("live", history=400) == [AdvanceEventTime(400)]
    assert again.asked(live=350) == []  # it is behind, and left out until it has caught up
    taken = again.snapshot()
    assert taken["live"] == FusedSourceSnapshot("live", 1, watermark=350, behind=True)
    assert Fused(*taken.values(), idle_after=10.0, watermark=400).asked(history=500, live=380) == [AdvanceEventTime(500)]
    behind = Fused(FusedSourceSnapshot("live", 1, watermark=200), watermark=300)
    assert behind.asked(history=250, live=250) == []
    assert behind.asked(history=310, live=320) == [AdvanceEventTime(310)]


def test_a_source_without_a_watermark_is_recorded_and_restored_without_one() -> None:
    before_its_first = Fused()
    before_its_first.asked("live", history=100)
    taken = before_its_first.snapshot()
    assert taken["live"] == FusedSourceSnapshot("live", 1, watermark=None)
    assert Fused(*taken.values()).asked(live=50) == [AdvanceEventTime(50)]
    without_event_time = Fused(event_time=False)
    assert without_event_time.asked(live=70) == [AdvanceEventTime(70)]
    taken = without_event_time.snapshot()
    assert taken["history"] == FusedSourceSnapshot("history", 0, watermark=None, idle=False)
    again = Fused(*taken.values(), event_time=False, watermark=70)
    assert again.asked("history", live=80) == [AdvanceEventTime(80), HISTORY_ENDED]
    assert again.machine.ended_sources == {"history"}


def test_in_a_burst_a_query_that_always_has_more_to_do_has_settled_when_it_has_run_under_the_event_time_of_all() -> None:
    """Timers of processing time: Spark runs batch after batch, and never says that there is nothing to do."""
    task = Fused(burst=True)
    task.do(SourcesAsked(("history", "live"), (), {"history": 50, "live": 60}, ran_under=0))
    assert task.do(SourcesAsked((), ("history", "live"), {}, ran_under=0)) == [AdvanceEventTime(60), HISTORY_ENDED]
    assert task.machine.fused is not None and not task.machine.fused.caught_up
    task.do(SourcesAsked((), ("live",), {}, ran_under=50))
    assert not task.machine.fused.caught_up
    task.do(SourcesAsked((), ("live",), {}, ran_under=60))
    assert task.machine.fused.caught_up


def test_a_suspend_pauses_the_end_of_the_data() -> None:
    task = Fused()
    task.machine.handle(SourcesAsked(unmoved=("history",)), 0.0)
    task.do(EndInput("live"))
    task.do(TriggerReceived(CheckpointBarrier(2, 0.0, BARRIER.properties.for_savepoint(stops_job=True, request_id="r"))))
    assert life.PauseOperators() in task.do(SnapshotPinned(2))
    assert life.FinishOperators() not in task.asked("live")
    assert life.FinishOperators() in task.do(life.CheckpointAbortedNotice(2))


@pytest.mark.parametrize("event", [SourcesAsked(unmoved=("live",))])
def test_a_task_without_fused_sources_refuses_their_events(event: Any) -> None:
    task = TaskMachine(TASK, CheckpointConfig(interval=None))
    with pytest.raises(UnexpectedEvent, match="has no fused sources"):
        task.handle(event, 0.0)


def test_the_end_of_an_unknown_source_is_refused() -> None:
    with pytest.raises(UnexpectedEvent, match="'other' is none of the fused sources history, live"):
        Fused().do(EndInput("other"))
