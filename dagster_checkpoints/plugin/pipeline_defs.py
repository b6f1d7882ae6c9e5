"""`build_pipeline_defs`: what Dagster needs for one pipeline, in one call of the builders that users can call themselves.

It must not know how a pipeline runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from dagster_checkpoints.control.health import DEFAULT_THRESHOLDS, HealthThresholds
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.setting_values import is_count
from dagster_checkpoints.plugin.asset_decorator import pipeline_assets
from dagster_checkpoints.plugin.health_check import health_check
from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE, savepoint_asset
from dagster_checkpoints.plugin.savepoints.check import savepoint_check
from dagster_checkpoints.plugin.sensors.conditions import DrainCondition
from dagster_checkpoints.plugin.sensors.health import build_health_sensor
from dagster_checkpoints.plugin.sensors.recovery import build_recovery_sensor
from dagster_checkpoints.plugin.sensors.reroot import build_reroot_sensor
from dagster_checkpoints.plugin.sensors.run_schedule import build_burst_schedule, build_run_schedule
from dagster_checkpoints.plugin.sensors.savepoints import build_savepoint_check_sensor, build_savepoint_schedule
from dagster_checkpoints.plugin.sensors.stops import build_drain_sensor, build_suspend_sensor
from dagster_checkpoints.plugin.stage_assets import instance_assets, run_selection, stage_keys, takes_run_config
from dagster_checkpoints.plugin.stage_translator import DagsterStageTranslator

RowCondition = Callable[[Mapping[str, int]], bool]
"""A condition on the number of rows of each stage."""


def may_drain(condition: object) -> bool:
    """Whether an object can say when a pipeline is drained: a condition, or a function of the number of rows."""
    return isinstance(condition, DrainCondition) or (callable(condition) and not isinstance(condition, type))


class ConflictingDefinitionsError(DagsterCheckpointsError):
    """Two arguments of `build_pipeline_defs` do not go together."""


def build_pipeline_defs(
    pipeline: Pipeline,
    *,
    coordinator: CheckpointCoordinatorResource | None = None,
    resource_key: str = RESOURCE,
    assets: dg.AssetsDefinition | None = None,
    drain_when: DrainCondition | RowCondition | None = None,
    suspend_when: DrainCondition | None = None,
    run_schedule: str | None = None,
    burst_schedule: str | None = None,
    recovery_attempts: int = 3,
    savepoint_schedule: str | None = None,
    keep_savepoints: int | None = 7,
    reroot: bool = False,
    health: HealthThresholds | bool = True,
    minimum_interval_seconds: int = 30,
    execution_timezone: str | None = None,
    automation: bool = False,
    key_prefix: str | Sequence[str] | None = None,
    group_name: str | None = None,
    deps: Mapping[str, Sequence[Any]] | None = None,
    tags: Mapping[str, str] | None = None,
    translator: DagsterStageTranslator | None = None,
    op_tags: Mapping[str, Any] | None = None,
    pool: str | None = None,
    job_tags: Mapping[str, Any] | None = None,
) -> dg.Definitions:
    """Everything that Dagster needs for a pipeline: assets, a job, savepoints with their check, sensors and schedules.

    ================================  ================================================================  =================
    definition                        what it is                                                        is there
    ================================  ================================================================  =================
    the stages' assets                op ``<pipeline>_assets``, in the group ``<pipeline>``             always
    ``checkpoints/<pipeline>``        the checkpoints, and the instances of parallel stages             always
    ``<pipeline>_job``                runs the pipeline                                                 always
    ``savepoints/<pipeline>``         a partition for each savepoint, with the check ``restorable``     always
    ``<pipeline>_savepoint_check``    checks savepoints that a stop or a drain has taken                always
    ``<pipeline>_recovery``           starts a failed run again                                         recovery_attempts
    ``<pipeline>_drain``              ends the pipeline when a condition holds                          drain_when
    ``<pipeline>_suspend``            suspends the pipeline when a condition holds                      suspend_when
    ``<pipeline>_reroot``             requests a checkpoint when stages have finished                   reroot
    ``<pipeline>_health``             evaluates the check ``healthy`` of ``checkpoints/<pipeline>``     health
    ``<pipeline>_runs``               runs the job by cron                                              run_schedule
    ``<pipeline>_bursts``             runs the job in bursts by cron                                    burst_schedule
    ``<pipeline>_savepoints``         takes savepoints by cron                                          savepoint_schedule
    ================================  ================================================================  =================

    More is added with :meth:`dagster.Definitions.merge`; what should be different is built with the function of the same name as
    the definition, such as :func:`build_recovery_sensor`, and left out here.

    Args:
        pipeline: The pipeline.
        coordinator: The resource that runs it; None if the code location defines it under `resource_key`, for example because
            several pipelines share it.
        resource_key: The resource's key.
        assets: The pipeline's assets, if the function that runs it should be your own: made by :func:`pipeline_assets`.
        drain_when: When the pipeline is drained: a condition of `dagster_checkpoints.sensors` for the sensor; or, without a
            sensor, a function of the number of rows of each stage, which the run itself calls about once a second. Bounded
            sources are read to their end first.
        suspend_when: When the pipeline is suspended, so that the next run goes on; see :func:`build_suspend_sensor`.
        run_schedule: The times of runs, as a cron expression. A tick is skipped while a run is alive.
        burst_schedule: The times of bursts, as a cron expression: a run reads what is there, and suspends; see
            :func:`build_burst_schedule`. A tick is skipped while a run is alive.
        recovery_attempts: The number of consecutive times that a failed run is started again; 0 for no sensor.
        savepoint_schedule: The times of savepoints, as a cron expression.
        keep_savepoints: The number of newest savepoints of that schedule that are kept; None for any number.
        reroot: Whether there is a sensor that requests a checkpoint when stages have finished.
        health: Whether there is a check of the pipeline's health with a sensor that evaluates it; or from when it is unhealthy.
        minimum_interval_seconds: Least seconds between two ticks of a sensor.
        execution_timezone: The time zone of the cron expressions; default: UTC.
        automation: Whether what starts runs or takes savepoints (recovery, schedules) is on without being switched on in Dagster.
            The other sensors are.
        key_prefix: as for :func:`pipeline_assets`; likewise the arguments after it.
        group_name: The group of the stages' assets; default: the pipeline's name.
        deps: Assets outside of the pipeline that stages read.
        tags: Tags of the assets.
        translator: Says how each stage becomes an asset.
        op_tags: Tags of the op.
        pool: Concurrency pool of the op.
        job_tags: Tags of the job, and so of its runs, also those of schedules and of the recovery sensor: `dagster-k8s/config`,
            or what a limit of the run queue counts.

    Raises:
        ConflictingDefinitionsError: With `assets`, another argument describes the assets, or how they run.
        ValueError: An argument is of another kind than said here.
        NotAPipelineAssetError: `assets` are not this pipeline's, or cannot be run in bursts.

    Examples:
        >>> defs = build_pipeline_defs(shop, coordinator=CheckpointCoordinatorResource(storage="s3://bucket/checkpoints"))
    """
    _check_kinds(
        recovery_attempts=("a whole number of at least 0", is_count(recovery_attempts, least=0), recovery_attempts),
        reroot=("True or False", isinstance(reroot, bool), reroot),
        automation=("True or False", isinstance(automation, bool), automation),
        health=("True, False, or HealthThresholds", isinstance(health, bool | HealthThresholds), health),
        drain_when=("a condition, or a function of the rows", drain_when is None or may_drain(drain_when), drain_when),
        suspend_when=("a condition", isinstance(suspend_when, DrainCondition | None), suspend_when),
    )
    condition, rows = (drain_when, None) if isinstance(drain_when, DrainCondition) else (None, drain_when)
    described = {
        "key_prefix": key_prefix,
        "group_name": group_name,
        "deps": deps,
        "tags": tags,
        "translator": translator,
        "op_tags": op_tags,
        "pool": pool,
    }
    if assets is None:
        decorate = pipeline_assets(
            pipeline=pipeline,
            name=f"{pipeline.name}_assets",
            required_resource_keys={resource_key},
            **{**described, "group_name": group_name or pipeline.name},  # type: ignore[arg-type]
        )
        assets = decorate(_runs(pipeline, resource_key, rows))
    else:
        _check_own_assets(pipeline, assets, {**described, "drain_when": rows})
    savepoints = savepoint_asset(pipeline=pipeline, assets=assets, resource_key=resource_key)
    check = savepoint_check(pipeline=pipeline, savepoints=savepoints, resource_key=resource_key)
    job = _job(pipeline, assets, job_tags)
    on, off = dg.DefaultSensorStatus.RUNNING, dg.DefaultSensorStatus.STOPPED
    every: dict[str, Any] = {"pipeline": pipeline, "minimum_interval_seconds": minimum_interval_seconds}
    asking = {**every, "resource_key": resource_key}
    sensors = [build_savepoint_check_sensor(savepoints=savepoints, check=check, default_status=on, **every)]
    if recovery_attempts:
        recovers = on if automation else off
        sensors.append(
            build_recovery_sensor(assets=assets, jobs=[job], limit=recovery_attempts, default_status=recovers, **asking)
        )
    if condition is not None:
        sensors.append(build_drain_sensor(when=condition, default_status=on, **asking))
    if suspend_when is not None:
        sensors.append(build_suspend_sensor(when=suspend_when, default_status=on, **asking))
    if reroot:
        sensors.append(build_reroot_sensor(assets=assets, default_status=on, **asking))
    checks = [check]
    if health:
        thresholds = health if isinstance(health, HealthThresholds) else DEFAULT_THRESHOLDS
        checks.append(health_check(pipeline=pipeline, thresholds=thresholds, resource_key=resource_key))
        sensors.append(build_health_sensor(thresholds=thresholds, default_status=on, **asking))
    by_cron: dict[str, Any] = {
        "pipeline": pipeline,
        "execution_timezone": execution_timezone,
        "default_status": dg.DefaultScheduleStatus.RUNNING if automation else dg.DefaultScheduleStatus.STOPPED,
        "resource_key": resource_key,
    }
    schedules = []
    if run_schedule is not None:
        schedules.append(build_run_schedule(job=job, cron_schedule=run_schedule, **by_cron))
    if burst_schedule is not None:
        schedules.append(build_burst_schedule(assets=assets, job=job, cron_schedule=burst_schedule, **by_cron))
    if savepoint_schedule is not None:
        schedules.append(
            build_savepoint_schedule(savepoints=savepoints, cron_schedule=savepoint_schedule, keep=keep_savepoints, **by_cron)
        )
    return dg.Definitions(
        assets=[assets, *instance_assets(assets), savepoints],
        asset_checks=checks,
        jobs=[job],
        sensors=sensors,
        schedules=schedules,
        resources={} if coordinator is None else {resource_key: coordinator},
    )


def _check_kinds(**arguments: tuple[str, bool, object]) -> None:
    """Refuse arguments of a wrong kind: what is expected, whether that is so, and what was found.

    In a component's YAML a template may be anything, and a text such as "false" counts as true.
    """
    for name, (expected, fits, found) in arguments.items():
        if not fits:
            raise ValueError(f"build_pipeline_defs({name}=...): expected {expected}, found {found!r}")


def _job(pipeline: Pipeline, assets: dg.AssetsDefinition, tags: Mapping[str, Any] | None) -> Any:
    start = {"restore_from": "latest"}
    return dg.define_asset_job(
        f"{pipeline.name}_job",
        selection=run_selection(pipeline, assets),
        config={"ops": {assets.node_def.name: {"config": start}}} if takes_run_config(assets, "restore_from") else None,
        description=(
            f"Launch this job first. Runs pipeline {pipeline.name!r}: all stages in one run. It continues the previous run if "
            "that did not finish. To begin from a savepoint, set restore_from in the launchpad to its location, URL or "
            "number; `none` is a new start."
        ),
        executor_def=dg.in_process_executor,  # one op: a second process would only need more memory
        tags=tags,
    )


def _runs(
    pipeline: Pipeline, resource_key: str, drain_when: RowCondition | None
) -> Callable[[dg.AssetExecutionContext], Iterator[dg.MaterializeResult[Any]]]:
    """The function of the assets."""

    def run(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        coordinator: CheckpointCoordinatorResource = getattr(context.resources, resource_key)
        yield from coordinator.run(pipeline, context=context, drain_when=drain_when)

    return run


def _check_own_assets(pipeline: Pipeline, assets: dg.AssetsDefinition, described: Mapping[str, Any]) -> None:
    stage_keys(assets, pipeline)
    both = sorted(name for name, value in described.items() if value is not None)
    if both:
        raise ConflictingDefinitionsError(
            f"build_pipeline_defs of pipeline {pipeline.name!r}: expected either assets= or what describes them, found assets= "
            f"and {', '.join(both)}. Give these to @pipeline_assets (a function of rows: to coordinator.run(drain_when=...)), or "
            "leave out assets="
        )
