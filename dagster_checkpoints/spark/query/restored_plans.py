"""Compares the plan of a task's query with what a checkpoint says of the state and the offsets that it is restored with.

The rules are `state.plans`'s. It must not know channels or tasks' threads.
"""

from __future__ import annotations

import logging

from dagster_checkpoints.pipeline import Chain, Pipeline
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription
from dagster_checkpoints.state import CheckpointMetadata, StatefulPlanChanged, TaskSnapshot, check_sources, check_stateful_plans


def check_restored_plan(
    pipeline: Pipeline,
    metadata: CheckpointMetadata,
    chain: Chain,
    index: int,
    described: PlanDescription,
    *,
    allow_changed_plan: bool,
    log: logging.Logger,
) -> None:
    """The state and the offsets of a task that is restored must be those of its plan.

    Args:
        metadata: Of the checkpoint.
        index: Of the chain's instance.
        described: Of the plan as it is now.
        allow_changed_plan: Go on although the stateful operators or the sources are others; it is logged.

    Raises:
        StatefulPlanChanged, SourcesChanged: They are others.
    """
    snapshot = next((c.tasks.get(index) for c in metadata.chains if c.name == chain.name), None)
    if snapshot is None or snapshot.query is None:
        return
    instance = chain.instances[index]
    where = f"checkpoint {metadata.checkpoint_id} of pipeline {metadata.pipeline!r}"
    locations = {name: pipeline.stage(name).location for name in chain.stages}
    if snapshot.query.sources is None:
        log.info("%s[%s]: %s does not say which plan its state belongs to; it is not compared.", chain.name, instance, where)
    try:
        check_stateful_plans(snapshot, described.operators, instance, locations, where)
    except StatefulPlanChanged as changed:
        if not allow_changed_plan:
            raise
        log.warning("Because of allow_changed_plan: true, this is not refused: %s", changed)
    check_sources(snapshot, described.sources, chain.stages[0], instance, where, allow_changed_plan=allow_changed_plan)


def recorded_sources(snapshot: TaskSnapshot | None) -> tuple[str, ...] | None:
    """The streaming sources of the query that a task is restored with; None if there is none, or they are not known."""
    return snapshot.query.sources if snapshot is not None and snapshot.query is not None else None
