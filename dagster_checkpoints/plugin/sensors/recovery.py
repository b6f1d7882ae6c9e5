"""The recovery sensor: starts a failed run again from the latest checkpoint, a limited number of times."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from dagster_checkpoints.control import PipelineControl, PipelineStatus
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.savepoints import RESOURCE
from dagster_checkpoints.plugin.sensors.cursors import Cursor, read_cursor, write_cursor
from dagster_checkpoints.plugin.sensors.pipeline_sensor import SensorTick, pipeline_sensor, skip
from dagster_checkpoints.plugin.stage_assets import PIPELINE, REFUSED, NotAPipelineAssetError, stage_keys
from dagster_checkpoints.storage import CorruptStatus, PipelineState

RECOVERS = "dagster_checkpoints/recovers"
"""Tag of a run: the failed run that it was started for."""
ATTEMPT = "dagster_checkpoints/recovery_attempt"
"""Tag of a run: the number of the attempt in a row, from 1."""
_NEWEST = 50


@dataclass(frozen=True)
class Backoff:
    """How long to wait before a failed run is started again.

    Args:
        first: Seconds before the first attempt.
        factor: Each further one waits so many times longer.
        longest: Seconds that are waited at most.

    Raises:
        ValueError: A number is outside its range.
    """

    first: float = 30.0
    factor: float = 2.0
    longest: float = 900.0

    def __post_init__(self) -> None:
        if self.first < 0 or self.factor < 1 or self.longest < self.first:
            raise ValueError(f"expected first >= 0, factor >= 1 and longest >= first, found {self}")

    def seconds(self, attempts: int) -> float:
        """Before the next attempt, after so many."""
        try:
            return min(self.first * self.factor**attempts, self.longest)
        except OverflowError:
            return self.longest


class _RecoveryCursor(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    run: the failed run whose process may still live.
    token: of the lease that it held when last looked at.
    since: seconds since 1970, by the sensors' clock: the token has been the same since then.
    """

    run: str = ""
    token: str = ""
    since: float = 0.0


