"""Savepoints by themselves: the schedule that takes them, with retention, and the sensor that checks them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg

from dagster_checkpoints.files.urls import validate_directory
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.setting_values import check_seconds, is_count
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE, SavepointConfig
from dagster_checkpoints.plugin.savepoints.recording import location_of
from dagster_checkpoints.plugin.savepoints.retention import STAMP, SavepointRetention
from dagster_checkpoints.plugin.sensors.pipeline_runs import runs_of
from dagster_checkpoints.plugin.sensors.pipeline_sensor import (
    TRANSIENT,
    Cursor,
    NotRunning,
    find_run_for_schedule,
    not_reached,
    read_cursor,
    write_cursor,
)
from dagster_checkpoints.plugin.stage_assets import PIPELINE
from dagster_checkpoints.storage.layout import validate_savepoint_name

_AT_ONCE = 20


class _SavepointCheckCursor(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    seen: storage id of the newest materialization that a tick has read; -1 before the first tick, 0 if it has found none.
    """

    seen: int = -1


def build_savepoint_check_sensor(
    *,
    pipeline: Pipeline,
    savepoints: dg.AssetsDefinition,
    check: dg.AssetChecksDefinition,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """A sensor that runs the check for savepoints that were not taken by materializing the savepoint asset.

    The pipeline's own run records a savepoint that the command line, a stop, a drain sensor or a termination has taken, and no
    check runs with it: reading the whole savepoint would slow the pipeline down. The sensor reads the materialization, and
    launches one run of the check for each such savepoint. Its first tick begins with the newest one.

    Args:
        pipeline: The pipeline.
        savepoints: The asset that :func:`savepoint_asset` created.
        check: The check that :func:`savepoint_check` created.
        name: The sensor's name; default: the pipeline's name and `_savepoint_check`.
        minimum_interval_seconds: Least seconds between two ticks.
        default_status: Whether the sensor runs without being switched on.

    Examples:
        >>> build_savepoint_check_sensor(pipeline=flights, savepoints=flights_savepoints, check=flights_savepoint_check)
    """
    sensor_name = name or f"{pipeline.name}_savepoint_check"
    job = dg.define_asset_job(
        f"{sensor_name}_job",
        selection=dg.AssetSelection.checks(check),
        description=f"Launched by the sensor {sensor_name!r}: reads a savepoint of pipeline {pipeline.name!r}, and "
        "reports whether it can be restored.",
    )
    op_name = check.node_def.name

    @dg.sensor(
        name=sensor_name,
        job=job,
        description=f"Checks savepoints of pipeline {pipeline.name!r} that were not taken by materializing their asset.",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        before = read_cursor(context.cursor, _SavepointCheckCursor)
        records = _recorded_since(context.instance, savepoints.key, before.seen)
        requests = []
        for record in records:
            recorded = record.asset_materialization
            location = location_of(recorded) if recorded is not None else None
            run = context.instance.get_run_by_id(record.run_id)
            if location is None or run is None or PIPELINE not in run.tags:
                context.log.info(f"Savepoint {record.partition_key}: it was taken through its asset, whose check runs with it.")
                continue
            context.log.info(f"Savepoint {record.partition_key} ({location}) of run {run.run_id}: its check is requested.")
            config = {"ops": {op_name: {"config": {"savepoint": location}}}}
            requests.append(dg.RunRequest(run_key=f"{sensor_name}-{record.storage_id}", run_config=config))
        cursor = write_cursor(_SavepointCheckCursor(seen=records[-1].storage_id if records else max(before.seen, 0)))
        if requests:
            return dg.SensorResult(run_requests=requests, cursor=cursor)
        return dg.SensorResult(skip_reason="No savepoint was taken outside of the asset since the last tick.", cursor=cursor)

    return tick


def _recorded_since(instance: dg.DagsterInstance, key: dg.AssetKey, seen: int) -> list[dg.EventLogRecord]:
    """The savepoints recorded since the last tick, oldest first; without a memory, only the newest one."""
    if seen < 0:
        return list(instance.fetch_materializations(key, limit=1).records)
    since = dg.AssetRecordsFilter(asset_key=key, after_storage_id=seen)
    return list(instance.fetch_materializations(since, limit=_AT_ONCE, ascending=True).records)


def build_savepoint_schedule(
    *,
    pipeline: Pipeline,
    savepoints: dg.AssetsDefinition,
    cron_schedule: str,
    keep: int | None = 7,
    keep_for: timedelta | None = None,
    prefix: str = "periodic-",
    path: str = "",
    deadline: float = 600.0,
    verify: bool = True,
    name: str | None = None,
    execution_timezone: str | None = None,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
    resource_key: str = RESOURCE,
) -> dg.ScheduleDefinition:
    """A schedule that takes savepoints of the pipeline while it runs, and deletes its own old ones.

    A tick launches a run of the savepoint asset if the pipeline runs; if not, its skip reason describes the end of the latest
    job. A tick is skipped while the run of an earlier one is in the run queue. When the savepoint is complete, that run deletes
    expired savepoints: only savepoints of this schedule, by their names and by Dagster's record of them, never the newest one,
    and never one that a restart of the pipeline would need.

    Args:
        pipeline: The pipeline.
        savepoints: The asset that `savepoint_asset` created.
        cron_schedule: The times of the savepoints, as a cron expression.
        keep: The number of newest savepoints that are kept; None for any number.
        keep_for: The age from which savepoints are deleted, counted from the newest; None for any age.
        prefix: The beginning of the savepoints' names; the time follows. Each schedule of a pipeline needs a different prefix.
        path: The parent directory of the savepoints; default: the pipeline's own `savepoints/`.
        deadline: Seconds that a savepoint may take.
        verify: Whether the asset's checks, which read the whole savepoint, run with it.
        name: The schedule's name; default: the pipeline's name and `_savepoints`.
        execution_timezone: The time zone of the cron expression; default: UTC.
        default_status: Whether the schedule runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        InvalidDurationError: `deadline` is not a number of seconds above 0.
        ValueError: `keep` or `keep_for` is not positive.
        InvalidRequest: `prefix` cannot begin a savepoint's name.
        InvalidStorageUrl: `path` is neither a URL of a supported kind nor an absolute path.

    Examples:
        >>> build_savepoint_schedule(pipeline=flights, savepoints=flights_savepoints, cron_schedule="0 * * * *", keep=24)
    """
    check_seconds("build_savepoint_schedule", above=0, deadline=deadline)
    if (keep is not None and not is_count(keep, least=1)) or (keep_for is not None and keep_for <= timedelta(0)):
        raise ValueError(f"expected keep >= 1 and keep_for > 0, or None, found keep={keep}, keep_for={keep_for}")
    validate_savepoint_name(f"{prefix}{datetime.now(UTC).strftime(STAMP)}")  # or each run of the schedule would be refused
    if path:
        validate_directory(path)
    schedule_name = name or f"{pipeline.name}_savepoints"
    partitions = savepoints.partitions_def
    assert isinstance(partitions, dg.DynamicPartitionsDefinition) and partitions.name is not None
    partitions_name = partitions.name
    op_name = savepoints.node_def.name
    selection = dg.AssetSelection.assets(savepoints.key)
    job = dg.define_asset_job(
        f"{schedule_name}_job",
        selection=selection if verify else selection.without_checks(),
        description=f"Launched by the schedule {schedule_name!r}: takes a savepoint of pipeline {pipeline.name!r}.",
    )
    config = SavepointConfig(
        path=path,
        deadline=deadline,
        retention=SavepointRetention(
            made_by=schedule_name,
            prefix=prefix,
            count=keep,
            max_age=keep_for.total_seconds() if keep_for is not None else None,
        ),
    )

    @dg.schedule(
        name=schedule_name,
        job=job,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=default_status,
        required_resource_keys={resource_key},
        description=f"Periodic savepoints of pipeline {pipeline.name!r} while it runs.",
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        instance = context.instance

        try:
            running = find_run_for_schedule(context, pipeline, schedule_name, resource_key)
        except TRANSIENT as error:
            return dg.SkipReason(not_reached(error, "This tick takes no savepoint."))
        if isinstance(running, NotRunning):
            return dg.SkipReason(running.text)
        if running.status is not None and running.status.stop is not None:
            return dg.SkipReason(f"The pipeline is being stopped (request {running.status.stop.request_id}).")
        location = running.state.origin.code_location
        for waiting in runs_of(instance, pipeline, [job.name], location, [dg.DagsterRunStatus.QUEUED]):
            if waiting.dagster_run.job_name == job.name:
                return dg.SkipReason(
                    f"Run {waiting.dagster_run.run_id}, which is to take the savepoint of an earlier tick, is QUEUED: expected a "
                    "place in the run queue beside the pipeline's run, found none (concurrency.runs in dagster.yaml)."
                )
        partition = prefix + context.scheduled_execution_time.astimezone(UTC).strftime(STAMP)
        instance.add_dynamic_partitions(partitions_name, [partition])
        return dg.RunRequest(run_key=partition, partition_key=partition, run_config=dg.RunConfig(ops={op_name: config}))

    return tick
