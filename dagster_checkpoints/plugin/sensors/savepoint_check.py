"""The sensor that checks savepoints which no materialization of the savepoint asset has checked."""

from __future__ import annotations

import dagster as dg

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.savepoints.recording import location_of
from dagster_checkpoints.plugin.sensors.cursors import Cursor, read_cursor, write_cursor
from dagster_checkpoints.plugin.stage_assets import PIPELINE

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
