"""Whether a pipeline is healthy, by what its run has written into storage: the run itself is not asked.

A rule on values, with the time as an argument. What is only seen over time (a watermark that stands still while rows arrive, a
state that grows and grows) needs a memory of earlier looks, which the caller keeps. Must not know Dagster, nor requests.

Source: Flink's metrics of checkpoints, `currentOutputWatermark`, `numRecordsOut` and `pendingRecords`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Literal

import msgspec

from dagster_checkpoints.control.last_sign import last_sign
from dagster_checkpoints.control.status import PipelineStatus, StageStatus, watermark_moment
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.execution.pipeline_state import Lease, PipelineState, describe_end
from dagster_checkpoints.execution.source_answers import Silence, silence_text
from dagster_checkpoints.pipeline.setting_values import is_number

SAMPLES = 24
"""Number of earlier looks in a memory."""
Severity = Literal["error", "warning"]


COUNTS = frozenset({"failed_checkpoints", "growing_lag", "growing_state", "late_rows", "restarts"})
"""The thresholds that are whole numbers."""


class InvalidThresholdError(DagsterCheckpointsError):
    """A threshold of health is not a number, or below its least value."""


class HealthThresholds(msgspec.Struct, frozen=True, kw_only=True):
    """From when a pipeline counts as unhealthy. None switches a rule off.

    Args:
        failed_checkpoints: Number of consecutive checkpoints that have failed, as `tolerable_failed_checkpoints` counts them.
        checkpoint_intervals: Number of intervals without a completed checkpoint.
        slow_checkpoint: Seconds that the newest checkpoint took.
        standing_watermark: Seconds in which a stage emits rows and its watermark stands still.
        growing_lag: Number of looks in a row, at least a minute apart, in each of which more messages are unread than before.
        growing_state: Number of looks in a row in each of which the newest checkpoint is larger; in all by a half at least.
        late_rows: Number of late rows dropped between two looks.
        silent_source: Seconds for which a source has not answered.
        restarts: Number of restarts within the time that the memory reaches back, 24 looks.

    Raises:
        InvalidThresholdError: A threshold is not a number above 0; or a number of things (checkpoints, looks, rows) is not whole;
            or a rule would need more looks than the 24 that are remembered.
    """

    failed_checkpoints: int | None = 2
    checkpoint_intervals: float | None = 5.0
    slow_checkpoint: float | None = None
    standing_watermark: float | None = 900.0
    growing_lag: int | None = 10
    growing_state: int | None = None
    late_rows: int | None = None
    silent_source: float | None = 300.0
    restarts: int | None = 3

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            whole = name in COUNTS
            if value is not None and not (is_number(value, above=0) and (not whole or value == int(value))):
                kind = "whole number" if whole else "number"
                raise InvalidThresholdError(f"HealthThresholds({name}={value!r}): expected a {kind} above 0, or None for no rule")
            if value is not None and name.startswith("growing_") and value > SAMPLES:
                raise InvalidThresholdError(
                    f"HealthThresholds({name}={value!r}): expected at most {SAMPLES}, which are remembered"
                )
            if value is not None and whole:
                msgspec.structs.force_setattr(self, name, int(value))


DEFAULT_THRESHOLDS = HealthThresholds()


class HealthProblem(msgspec.Struct, frozen=True):
    """One reason why a pipeline is not healthy.

    Attributes:
        name: the rule, as a name of :class:`HealthThresholds`; "failed" for a job that has failed or died, "silent" for a run
            without a sign, "lost" for a lost `state.json`.
        severity: "error", or "warning" for what may be as intended.
        text: what was found, and what was expected.
    """

    name: str
    severity: Severity
    text: str


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a look keeps for later ones.

    Args:
        at: the time of the look, seconds since 1970.
        attempt: the job's attempt.
        size: bytes of the newest checkpoint.
        late, lag: by stage, its dropped and unread rows.
    """

    at: float
    attempt: int = 1
    size: int = 0
    late: dict[str, int] = {}
    lag: dict[str, int] = {}


class Standing(msgspec.Struct, frozen=True):
    """A watermark that stands still while its stage emits rows.

    Args:
        watermark_ms: the watermark, epoch ms.
        since: the time of the last look at it before rows came, seconds since 1970.
        rows: number of rows that the stage had emitted then.
        latest: the time of the latest look that has found new rows.
        latest_rows: number of rows then.
    """

    watermark_ms: int
    since: float
    rows: int
    latest: float
    latest_rows: int


class HealthMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The earlier looks at one run.

    Args:
        epoch: epoch of the run.
        token: token of `state.json` at the last look, which changes with each renewal of the lease; "" before the first.
        renewed: the time of that renewal by the reader's clock, seconds since 1970.
        samples: oldest first, at least a minute apart.
        standing: by stage, since when its watermark stands still.
    """

    epoch: int = 0
    token: str = ""
    renewed: float = 0.0
    samples: tuple[Sample, ...] = ()
    standing: dict[str, Standing] = {}


APART_SECONDS = 60.0
"""Least seconds between two samples of a memory."""


def health_of(
    state: PipelineState,
    status: PipelineStatus | None,
    memory: HealthMemory,
    thresholds: HealthThresholds,
    now: datetime,
) -> tuple[list[HealthProblem], HealthMemory]:
    """What is wrong with a pipeline, worst first, and the memory for the next look.

    A pipeline that does not run is healthy, unless its job has failed, or has died and was not continued.

    Args:
        state: content of `state.json`.
        status: content of `status.json`; None if there is none. That of an earlier run does not count.
        memory: of the look before; an empty one finds only what a single look can see. One of a later time, before the clock was
            set back, counts as empty.
        thresholds: from when it is unhealthy.
        now: the present time.
    """
    if state.lease is None:
        failed = state.job.status in ("FAILED", "RUNNING")  # RUNNING: its process has died, and no later run could continue it
        return ([HealthProblem("failed", "error", describe_end(state))] if failed else []), HealthMemory()
    if memory.epoch != state.epoch or _is_later(memory, now):
        memory = HealthMemory(epoch=state.epoch)
    status = status if status is not None and status.epoch == state.epoch else None
    renewed = _renewed(state.token, state.lease, memory, now.timestamp())
    memory = msgspec.structs.replace(memory, token=state.token, renewed=renewed)
    problems = list(_silent(state, status, state.lease.renewed_at + timedelta(seconds=now.timestamp() - renewed)))
    if status is not None:
        sample = _sample(status, now)
        memory = msgspec.structs.replace(memory, standing=_standing(status, memory.standing, thresholds, sample.at))
        problems += _found(status, memory, sample, thresholds)
        memory = _remembered(memory, sample)
    return sorted(problems, key=lambda problem: problem.severity != "error"), memory


def _is_later(memory: HealthMemory, now: datetime) -> bool:
    """Whether the clock was set back since the latest look: no age could be told from it, and no look be added, for so long."""
    return bool(memory.samples) and memory.samples[-1].at - now.timestamp() > APART_SECONDS


def _renewed(token: str, lease: Lease, memory: HealthMemory, now: float) -> float:
    """When the lease was renewed, by the reader's clock. Later looks see it; the first one takes the run's clock for equal."""
    if not memory.token:
        return min(lease.renewed_at.timestamp(), now)
    return min(memory.renewed, now) if memory.token == token else now


def _remembered(memory: HealthMemory, sample: Sample) -> HealthMemory:
    if memory.samples and sample.at - memory.samples[-1].at < APART_SECONDS:
        return memory
    return msgspec.structs.replace(memory, samples=(*memory.samples, sample)[-SAMPLES:])


def _silent(state: PipelineState, status: PipelineStatus | None, run_now: datetime) -> Iterator[HealthProblem]:
    """Whether the run is silent, at a time by its own clock."""
    sign = last_sign(state, status, run_now)
    if sign is None or not sign.overdue:
        return
    lease = f"; its lease ended {sign.lease_ended:.0f} s ago" if sign.lease_ended is not None else ""
    text = f"the run's last sign is {sign.seconds:.0f} s old{lease}: "
    if sign.gone:
        text += "its process has ended"
    elif sign.lease_ended is not None:
        text += "it has died, or does not reach the storage"
    else:
        assert status is not None
        text = (
            f"the run's status is {sign.status_seconds:.0f} s old; expected one every {status.interval:g} s: "
            "the run is very busy, or its main thread has stopped"
        )
    yield HealthProblem("silent", "error", text)


def _found(status: PipelineStatus, memory: HealthMemory, sample: Sample, thresholds: HealthThresholds) -> Iterator[HealthProblem]:
    before = memory.samples
    yield from _checkpoints(status, thresholds)
    for stage in status.stages:
        if not stage.finished:
            yield from _stands_still(stage.name, memory.standing.get(stage.name), thresholds)
            yield from _stage(stage, before, sample, thresholds)
    limit = thresholds.growing_state
    sizes = [each.size for each in (*before, sample)]
    if limit is not None and _grows(sizes, limit) and sizes[-1] >= 1.5 * sizes[-limit - 1]:
        first = sizes[-limit - 1]
        text = f"the newest checkpoint has {sample.size:,} bytes, {limit} looks ago it had {first:,}, and it grew each time"
        yield HealthProblem("growing_state", "warning", text)
    restarts = sample.attempt - before[0].attempt if before else 0
    if thresholds.restarts is not None and restarts >= thresholds.restarts:
        minutes = (sample.at - before[0].at) / 60
        yield HealthProblem("restarts", "error", f"the job was restarted {restarts} times in the last {minutes:.0f} minutes")


def _checkpoints(status: PipelineStatus, thresholds: HealthThresholds) -> Iterator[HealthProblem]:
    failure, last, counts = status.last_failure, status.last_checkpoint, status.checkpoints
    in_a_row = counts.failed_in_a_row if counts is not None else 0
    if thresholds.failed_checkpoints is not None and failure is not None and in_a_row >= thresholds.failed_checkpoints:
        text = f"the latest {in_a_row} checkpoints have failed, the last one with {failure.reason}: {failure.message}"
        yield HealthProblem("failed_checkpoints", "error", text)
    interval = status.checkpoint_interval
    if thresholds.checkpoint_intervals is not None and interval and status.phase == "running":
        newest = last.completed_at if last is not None else status.started_at
        due_since = max(newest, status.checkpoints_since or newest)  # while the job starts, none can complete
        if (status.updated_at - due_since).total_seconds() > thresholds.checkpoint_intervals * interval:
            age = (status.updated_at - newest).total_seconds()
            what = f"completed {age:.0f} s ago" if last is not None else f"is missing {age:.0f} s after the start"
            text = f"the newest checkpoint {what}; expected one every {interval:g} s"
            yield HealthProblem("checkpoint_intervals", "error", text)
    if thresholds.slow_checkpoint is not None and last is not None and last.duration > thresholds.slow_checkpoint:
        text = f"checkpoint {last.checkpoint_id} took {last.duration:.1f} s; expected at most {thresholds.slow_checkpoint:g} s"
        yield HealthProblem("slow_checkpoint", "warning", text)


def _standing(
    status: PipelineStatus, before: Mapping[str, Standing], thresholds: HealthThresholds, at: float
) -> dict[str, Standing]:
    """By stage, its watermark, and for how long rows have been emitted under it. A pause without rows is no sign of anything."""
    standing: dict[str, Standing] = {}
    limit = thresholds.standing_watermark
    if limit is None:
        return standing
    for stage in status.stages:
        known = [i.watermark_ms for i in stage.instances if i.watermark_ms is not None and not i.end_of_data]
        if stage.finished or not known or stage.rows is None:
            continue
        found, now = before.get(stage.name), Standing(min(known), at, stage.rows, at, stage.rows)
        if found is None or found.watermark_ms != now.watermark_ms:
            found = now
        elif stage.rows > found.latest_rows:
            found = msgspec.structs.replace(found, latest=at, latest_rows=stage.rows)
        elif stage.rows < found.latest_rows or found.latest == found.since or at - found.latest > limit:
            found = now
        standing[stage.name] = found
    return standing


def _stands_still(stage: str, found: Standing | None, thresholds: HealthThresholds) -> Iterator[HealthProblem]:
    limit = thresholds.standing_watermark
    if limit is None or found is None or found.latest - found.since < limit:
        return
    moment = watermark_moment(found.watermark_ms)
    stands_at = moment.astimezone().isoformat(timespec="seconds") if moment is not None else f"{found.watermark_ms} ms since 1970"
    minutes, rows = (found.latest - found.since) / 60, found.latest_rows - found.rows
    text = f"the watermark stands still at {stands_at} for {minutes:.0f} minutes, in which {rows:,} rows were emitted"
    yield HealthProblem("standing_watermark", "error", f"{stage}: {text}")


def _stage(
    stage: StageStatus, before: tuple[Sample, ...], sample: Sample, thresholds: HealthThresholds
) -> Iterator[HealthProblem]:
    name = stage.name
    lags = [each.lag[name] for each in (*before, sample) if name in each.lag]
    if thresholds.growing_lag is not None and _grows(lags, thresholds.growing_lag):
        text = f"{name}: {lags[-1]:,} messages are unread, {thresholds.growing_lag} looks ago it were "
        yield HealthProblem("growing_lag", "error", f"{text}{lags[-thresholds.growing_lag - 1]:,}, and it were more each time")
    dropped = sample.late.get(name, 0) - (before[-1].late.get(name, 0) if before else 0)
    if thresholds.late_rows is not None and before and dropped >= thresholds.late_rows:
        yield HealthProblem("late_rows", "warning", f"{name}: {dropped:,} late rows were dropped since the last look")
    for instance in stage.instances:
        silence = instance.silence
        if thresholds.silent_source is not None and silence is not None and silence.seconds >= thresholds.silent_source:
            text = silence_text((name,), Silence(silence.seconds, silence.doing, silence.words, silence.local))
            yield HealthProblem("silent_source", "error", text)


def _grows(values: list[int], times: int) -> bool:
    """Whether each of the last values is larger than the one before."""
    latest = values[-times - 1 :]
    return len(latest) == times + 1 and all(earlier < later for earlier, later in pairwise(latest))


def _sample(status: PipelineStatus, now: datetime) -> Sample:
    last = status.last_checkpoint
    stages = [stage for stage in status.stages if not stage.finished]
    lags = {
        stage.name: sum(known)
        for stage in stages
        if (known := [i.rows_behind for i in stage.instances if i.rows_behind is not None])
    }
    return Sample(
        at=now.timestamp(),
        attempt=status.attempt,
        size=last.total_bytes if last is not None else 0,
        late={stage.name: stage.late_rows for stage in stages if stage.late_rows},
        lag=lags,
    )
