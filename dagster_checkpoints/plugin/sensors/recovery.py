"""The recovery sensor: restarts a failed run from the latest checkpoint, a limited number of times."""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from dagster_checkpoints.control.pipeline_control import PipelineControl, newest_status
from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.execution.pipeline_state import PipelineState
from dagster_checkpoints.execution.start_point import continues_by_itself
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.setting_values import check_seconds, is_count, is_number
from dagster_checkpoints.plugin.runs import ATTEMPT, RECOVERS, RETRY_NUMBER, repeated_tags
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.sensors.pipeline_runs import (
    OwnerAction,
    elsewhere,
    location_of,
    owner_action,
    pending_retry,
    runs_of,
    was_refused,
)
from dagster_checkpoints.plugin.sensors.pipeline_sensor import (
    Cursor,
    SensorTick,
    pipeline_sensor,
    read_cursor,
    skip,
    write_cursor,
)
from dagster_checkpoints.plugin.stage_assets import PIPELINE, run_selection, stage_keys

_LONGEST_PAUSE = 300.0


@dataclass(frozen=True)
class Backoff:
    """The delays before a failed run is restarted.

    Args:
        first: Seconds before the first attempt.
        factor: The factor by which the delay grows from attempt to attempt.
        longest: The longest delay, seconds.

    Raises:
        InvalidDurationError: `first` or `longest` is not a number of seconds.
        ValueError: `factor` is below 1, or `longest` below `first`.
    """

    first: float = 30.0
    factor: float = 2.0
    longest: float = 900.0

    def __post_init__(self) -> None:
        check_seconds("Backoff", first=self.first, longest=self.longest)
        if not is_number(self.factor, least=1) or self.longest < self.first:
            raise ValueError(f"expected factor >= 1, a finite number, and longest >= first, found {self}")

    def seconds(self, attempts: int) -> float:
        """The delay before the next attempt.

        Args:
            attempts: The number of attempts so far.
        """
        try:
            return min(self.first * self.factor**attempts, self.longest)
        except OverflowError:
            return self.longest


