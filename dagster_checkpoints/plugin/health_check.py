"""The asset check of a pipeline's health, on the asset `checkpoints/<pipeline>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_checkpoints.control.health import DEFAULT_THRESHOLDS, HealthMemory, HealthProblem, HealthThresholds, health_of
from dagster_checkpoints.control.pipeline_control import PipelineControl, newest_status
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_end
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.stage_assets import checkpoints_key

if TYPE_CHECKING:
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource

NAME = "healthy"
NEVER_RUN = "The pipeline has never been run."


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
        look = look_at(control, HealthMemory(), thresholds, datetime.now(UTC))
        return dg.AssetCheckResult(**evaluation(look))

    check.__annotations__ = {"context": dg.AssetCheckExecutionContext}
    return dg.asset_check(
        asset=checkpoints_key(pipeline.name),
        name=NAME,
        description="Checkpoints complete in time, sources answer, event time advances, nothing grows without end.",
        required_resource_keys={resource_key},
    )(check)


@dataclass(frozen=True)
class Look:
    """What one look at a pipeline's storage has found.

    Attributes:
        state: The pipeline's state; None if it has never run, or if its `state.json` was lost.
        problems: The reasons why the pipeline is not healthy.
        memory: The memory for the next look.
    """

    state: PipelineState | None
    problems: Sequence[HealthProblem]
    memory: HealthMemory

    @property
    def running(self) -> bool:
        """Whether a run owns the pipeline."""
        return self.state is not None and self.state.lease is not None


def look_at(control: PipelineControl, memory: HealthMemory, thresholds: HealthThresholds, now: datetime) -> Look:
    """Look at a pipeline's storage once.

    Args:
        control: The pipeline's control.
        memory: That of the look before.
        thresholds: From when the pipeline counts as unhealthy.
        now: The present time.
    """
    state = control.state()
    if (state is None or state.lease is None) and (lost := control.describe_unlisted(state)):
        return Look(state, [HealthProblem("lost", "error", lost)], HealthMemory())
    if state is None:
        return Look(None, [], HealthMemory())
    return Look(state, *health_of(state, newest_status(control), memory, thresholds, now))


def evaluation(look: Look) -> dict[str, Any]:
    """The arguments of an asset check's result for what a look has found."""
    problems = look.problems
    if not problems:
        ended = f"The pipeline does not run. {describe_end(look.state)}" if look.state is not None else NEVER_RUN
        return {"passed": True, "description": "The pipeline runs, and is healthy." if look.running else ended}
    records = [dg.TableRecord({"severity": p.severity, "rule": p.name, "found": p.text}) for p in problems]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    worst = dg.AssetCheckSeverity.ERROR if problems[0].severity == "error" else dg.AssetCheckSeverity.WARN
    return {
        "passed": False,
        "severity": worst,
        "description": f"{problems[0].text}{more}",
        "metadata": {"problems": dg.MetadataValue.table(records=records)},
    }
