"""Compares the plan of a task's query with the plan that a checkpoint records for the restored state and offsets.

The rules are in `state.plans`. Must not know channels or tasks' threads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from dagster_checkpoints.pipeline import Chain, Pipeline
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription, ended_source, has_ended_source, input_sources
from dagster_checkpoints.state.errors import SourcesChanged, StatefulPlanChanged
from dagster_checkpoints.state.metadata import CheckpointMetadata, TaskSnapshot
from dagster_checkpoints.state.plans import check_divided_plans, check_sources, check_stateful_plans
from dagster_checkpoints.state.processor_states import with_encoding
from dagster_checkpoints.state.stages_between import replaced_inputs


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
    compared = _compared(described, whole)
    if compared.planned is None:
        log.warning("%s[%s]: Spark's plan cannot be described: only what its stages declare is compared.", chain.name, instance)
    traced = not has_ended_source(compared.sources)
    try:
        check_stateful_plans(snapshot, compared.operators, instance, locations, where, compared.planned, traced=traced)
    except StatefulPlanChanged as changed:
        if not allow_changed_plan:
            raise
        log.warning("Because of allow_changed_plan: true, the run continues in spite of: %s", changed)
    if whole is not None:
        check_divided_plans(snapshot, described.operators, instance, locations, where, described.planned)
    before = {now: text for text, now in _replaced_sources(pipeline, metadata, chain.stages[0])}
    sources = [before.get(text, text) for text in described.sources]
    try:
        check_sources(snapshot, sources, chain.stages[0], instance, where)
    except SourcesChanged as changed:
        if not allow_changed_plan or len(sources) != len(snapshot.query.sources or ()):
            raise
        log.warning("Because of allow_changed_plan: true, the run continues in spite of: %s", changed)


def _compared(described: PlanDescription, whole: PlanDescription | None) -> PlanDescription:
    """The description of a chain's stages as in the checkpoint: their columns are traced through the query."""
    if whole is None:
        return described
    planned = whole.planned
    return PlanDescription(
        {name: whole.operators[name] for name in described.operators},
        whole.sources,
        {name: planned[name] for name in described.operators} if planned is not None else None,
    )


def forgotten_sources(pipeline: Pipeline, metadata: CheckpointMetadata, stage: str, snapshot: TaskSnapshot) -> list[int]:
    """The positions of the streams of a task's query that are not read any more, or were replaced by others.

    Args:
        metadata: The checkpoint's metadata.
        stage: The first stage of the task's chain.
        snapshot: The task's snapshot.
    """
    ended = [source.position for source in snapshot.fused if source.ended]
    replaced = {before for before, _ in _replaced_sources(pipeline, metadata, stage)}
    return [*ended, *(number for number, text in enumerate(recorded_sources(snapshot) or ()) if text in replaced)]


def _replaced_sources(pipeline: Pipeline, metadata: CheckpointMetadata, stage: str) -> Iterator[tuple[str, str]]:
    """The streams of the inputs in front of which stages have come or gone: their descriptions in the checkpoint, and now."""
    uids = {each.name: each.uid for each in pipeline.stages}
    for recorded in metadata.stages:
        if recorded.name == stage:
            for each in replaced_inputs(recorded).values():
                yield from zip(input_sources(uids.get(each.before, each.before)), input_sources(uids[each.stage]), strict=True)


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


def with_recorded_encodings(described: PlanDescription, snapshot: TaskSnapshot | None) -> PlanDescription:
    """The description with the encodings of state in which the restored query has begun, whatever the session says now.

    Args:
        described: The description of the plan in this session.
        snapshot: The task's restored snapshot; None without one.
    """
    if snapshot is None or snapshot.query is None or snapshot.query.batch_id < 0:
        return described
    operators = dict(described.operators)
    for stage, now in operators.items():
        before = snapshot.stages[stage].state_plan if stage in snapshot.stages else None
        if before is not None and len(before) == len(now):
            operators[stage] = tuple(map(with_encoding, before, now))
    return replace(described, operators=operators)


def recorded_sources(snapshot: TaskSnapshot | None) -> tuple[str, ...] | None:
    """The streaming sources of the query in a task's restored snapshot; None if there is no query, or they are not recorded."""
    return snapshot.query.sources if snapshot is not None and snapshot.query is not None else None
