"""The asset check of a pipeline's health, on the asset `checkpoints/<pipeline>`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_checkpoints.control.health import DEFAULT_THRESHOLDS, HealthMemory, HealthProblem, HealthThresholds, health_of
from dagster_checkpoints.control.pipeline_control import newest_status
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_end
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.stage_assets import checkpoints_key

if TYPE_CHECKING:
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource

NAME = "healthy"


def health_check(
    *, pipeline: Pipeline, thresholds: HealthThresholds = DEFAULT_THRESHOLDS, resource_key: str = RESOURCE
) -> dg.AssetChecksDefinition:
    """An asset check of `checkpoints/<pipeline>`: whether the running pipeline is healthy.

    Executed by hand it looks once, and finds what a single look can see. :func:`build_health_sensor` evaluates it by itself, and
    sees trends. It reads the storage, and does not disturb the run.

    Args:
        pipeline: The pipeline.
        thresholds: From when it counts as unhealthy.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Examples:
        >>> defs = dg.Definitions(asset_checks=[health_check(pipeline=flights)], sensors=[build_health_sensor(pipeline=flights)])
    """

    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        coordinator: CheckpointCoordinatorResource = getattr(context.resources, resource_key)
        control = coordinator.control(pipeline, instance=context.instance, asked_by=f"run {context.run.run_id}")
        state, status = control.state(), newest_status(control)
        if state is None:
            return dg.AssetCheckResult(passed=True, description="The pipeline has never been run.")
        problems, _ = health_of(state, status, HealthMemory(), thresholds, datetime.now(UTC))
        return dg.AssetCheckResult(**evaluation(state, problems))

    check.__annotations__ = {"context": dg.AssetCheckExecutionContext}
    return dg.asset_check(
        asset=checkpoints_key(pipeline.name),
        name=NAME,
        description="Checkpoints complete in time, sources answer, event time advances, nothing grows without end.",
        required_resource_keys={resource_key},
    )(check)


def evaluation(state: PipelineState, problems: Sequence[HealthProblem]) -> dict[str, Any]:
    """The arguments of an asset check's result for the problems that were found."""
    if not problems:
        ended = f"The pipeline does not run. {describe_end(state)}"
        return {"passed": True, "description": ended if state.lease is None else "The pipeline runs, and is healthy."}
    records = [dg.TableRecord({"severity": p.severity, "rule": p.name, "found": p.text}) for p in problems]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    worst = dg.AssetCheckSeverity.ERROR if problems[0].severity == "error" else dg.AssetCheckSeverity.WARN
    return {
        "passed": False,
        "severity": worst,
        "description": f"{problems[0].text}{more}",
        "metadata": {"problems": dg.MetadataValue.table(records=records)},
    }
