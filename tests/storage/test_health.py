"""Health: each rule at its threshold, alone and in a row of looks, and what is no problem."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.control.health import (
    APART_SECONDS,
    SAMPLES,
    HealthMemory,
    HealthProblem,
    HealthThresholds,
    InvalidThresholdError,
    health_of,
)
from dagster_checkpoints.control.status import (
    CheckpointCountsStatus,
    CompletedCheckpointStatus,
    FailureStatus,
    InstanceStatus,
    PipelineStatus,
    SilenceStatus,
    StageStatus,
)
from dagster_checkpoints.execution.pipeline_state import Job, Lease, Owner, PipelineState

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def state(*, running: bool = True, status: Any = "RUNNING", renewed: float = 2.0) -> PipelineState:
    lease = Lease(owner=Owner(run_id="r", host="h", pid=1), seconds=30.0, acquired_at=ago(9000), renewed_at=ago(renewed))
    return PipelineState(pipeline="p", epoch=4, token="t", lease=lease if running else None, job=Job(job_id=1, status=status))


def checkpoint(completed: float = 20.0, *, size: int = 1000, duration: float = 1.0) -> CompletedCheckpointStatus:
    return CompletedCheckpointStatus(
        checkpoint_id=7, location="c", completed_at=ago(completed), total_bytes=size, duration=duration
    )


def failure(at: float) -> FailureStatus:
    return FailureStatus(checkpoint_id=8, reason="CHECKPOINT_EXPIRED", message="not complete after 600 s", failed_at=ago(at))


def one(name: str = "live", rows: int = 10, late: int = 0, **instance: Any) -> StageStatus:
    return StageStatus(
        name=name, finished=False, rows=rows, late_rows=late, instances=(InstanceStatus(name="0", state="RUNNING", **instance),)
    )


def status(*stages: StageStatus, **fields: Any) -> PipelineStatus:
    given: dict[str, Any] = {
        "last_checkpoint": checkpoint(),
        "checkpoints": CheckpointCountsStatus(completed=5),
        "checkpoint_interval": 60.0,
        "updated_at": NOW,
        "started_at": ago(9000),
        **fields,
    }
    return PipelineStatus(pipeline="p", run_id="r", epoch=4, phase="running", sequence=9, stages=stages or (one(),), **given)


ALL = HealthThresholds(slow_checkpoint=5.0, growing_state=3, late_rows=100)


def found(*looks: PipelineStatus, thresholds: HealthThresholds = ALL, apart: float = 60.0) -> list[str]:
    """The names of the problems at the last of several looks."""
    memory, problems = HealthMemory(), list[HealthProblem]()
    for number, look in enumerate(looks):
        at = NOW + timedelta(seconds=apart * number)
        moved = msgspec.structs.replace(look, updated_at=at)
        if look.last_checkpoint is not None:
            last = msgspec.structs.replace(
                look.last_checkpoint, completed_at=look.last_checkpoint.completed_at + timedelta(seconds=apart * number)
            )
            moved = msgspec.structs.replace(moved, last_checkpoint=last)
        if look.last_failure is not None:
            late = look.last_failure.failed_at + timedelta(seconds=apart * number)
            moved = msgspec.structs.replace(moved, last_failure=msgspec.structs.replace(look.last_failure, failed_at=late))
        alive = state()
        assert alive.lease is not None
        alive = msgspec.structs.replace(alive, token=f"t{number}", lease=msgspec.structs.replace(alive.lease, renewed_at=at))
        # The memory goes through a sensor's cursor.
        memory = msgspec.json.decode(msgspec.json.encode(memory), type=HealthMemory)
        problems, memory = health_of(alive, moved, memory, thresholds, at)
    return [problem.name for problem in problems]


def failing(in_a_row: int) -> PipelineStatus:
    return status(last_failure=failure(5), checkpoints=CheckpointCountsStatus(completed=5, failed_in_a_row=in_a_row))


# A single look


@pytest.mark.parametrize(
    ("look", "problems"),
    [
        (status(), []),
        (status(last_checkpoint=checkpoint(299)), []),
        (status(last_checkpoint=checkpoint(301)), ["checkpoint_intervals"]),
        (status(last_checkpoint=None, started_at=ago(299)), []),
        (status(last_checkpoint=None, started_at=ago(301)), ["checkpoint_intervals"]),
        (status(last_checkpoint=checkpoint(301), checkpoint_interval=None), []),  # none are taken
        (status(last_checkpoint=checkpoint(duration=5.0)), []),
        (status(last_checkpoint=checkpoint(duration=5.1)), ["slow_checkpoint"]),
        (status(last_failure=failure(10)), []),  # one: it is tried again
        (status(last_failure=failure(30)), []),  # another has completed since
        (failing(1), []),
        (failing(2), ["failed_checkpoints"]),
        (status(last_checkpoint=None, checkpoints_since=ago(299)), []),  # the start took two hours
        (status(last_checkpoint=checkpoint(9000), checkpoints_since=ago(299)), []),  # so did a restart
        (status(last_checkpoint=checkpoint(9000), checkpoints_since=ago(301)), ["checkpoint_intervals"]),
        (status(last_checkpoint=checkpoint(301), checkpoints_since=ago(9000)), ["checkpoint_intervals"]),
        (status(one(silence=SilenceStatus(seconds=299, doing="asking", words="Getting offsets"))), []),
        (status(one(silence=SilenceStatus(seconds=301, doing="asking", words="Getting offsets"))), ["silent_source"]),
    ],
)  # fmt: skip
def test_what_one_look_sees(look: PipelineStatus, problems: list[str]) -> None:
    assert found(look) == problems


def test_a_pipeline_that_does_not_run_is_healthy_unless_it_has_failed() -> None:
    for ended in ("FINISHED", "CANCELED", "NONE"):
        assert health_of(state(running=False, status=ended), status(), HealthMemory(), ALL, NOW)[0] == []
    (problem,), _ = health_of(state(running=False, status="FAILED"), None, HealthMemory(), ALL, NOW)
    assert (problem.name, problem.severity) == ("failed", "error")


def test_a_job_that_has_died_stays_red_after_a_run_that_could_not_continue_it() -> None:
    """That run took the pipeline over, was refused at its start, for example by changed code, and has released the pipeline."""
    (problem,), _ = health_of(state(running=False, status="RUNNING"), None, HealthMemory(), ALL, NOW)
    assert (problem.name, problem.severity) == ("failed", "error") and "its process has died" in problem.text


def test_a_run_without_a_sign() -> None:
    for renewed, names in ((29.0, []), (31.0, ["silent"])):
        problems, _ = health_of(state(renewed=renewed), None, HealthMemory(), ALL, NOW)
        assert [problem.name for problem in problems] == names
    assert problems[0].text == (
        "the run's last sign is 31 s old; its lease ended 1 s ago: it has died, or does not reach the storage"
    )


def test_a_run_that_renews_its_lease_is_not_called_dead_and_its_start_may_take_long() -> None:
    late = status(updated_at=ago(145))
    (problem,), _ = health_of(state(renewed=3.0), late, HealthMemory(), ALL, NOW)
    assert (problem.name, problem.text) == (
        "silent",
        "the run's status is 145 s old; expected one every 5 s: the run is very busy, or its main thread has stopped",
    )
    starting = msgspec.structs.replace(late, phase="starting", stages=(), last_checkpoint=None)
    assert health_of(state(renewed=3.0), starting, HealthMemory(), ALL, NOW)[0] == []
    (problem,), _ = health_of(state(renewed=31.0), starting, HealthMemory(), ALL, NOW)
    assert problem.name == "silent"


@pytest.mark.parametrize("ahead", [-3600.0, -40.0, 0.0, 40.0, 3600.0])
def test_from_the_second_look_on_the_clock_of_the_reader_does_not_count(ahead: float) -> None:
    """It sees itself that the lease is renewed, or is not: a run that lives is not called dead, and a dead one is not alive."""
    memory, names = HealthMemory(), list[list[str]]()
    for minute, renewals in enumerate((6, 12, 18, 18, 18)):  # it dies behind the third look
        run_clock = NOW + timedelta(seconds=10 * renewals)
        shown = status(updated_at=run_clock, last_checkpoint=checkpoint(-10 * renewals))
        looked_at = state(renewed=-10.0 * renewals)
        memory = msgspec.json.decode(msgspec.json.encode(memory), type=HealthMemory)
        now = NOW + timedelta(minutes=1 + minute, seconds=ahead)
        problems, memory = health_of(msgspec.structs.replace(looked_at, token=str(renewals)), shown, memory, ALL, now)
        names.append([problem.name for problem in problems])
    assert names[1:] == [[], [], ["silent"], ["silent"]]
    assert problems[0].text == (
        "the run's last sign is 120 s old; its lease ended 90 s ago: it has died, or does not reach the storage"
    )


def test_a_status_that_is_late_by_the_clock_of_the_run_is_found_whatever_the_clock_of_the_reader() -> None:
    memory = HealthMemory()
    for minute in range(3):
        renewed = msgspec.structs.replace(state(renewed=-60.0 * minute), token=str(minute))
        now = NOW + timedelta(minutes=minute, seconds=-3600)
        problems, memory = health_of(renewed, status(updated_at=ago(30)), memory, ALL, now)
    assert [problem.name for problem in problems] == ["silent"] and "status is 150 s old" in problems[0].text


def test_the_status_of_an_earlier_run_does_not_count() -> None:
    old = msgspec.structs.replace(status(last_checkpoint=checkpoint(9000)), epoch=3)
    assert health_of(state(), old, HealthMemory(), ALL, NOW)[0] == []


# Several looks


def watermark(minute: int, rows: int, **fields: Any) -> PipelineStatus:
    return status(one(rows=rows, watermark_ms=60_000 * minute, **fields))


@pytest.mark.parametrize(
    ("looks", "stands"),
    [
        (lambda n: watermark(5, 10 * n), True),
        (lambda n: watermark(5 * 10**9, 10 * n), True),  # at no date that there is: the event time is wrong
        (lambda n: watermark(5, 10), False),  # no rows arrive
        (lambda n: watermark(n // 10, 10 * n), False),  # it moves
        (lambda n: status(one(rows=10 * n)), False),  # there is none
        (lambda n: watermark(5, 10 * n, end_of_data=True), False),
    ],
)
def test_a_watermark_that_stands_still_while_rows_arrive(looks: Callable[[int], PipelineStatus], stands: bool) -> None:
    assert found(*map(looks, range(15))) == []
    assert found(*map(looks, range(16))) == (["standing_watermark"] if stands else [])


@pytest.mark.parametrize(
    ("rows", "stands"),
    [
        (lambda n: n, True),
        (lambda n: n // 30, True),  # rows come less often
        (lambda n: min(n, 100), False),  # none come any more
        (lambda n: max(n, 119), False),  # there was a pause
        (lambda n: n % 60, False),  # restarts begin from a checkpoint
    ],
)
def test_a_standing_watermark_is_found_after_any_time(rows: Callable[[int], int], stands: bool) -> None:
    patient = HealthThresholds(standing_watermark=2 * 3600.0)
    assert found(*(watermark(5, rows(n)) for n in range(120)), thresholds=patient) == []
    assert found(*(watermark(5, rows(n)) for n in range(152)), thresholds=patient) == (["standing_watermark"] if stands else [])


def test_looks_may_be_further_apart_than_a_watermark_may_stand() -> None:
    assert found(watermark(5, 10), watermark(5, 20), apart=3600.0) == ["standing_watermark"]


@pytest.mark.parametrize("name", ["growing_lag", "growing_state"])
def test_a_rule_cannot_need_more_looks_than_are_remembered(name: str) -> None:
    grows = [status(one(rows_behind=n), last_checkpoint=checkpoint(size=100 * 2**n)) for n in range(SAMPLES + 1)]
    only = {each: None for each in HealthThresholds.__struct_fields__}
    assert found(*grows, thresholds=HealthThresholds(**{**only, name: SAMPLES})) == [name]  # type: ignore[arg-type]
    assert found(*grows[1:], thresholds=HealthThresholds(**{**only, name: SAMPLES})) == []  # type: ignore[arg-type]
    with pytest.raises(InvalidThresholdError, match=f"{name}={SAMPLES + 1}.: expected at most {SAMPLES}"):
        HealthThresholds(**{name: SAMPLES + 1})  # type: ignore[arg-type]


def test_a_lag_that_grows() -> None:
    def looks(*behind: int) -> list[PipelineStatus]:
        return [status(one(rows_behind=rows)) for rows in behind]

    assert found(*looks(*range(100, 110))) == []
    assert found(*looks(*range(100, 111))) == ["growing_lag"]
    assert found(*looks(*range(100, 109), 107, 111)) == []


def test_a_state_that_grows_by_a_half() -> None:
    def looks(*sizes: int) -> list[PipelineStatus]:
        return [status(last_checkpoint=checkpoint(size=size)) for size in sizes]

    assert found(*looks(100, 120, 140, 150)) == ["growing_state"]
    assert found(*looks(100, 120, 140, 149)) == []
    assert found(*looks(100, 120, 110, 150)) == []


def test_late_rows_and_restarts() -> None:
    assert found(status(one(late=50)), status(one(late=149))) == []
    assert found(status(one(late=50)), status(one(late=150))) == ["late_rows"]
    assert found(*(status(attempt=1 + number) for number in range(3))) == []
    assert found(*(status(attempt=1 + number) for number in range(4))) == ["restarts"]


def test_looks_that_are_close_together_count_once_and_the_memory_is_limited() -> None:
    assert found(*(status(one(rows_behind=rows)) for rows in range(100, 111)), apart=APART_SECONDS / 10) == []
    memory = HealthMemory()
    for number in range(3 * SAMPLES):
        at = NOW + timedelta(minutes=number)
        _, memory = health_of(state(), status(), memory, ALL, at)
    assert len(memory.samples) == SAMPLES
    _, memory = health_of(msgspec.structs.replace(state(), epoch=5), None, memory, ALL, at)
    assert (memory.epoch, memory.samples, memory.standing) == (5, (), {}), "of another run"


def test_after_the_clock_was_set_back_the_memory_begins_again() -> None:
    memory = HealthMemory()
    for minute in (0, 1):
        _, memory = health_of(state(), status(one(late=1000)), memory, ALL, NOW + timedelta(minutes=minute))
    problems: list[HealthProblem] = []
    for minute in range(5):
        look = status(one(late=1000 + 60 * minute), attempt=1 + minute)
        renewed = msgspec.structs.replace(state(), token=f"t{minute}")
        problems, memory = health_of(renewed, look, memory, ALL, NOW - timedelta(minutes=60 - minute))
    assert [problem.name for problem in problems] == ["restarts"], "60 late rows in each look"
    assert problems[0].text == "the job was restarted 4 times in the last 4 minutes"
    assert len(memory.samples) == 5


def test_errors_come_before_warnings() -> None:
    assert found(status(last_checkpoint=checkpoint(400, duration=9.0))) == ["checkpoint_intervals", "slow_checkpoint"]


@pytest.mark.parametrize("name", HealthThresholds.__struct_fields__)
def test_each_rule_can_be_switched_off(name: str) -> None:
    off = msgspec.structs.replace(ALL, **{name: None})
    silent = SilenceStatus(seconds=900, doing="asking", words="Getting offsets")
    worst = [
        status(
            one(rows=10 * n, late=200 * n, watermark_ms=5, rows_behind=n, silence=silent),
            attempt=1 + n,
            last_checkpoint=checkpoint(900, size=100 * 2**n, duration=9.0),
            last_failure=failure(1),
            checkpoints=CheckpointCountsStatus(completed=5, failed_in_a_row=n),
        )
        for n in range(17)
    ]
    assert set(found(*worst)) == set(HealthThresholds.__struct_fields__)
    assert set(found(*worst, thresholds=off)) == set(HealthThresholds.__struct_fields__) - {name}


@pytest.mark.parametrize("value", [0, -1, True, "5", float("nan"), float("inf"), 2.5])
def test_a_threshold_is_a_number_above_0(value: Any) -> None:
    with pytest.raises(InvalidThresholdError, match="late_rows"):
        HealthThresholds(late_rows=value)