class _RecoveryCursor(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    run: id of the run whose process may still be alive.
    token: the token of the lease at the last tick.
    since: the time since which the token is the same, seconds since 1970, by the sensors' clock.
    looked: the time of the last tick, by the same clock.
    """

    run: str = ""
    token: str = ""
    since: float = 0.0
    looked: float = 0.0


def build_recovery_sensor(
    *,
    pipeline: Pipeline,
    assets: dg.AssetsDefinition,
    jobs: Sequence[Any] = (),
    limit: int = 3,
    backoff: Backoff = Backoff(),
    reset_after: float = 3600.0,
    dead_after: float | None = 300.0,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.SensorDefinition:
    """A sensor that restarts a pipeline's failed run from the latest checkpoint.

    It does not restart a run that was cancelled, has finished, or was followed by another run, nor a run whose job had ended or
    was suspended by a request. If the job was suspended because the run's process was terminated from outside
    (`savepoint_on_termination`: a pod is evicted), the new run continues from that savepoint; a run that Dagster's user
    terminated is not restarted. The sensor considers the run that owns the pipeline, or owned it last: a run that was refused
    after that is not a run of the pipeline. The new run has the failed run's configuration. If that named a checkpoint or
    savepoint to restore from and the run failed before it had completed its first checkpoint, the new run starts from the same
    one; otherwise from the latest checkpoint. Each failed run is restarted once, even if the sensor's cursor is lost: the run key
    is the failed run's id. As long as Dagster is going to retry the run, or retries it (`run_retries`), the sensor waits. It
    gives back the slots of pools that the failed run still holds. If a newer run waits behind the failed one, the sensor gives
    back the slots, and starts no other run: the newer run continues the job.

    A run whose process was killed counts as failed only after Dagster has marked it so. Dagster's default launcher does that by
    itself while the code server is alive; for other launchers switch on `run_monitoring` in `dagster.yaml`. The sensor marks what
    both miss: a run that Dagster takes for STARTED, whose lease on the pipeline has not been renewed for `dead_after` seconds, or
    that has given up the pipeline as long ago, without an end of its op in Dagster's storage. If its process lives all the same,
    it has lost the pipeline, and commits nothing.

    Args:
        pipeline: The pipeline.
        assets: The assets that `@pipeline_assets` created for it.
        jobs: Jobs that materialize the pipeline: the same job restarts their failed runs, also runs that failed before the
            pipeline began. A separate job with the sensor's name and `_job` restarts all other runs, for example of the button
            *Materialize*.
        limit: The maximum number of consecutive attempts.
        backoff: The delays before the attempts.
        reset_after: Seconds after which a run counts as a success: the count of attempts begins again from zero.
        dead_after: Seconds without a renewal of its lease, at least the lease's own, or since it has given up the pipeline, after
            which a run that Dagster takes for STARTED is marked as failed. None: never.
        name: The sensor's name; default: the pipeline's name and `_recovery`.
        minimum_interval_seconds: Least seconds between two ticks.
        default_status: Whether the sensor runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        NotAPipelineAssetError: The assets are not this pipeline's.
        InvalidDurationError: `reset_after` or `dead_after` is not a number of seconds above 0.
        ValueError: `limit` is not a whole number of at least 1.
    """
    check_seconds("build_recovery_sensor", above=0, reset_after=reset_after)
    if dead_after is not None:
        check_seconds("build_recovery_sensor", above=0, dead_after=dead_after)
    if not is_count(limit, least=1):
        raise ValueError(f"expected build_recovery_sensor(limit=...) of at least 1, or no run is ever restarted; found {limit!r}")
    keys = frozenset(stage_keys(assets, pipeline).values())
    sensor_name = name or f"{pipeline.name}_recovery"
    own_job = dg.define_asset_job(
        f"{sensor_name}_job",
        selection=run_selection(pipeline, assets),
        description=f"Launched by the sensor {sensor_name!r}: continues pipeline {pipeline.name!r} after a failure.",
    )
    job_names = [job.name for job in jobs]
    op_name = assets.node_def.name
    longest_pause = max(_LONGEST_PAUSE, dead_after or 0.0, 2.0 * minimum_interval_seconds)

    def evaluate(tick: SensorTick) -> dg.SensorResult:
        state = tick.control.do(PipelineControl.state)
        status = tick.control.do(newest_status)
        last = _last_owner(state, status)
        owner = _run_record(tick.dagster.instance, last)
        location = location_of(tick.dagster)
        runs = runs_of(tick.dagster.instance, pipeline, [*job_names, own_job.name], location)
        record = _newest_run([run for run in runs if _executes(run.dagster_run, op_name, keys)], owner)
        if record is None:
            return skip(f"{_unknown(last)} {_LAUNCH}" if last else "The pipeline has never been run.", _RecoveryCursor())
        run = record.dagster_run
        now = tick.now.timestamp()
        before = _unless_paused(read_cursor(tick.dagster.cursor, _RecoveryCursor), now, longest_pause)
        watch = _Watch(tick.dagster.instance, op_name, state, before, now, dead_after)
        if owner is not None and run.run_id != owner.dagster_run.run_id and not run.is_finished:
            return watch.behind_owner(owner.dagster_run, run)
        if run.status is dg.DagsterRunStatus.STARTED and (silence := watch.silence(run)):
            return watch.mark_if_it_lasts(run, run, silence)
        if run.status is not dg.DagsterRunStatus.FAILURE:
            return skip(f"The newest run, {run.run_id}, is {run.status.value}.", _RecoveryCursor())
        if other := elsewhere(run, location):  # the owner: both code locations have one storage
            return skip(
                f"Run {run.run_id}, which ran the pipeline last, failed. It is of code location {other!r}, whose sensor starts "
                f"it again; this one does not. {_LAUNCH}",
                _RecoveryCursor(),
            )
        if retry := pending_retry(tick.dagster.instance, record, now):
            return skip(f"Run {run.run_id} failed. {retry}", _RecoveryCursor())
        attempts = _attempts(record, reset_after)
        if attempts >= limit:
            return skip(f"Run {run.run_id} failed. Given up after {attempts} attempts to recover.", _RecoveryCursor())
        why_not, after = watch.obstacle(run.run_id, owner, status)
        if why_not:
            return skip(f"Run {run.run_id} failed. {why_not}", after)
        failed_at = datetime.fromtimestamp(_ended_at(record), UTC)
        due = failed_at + timedelta(seconds=backoff.seconds(attempts))
        if tick.now < due:
            return skip(f"Run {run.run_id} failed. Attempt {attempts + 1} of {limit} is due at {due:%H:%M:%S} UTC.", after)
        _free_pools(tick.dagster.instance, run.run_id)
        request = _recovery_run(run, attempts + 1, _has_completed_a_checkpoint(run.run_id, state, status))
        return dg.SensorResult(run_requests=[request], cursor=write_cursor(after))

    def _recovery_run(run: dg.DagsterRun, attempt: int, from_latest: bool) -> dg.RunRequest:
        by_its_job = run.job_name in job_names
        config: dict[str, Any] = copy.deepcopy(dict(run.run_config))
        ops = config.get("ops", {})
        if not by_its_job:  # leave out the configuration that only another job understands
            ops = {op_name: ops[op_name]} if op_name in ops else {}
            config = {part: value for part, value in (("ops", ops), ("resources", config.get("resources"))) if value}
        op_config = ops.get(op_name, {}).get("config", {})
        if from_latest and "restore_from" in op_config:
            op_config["restore_from"] = "latest"
        return dg.RunRequest(
            run_key=run.run_id,
            job_name=run.job_name if by_its_job else own_job.name,
            run_config=config,
            # All stages, also those that the code has had only since: finished ones do not run again.
            asset_selection=sorted(keys) if run.asset_selection else None,
            tags={**repeated_tags(run.tags), PIPELINE: pipeline.name, RECOVERS: run.run_id, ATTEMPT: str(attempt)},
        )

    return pipeline_sensor(
        evaluate,
        pipeline=pipeline,
        name=sensor_name,
        description=f"Restarts a failed run of pipeline {pipeline.name!r}, at most {limit} consecutive times.",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        resource_key=resource_key,
        jobs=[*jobs, own_job],
    )


def _free_pools(instance: dg.DagsterInstance, run_id: str) -> None:
    """Give back the slots that a dead run holds in pools: the run that is to follow it would wait for them.

    Dagster gives them back only with ``run_monitoring.free_slots_after_run_end_seconds``.
    """
    events = instance.event_log_storage
    if events.supports_global_concurrency_limits:
        events.free_concurrency_slots_for_run(run_id)


def _last_owner(state: PipelineState | None, status: PipelineStatus | None) -> str:
    """Id of the run that owns the pipeline or, if it is released, owned it last; "" if none is known."""
    if state is None:
        return ""
    if state.lease is not None:
        return state.lease.owner.run_id
    return state.job.run_id or (status.run_id if status is not None and status.epoch == state.epoch else "")


def _run_record(instance: dg.DagsterInstance, run_id: str) -> dg.RunRecord | None:
    return instance.get_run_record_by_id(run_id) if run_id else None


def _executes(run: dg.DagsterRun, op: str, keys: Set[dg.AssetKey]) -> bool:
    """Whether a run executes the pipeline: a selection in its job, or a re-execution from a failure, may leave it out."""
    steps = run.step_keys_to_execute
    if steps is not None and not any(step.rpartition(".")[2] == op for step in steps):
        return False
    return not run.asset_selection or not keys.isdisjoint(run.asset_selection)


def _newest_run(runs: Sequence[dg.RunRecord], owner: dg.RunRecord | None) -> dg.RunRecord | None:
    """The pipeline's newest run among those that were not refused, and did not end while the owner's run continued."""
    records = {record.storage_id: record for record in (*runs, *([owner] if owner is not None else []))}
    newest_first = [records[storage_id] for storage_id in sorted(records, reverse=True)]
    return next((record for record in newest_first if _is_of_the_pipeline(record, owner)), None)


def _is_of_the_pipeline(record: dg.RunRecord, owner: dg.RunRecord | None) -> bool:
    run = record.dagster_run
    if was_refused(run) and RECOVERS not in run.tags:  # a refused recovery counts as an attempt
        return False
    if owner is not None and run.run_id == owner.dagster_run.run_id:
        return True
    if owner is None or record.storage_id < owner.storage_id or not run.is_finished:
        return True
    return owner.dagster_run.is_finished and _ended_at(record) > _ended_at(owner)


def _ended_at(record: dg.RunRecord) -> float:
    return record.end_time or record.update_timestamp.timestamp()


def _attempts(record: dg.RunRecord, reset_after: float) -> int:
    """The number of consecutive attempts that have failed, this run included if it was an attempt."""
    if record.start_time is not None and record.end_time is not None and record.end_time - record.start_time >= reset_after:
        return 0
    run = record.dagster_run
    if run.parent_run_id is not None and RETRY_NUMBER not in run.tags:
        return 0  # a person has launched it again, with a copy of its tags
    tag = run.tags.get(ATTEMPT, "")
    return int(tag) if tag.isdecimal() else 0


def _unless_paused(before: _RecoveryCursor, now: float, longest: float) -> _RecoveryCursor:
    """The memory of the last tick; an empty one after a pause, in which the run's machine may have slept, too."""
    return before if 0.0 <= now - before.looked <= longest else _RecoveryCursor()


_LAUNCH = "Launch the pipeline if it should run."


def _unknown(last: str) -> str:
    return f"Run {last} has run the pipeline last, and is not in Dagster any more, or in another Dagster instance."


@dataclass(frozen=True)
class _Watch:
    """What a tick knows of runs whose process may be dead, although Dagster or the lease does not say so.

    Attributes:
        instance: Dagster's instance.
        op: Name of the op that runs the pipeline.
        state: The pipeline's state; None if it never ran.
        before: The memory of the last tick.
        now: The time of the tick, seconds since 1970.
        dead_after: Seconds of silence after which a run is marked as failed; None for never.
    """

    instance: dg.DagsterInstance
    op: str
    state: PipelineState | None
    before: _RecoveryCursor
    now: float
    dead_after: float | None

    def obstacle(self, run_id: str, owner: dg.RunRecord | None, status: PipelineStatus | None) -> tuple[str, _RecoveryCursor]:
        """The reason why a failed run cannot be restarted now; "" if there is none. And the memory for the next tick."""
        state = self.state
        if state is None:
            return "", _RecoveryCursor()
        if state.lease is None:
            last = _last_owner(state, status)
            if last == run_id:
                return _why_not_continued(state), _RecoveryCursor()
            if last and owner is None and (why_not := _why_not_continued(state) or _canceled(state)):
                return f"{_unknown(last)} {why_not} {_LAUNCH}", _RecoveryCursor()
            return "", _RecoveryCursor()
        lease_owner = state.lease.owner.run_id
        # Its process may still be alive. A dead process does not renew its lease.
        after = self._watched(run_id)
        if self.now - after.since < state.lease.seconds:
            whose = "Its" if lease_owner == run_id else f"Run {lease_owner} owns the pipeline now; its"
            return f"{whose} lease of {state.lease.seconds:g} s may still be renewed; checking again at the next tick.", after
        return "", after

    def silence(self, run: dg.DagsterRun) -> str:
        """What a run that Dagster takes for STARTED has not done, if that lasts because its process is dead; "" for another."""
        if self.state is None or _last_owner(self.state, None) != run.run_id:
            return ""
        if self.state.lease is not None:
            return "has not renewed its lease on the pipeline"
        # It gave the pipeline up, so its op ends now. Where Dagster's storage was away, that could not be written.
        if _why_not_continued(self.state) or self._has_ended(run.run_id):
            return ""
        return "has given up the pipeline, and has not written the end of its op into Dagster's storage"

    def mark_if_it_lasts(self, run: dg.DagsterRun, newest: dg.DagsterRun, silence: str) -> dg.SensorResult:
        """Mark a run that Dagster takes for STARTED as failed if its silence lasts.

        Args:
            run: The run.
            newest: The pipeline's newest run.
            silence: What the run has not done.
        """
        after = self._watched(run.run_id)
        lease = self.state.lease.seconds if self.state is not None and self.state.lease is not None else 0.0
        silent = self.now - after.since
        if self.dead_after is None or silent < max(self.dead_after, lease):
            return skip(_not_failed(run, newest), after)
        message = (
            f"The run {silence} for {silent:.0f} s: its process has died, and Dagster has not noticed it, because its machine, "
            "the code server that had started it or Dagster's storage was gone. The recovery sensor marks the run as failed."
        )
        self.instance.report_run_failed(run, message)
        alone = newest.run_id == run.run_id
        follows = f"Run {newest.run_id}, which is {newest.status.value}, follows it."
        then = "It is restarted at the next tick." if alone else follows
        return skip(f"Run {run.run_id} was {run.status.value}. {message} {then}", after)

    def behind_owner(self, owner: dg.DagsterRun, waiting: dg.DagsterRun) -> dg.SensorResult:
        """A newer run waits behind the owner, and is to follow it: see that a dead owner does not hold what the run waits for."""
        after = self._watched(owner.run_id)
        renews = self.state is not None and self.state.lease is not None and self.now - after.since < self.state.lease.seconds
        action = owner_action(owner.status, waiting.status, renews=renews)
        if action is OwnerAction.WATCH and (silence := self.silence(owner)):
            return self.mark_if_it_lasts(owner, waiting, silence)
        freed = ""
        if action is OwnerAction.FREE_POOLS:
            _free_pools(self.instance, owner.run_id)
            freed = " Its slots in pools are given back: the newest run follows it."
        return skip(_not_failed(owner, waiting) + freed, after)

    def _has_ended(self, run_id: str) -> bool:
        """Whether Dagster knows of the end of the op, be it alone or in a graph."""
        ends = self.instance.all_logs(run_id, of_type={dg.DagsterEventType.STEP_SUCCESS, dg.DagsterEventType.STEP_FAILURE})
        return any(end.step_key is not None and end.step_key.rpartition(".")[2] == self.op for end in ends)

    def _watched(self, run_id: str) -> _RecoveryCursor:
        """Since when the lease was not renewed, as far as the sensor has seen."""
        token = self.state.token if self.state is not None else ""
        since = self.before.since if (self.before.run, self.before.token) == (run_id, token) else self.now
        return _RecoveryCursor(run=run_id, token=token, since=since, looked=self.now)


def _not_failed(owner: dg.DagsterRun, newest: dg.DagsterRun) -> str:
    text = f"The newest run, {newest.run_id}, is {newest.status.value}."
    if newest.run_id == owner.run_id:
        return text
    return f"{text} Run {owner.run_id}, which owns the pipeline or owned it last, is {owner.status.value}."


def _why_not_continued(state: PipelineState) -> str:
    """The reason why the failed run's job must not continue; "" if it may."""
    if continues_by_itself(state):
        return ""
    job = state.job
    if job.stop_asked_by == "caught_up":
        return f"Its job had caught up, and was suspended with savepoint {job.savepoint}: the next run resumes it."
    if job.ended_by == "suspend":
        return f"A request had suspended its job with savepoint {job.savepoint} before: the next run that is launched resumes it."
    return "Its job had finished before: there is nothing to continue."


def _canceled(state: PipelineState) -> str:
    return "Its job was canceled." if state.job.status == "CANCELED" else ""


def _has_completed_a_checkpoint(run_id: str, state: PipelineState | None, status: PipelineStatus | None) -> bool:
    if state is None or state.newest is None or status is None or status.run_id != run_id:
        return False
    return state.newest.epoch == status.epoch
