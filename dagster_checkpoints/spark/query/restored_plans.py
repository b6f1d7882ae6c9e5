"""Compares the plan of a task's query with the plan that a checkpoint records for the restored state and offsets.

The rules are in `state.plans`. Must not know channels or tasks' threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from dagster_checkpoints.pipeline import Chain, Pipeline
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription, ended_source
from dagster_checkpoints.state import (
    CheckpointMetadata,
    StatefulPlanChanged,
    TaskSnapshot,
    check_divided_plans,
    check_sources,
    check_stateful_plans,
)


def check_restored_plan(
    pipeline: Pipeline,
    metadata: CheckpointMetadata,
    chain: Chain,
    index: int,
    described: PlanDescription,
    whole: PlanDescription | None,
    *,
    allow_changed_plan: bool,
    log: logging.Logger,
) -> None:
    """Check that the restored state and offsets of a task fit its plan.

    Args:
        metadata: The checkpoint's metadata.
        index: The index of the chain's instance.
        described: The description of the current plan.
        whole: The description of the current plan of the recorded chain as one query, if the chain is a part of it.
        allow_changed_plan: Log a warning, instead of raising, if the stateful operators or the sources have changed.

    Raises:
        StatefulPlanChanged, SourcesChanged: The stateful operators or the sources have changed.
    """
    snapshot = next((c.tasks.get(index) for c in metadata.chains if c.name == chain.name), None)
    if snapshot is None or snapshot.query is None:
        return
    instance = chain.instances[index]
    where = f"checkpoint {metadata.checkpoint_id} of pipeline {metadata.pipeline!r}"
    locations = {name: pipeline.stage(name).location for name in chain.stages}
    if snapshot.query.sources is None:
        log.info("%s[%s]: %s does not record the plan of its state, so the plans are not compared.", chain.name, instance, where)
    try:
        check_stateful_plans(snapshot, _compared(described, whole), instance, locations, where)
    except StatefulPlanChanged as changed:
        if not allow_changed_plan:
            raise
        log.warning("Because of allow_changed_plan: true, the run continues in spite of: %s", changed)
    if whole is not None:
        check_divided_plans(snapshot, described.operators, instance, locations, where)
    check_sources(snapshot, described.sources, chain.stages[0], instance, where, allow_changed_plan=allow_changed_plan)


def _compared(described: PlanDescription, whole: PlanDescription | None) -> Mapping[str, tuple[str, ...]]:
    """The stateful operators of a chain's stages as the checkpoint describes them: their columns are traced through the query."""
    return described.operators if whole is None else {name: whole.operators[name] for name in described.operators}


def with_ended_sources(described: PlanDescription, snapshot: TaskSnapshot | None) -> PlanDescription:
    """The description with the recorded texts of fused sources that have ended, at their recorded positions.

    Args:
        described: The description of a plan in which other streams stand in for these sources.
        snapshot: The task's restored snapshot; None without one.
    """
    recorded = recorded_sources(snapshot)
    if snapshot is None or recorded is None:
        return described
    sources = list(described.sources)
    for source in snapshot.fused:
        if source.ended and source.position < len(sources) and sources[source.position] == ended_source(source.source):
            sources[source.position] = recorded[source.position]
    return replace(described, sources=tuple(sources))


def recorded_sources(snapshot: TaskSnapshot | None) -> tuple[str, ...] | None:
    """The streaming sources of the query in a task's restored snapshot; None if there is no query, or they are not recorded."""
    return snapshot.query.sources if snapshot is not None and snapshot.query is not None else None