def build_recovery_sensor(
    *,
    pipeline: Pipeline,
    assets: dg.AssetsDefinition,
    jobs: Sequence[Any] = (),
    limit: int = 3,
    backoff: Backoff = Backoff(),
    reset_after: float = 3600.0,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.SensorDefinition:
    """A sensor that starts a pipeline's failed run again, from the latest checkpoint.

    A run that was cancelled, has finished, or was followed by another is left alone, and so is one whose job had come to its
    end, or was suspended by a request. A job that was suspended because the run's process was terminated from outside
    (`savepoint_on_termination`: a pod is evicted) goes on from that savepoint; one that Dagster's user terminated is left alone.
    What counts is the run that owns the pipeline, or owned it last: a run that was refused meanwhile is no run of the pipeline.
    The new run has the failed one's configuration. If that named a place to restore from and the run failed before it
    had completed a checkpoint of its own, it begins there again; otherwise at the latest checkpoint. A failure is answered
    once, whatever becomes of the sensor's cursor: the run key is the failed run's id.

    A run whose process was killed has failed only when Dagster says so. Dagster's default launcher notices it by itself as
    long as the code server lives; for others switch on `run_monitoring` in `dagster.yaml`.

    Args:
        pipeline: The pipeline.
        assets: What `@pipeline_assets` made of it.
        jobs: Jobs that materialize the pipeline: their failed runs are started again by the same job, also those that failed
            before the pipeline began. Every other run (for instance of the button *Materialize*) is started again by a job
            of the sensor's own, called as the sensor.
        limit: So many times in a row.
        backoff: How long to wait before each attempt.
        reset_after: A run that lasted so many seconds was a success in this respect: counting begins anew.
        name: Of the sensor; by default the pipeline's with `_recovery` behind.
        minimum_interval_seconds: Between two ticks.
        default_status: Whether it runs from the start.
        resource_key: Of the :class:`CheckpointCoordinatorResource`.

    Raises:
        NotAPipelineAssetError: The assets are not this pipeline's.
    """
    keys = frozenset(stage_keys(assets, pipeline).values())
    if not keys:
        raise NotAPipelineAssetError(
            f"expected the assets that @pipeline_assets(pipeline=...) made of {pipeline.name!r}, found "
            f"{sorted(key.to_user_string() for key in assets.keys)}"
        )
    sensor_name = name or f"{pipeline.name}_recovery"
    own_job = dg.define_asset_job(
        f"{sensor_name}_job",
        selection=dg.AssetSelection.assets(*sorted(keys)),
        description=f"Launched by the sensor {sensor_name!r}: continues pipeline {pipeline.name!r} after a failure.",
    )
    job_names = [job.name for job in jobs]
    op_name = assets.node_def.name

    def evaluate(tick: SensorTick) -> dg.SensorResult:
        state = tick.control.do(PipelineControl.state)
        status = _status(tick)
        owner = _run_record(tick.dagster.instance, _last_owner(state, status))
        record = _newest_run(tick.dagster.instance, pipeline, [*job_names, own_job.name], owner)
        if record is None:
            return skip("The pipeline has never been run.", _RecoveryCursor())
        run = record.dagster_run
        if run.status is not dg.DagsterRunStatus.FAILURE:
            return skip(f"The newest run, {run.run_id}, is {run.status.value}.", _RecoveryCursor())
        attempts = _attempts(record, reset_after)
        if attempts >= limit:
            return skip(f"Run {run.run_id} failed. Given up after {attempts} attempts to recover.", _RecoveryCursor())
        why_not, after = _obstacle(
            run.run_id, state, status, read_cursor(tick.dagster.cursor, _RecoveryCursor), tick.now.timestamp()
        )
        if why_not:
            return skip(f"Run {run.run_id} failed. {why_not}", after)
        failed_at = datetime.fromtimestamp(_ended_at(record), UTC)
        due = failed_at + timedelta(seconds=backoff.seconds(attempts))
        if tick.now < due:
            return skip(f"Run {run.run_id} failed. Attempt {attempts + 1} of {limit} is due at {due:%H:%M:%S} UTC.", after)
        request = _again(run, attempts + 1, _has_completed_a_checkpoint(run.run_id, state, status))
        return dg.SensorResult(run_requests=[request], cursor=write_cursor(after))

    def _again(run: dg.DagsterRun, attempt: int, go_on: bool) -> dg.RunRequest:
        by_its_job = run.job_name in job_names
        config: dict[str, Any] = copy.deepcopy(dict(run.run_config))
        ops = config.get("ops", {})
        if not by_its_job:  # nothing that only another job understands
            ops = {op_name: ops[op_name]} if op_name in ops else {}
            config = {part: value for part, value in (("ops", ops), ("resources", config.get("resources"))) if value}
        op_config = ops.get(op_name, {}).get("config", {})
        if go_on and "restore_from" in op_config:
            op_config["restore_from"] = "latest"
        tags = {key: value for key, value in run.tags.items() if not key.startswith(("dagster/", "."))}
        return dg.RunRequest(
            run_key=run.run_id,
            job_name=run.job_name if by_its_job else own_job.name,
            run_config=config,
            asset_selection=sorted((run.asset_selection or frozenset()) & keys) or None,
            tags={**tags, PIPELINE: pipeline.name, RECOVERS: run.run_id, ATTEMPT: str(attempt)},
        )

    return pipeline_sensor(
        evaluate,
        pipeline=pipeline,
        name=sensor_name,
        description=f"Starts a failed run of pipeline {pipeline.name!r} again, at most {limit} times in a row.",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        resource_key=resource_key,
        jobs=[*jobs, own_job],
    )


def _last_owner(state: PipelineState | None, status: PipelineStatus | None) -> str:
    """The run that owns the pipeline or, if it is released, has run it last; "" if none is known."""
    if state is None:
        return ""
    if state.lease is not None:
        return state.lease.owner.run_id
    return state.job.run_id or (status.run_id if status is not None and status.epoch == state.epoch else "")


def _run_record(instance: dg.DagsterInstance, run_id: str) -> dg.RunRecord | None:
    return instance.get_run_record_by_id(run_id) if run_id else None


def _newest_run(
    instance: dg.DagsterInstance, pipeline: Pipeline, job_names: Sequence[str], owner: dg.RunRecord | None
) -> dg.RunRecord | None:
    """The pipeline's newest run: of those that were not refused, and did not end while the owner's run went on."""
    filters = [dg.RunsFilter(tags={PIPELINE: pipeline.name}), *(dg.RunsFilter(job_name=name) for name in job_names)]
    found = {record.storage_id: record for one in filters for record in instance.get_run_records(one, limit=_NEWEST)}
    if owner is not None:
        found[owner.storage_id] = owner
    newest_first = [found[storage_id] for storage_id in sorted(found, reverse=True)]
    return next((record for record in newest_first if _is_of_the_pipeline(record, owner)), None)


def _is_of_the_pipeline(record: dg.RunRecord, owner: dg.RunRecord | None) -> bool:
    run = record.dagster_run
    if owner is not None and run.run_id == owner.dagster_run.run_id:
        return True
    if REFUSED in run.tags and RECOVERS not in run.tags:  # a refused recovery is one of the attempts, and answered like them
        return False
    if owner is None or record.storage_id < owner.storage_id or not run.is_finished:
        return True
    return owner.dagster_run.is_finished and _ended_at(record) > _ended_at(owner)


def _ended_at(record: dg.RunRecord) -> float:
    return record.end_time or record.update_timestamp.timestamp()


def _attempts(record: dg.RunRecord, reset_after: float) -> int:
    """How many attempts in a row have failed, this run included if it was one."""
    if record.start_time is not None and record.end_time is not None and record.end_time - record.start_time >= reset_after:
        return 0
    tag = record.dagster_run.tags.get(ATTEMPT, "")
    return int(tag) if tag.isdecimal() else 0


def _status(tick: SensorTick) -> PipelineStatus | None:
    try:
        return tick.control.do(PipelineControl.status)
    except CorruptStatus:
        return None


def _obstacle(
    run_id: str, state: PipelineState | None, status: PipelineStatus | None, before: _RecoveryCursor, now: float
) -> tuple[str, _RecoveryCursor]:
    """Why the run cannot be started again now; "" if nothing is in the way."""
    if state is None:
        return "", _RecoveryCursor()
    if state.lease is None:
        return (_why_over(state) if _last_owner(state, status) == run_id else ""), _RecoveryCursor()
    owner = state.lease.owner.run_id
    # Its process may live on. One that is dead does not renew its lease.
    if before.run != run_id or before.token != state.token:
        before = _RecoveryCursor(run=run_id, token=state.token, since=now)
    if now - before.since < state.lease.seconds:
        whose = "Its" if owner == run_id else f"Run {owner} owns the pipeline now; its"
        return f"{whose} lease of {state.lease.seconds:g} s may still be renewed; looking again in the next tick.", before
    return "", before


def _why_over(state: PipelineState) -> str:
    """Why the job that the failed run has left is not to go on; "" if it is."""
    job = state.job
    if job.status != "FINISHED" or (job.ended_by == "suspend" and job.stop_asked_by == "termination"):
        return ""
    if job.ended_by == "suspend":
        return f"A request had suspended its job with savepoint {job.savepoint} before: the next run that is launched resumes it."
    return "Its job had finished before: there is nothing to go on with."


def _has_completed_a_checkpoint(run_id: str, state: PipelineState | None, status: PipelineStatus | None) -> bool:
    if state is None or state.newest is None or status is None or status.run_id != run_id:
        return False
    return state.newest.epoch == status.epoch
