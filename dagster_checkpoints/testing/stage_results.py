"""Evaluates a pipeline's stages once over a batch, without the runtime, and looks at what plans read beside their inputs."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.pipeline import Pipeline, Stage, StageContext
from dagster_checkpoints.spark.query.plan_nodes import analyzed, items, nodes
from dagster_checkpoints.spark.query.quarantined_rows import divided
from dagster_checkpoints.spark.query.stage_calls import StageCall, open_stage, transform_stage
from dagster_checkpoints.spark.tasks.operator_state import OperatorStateStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TABLES = frozenset({"LogicalRelation", "DataSourceV2Relation", "DataSourceV2ScanRelation", "HiveTableRelation"})
_CLOCK = frozenset({"current_timestamp", "now", "localtimestamp", "current_date", "current_time"})
_CHANCE = frozenset({"rand", "randn", "random", "randstr", "uniform", "uuid", "shuffle"})
_SUBQUERIES = frozenset({"Exists", "LateralSubquery", "ListQuery", "ScalarSubquery"})

_READS_TABLE = (
    "reads a table beside its inputs ({table}): no checkpoint covers what it finds there, and a change of the table between two "
    "runs changes the result. Make it a bounded source, and a static input of this stage"
)
_ASKS_CLOCK = "asks the clock ({name}()): rows that are read again after a restore get another time. Use the event time"
_USES_CHANCE = (
    "uses chance ({name}()): rows that are read again after a restore get other values. Derive the value from the row, as with "
    "xxhash64"
)
_EVALUATES = (
    "evaluates a DataFrame when its plan is built ({jobs} Spark jobs): what it finds there stays until the job starts again. "
    "Make it a bounded source, and a static input of this stage, or read it in process_batch"
)
_CHANGES = (
    "has another plan each time it is built: it takes a value from the clock, from chance or from outside when the job starts, "
    "and another one after a restore. Use the event time, or values of the rows"
)


class NoBatchError(Exception):
    """A stage has an operator that gives other rows in a batch than in a stream, or none."""


def batch_results(pipeline: Pipeline, sources: Mapping[str, DataFrame], spark: SparkSession) -> dict[str, DataFrame]:
    """The result of each stage over all rows at once, as if it had one instance.

    Raises:
        StageError: A stage raised.
    """
    found = dict(sources)
    refused: dict[str, DataFrame] = {}
    for stage in pipeline.stages:
        if stage.name not in found:
            found[stage.name] = stage_result(stage, refused if stage.takes_refused_rows else found, spark)
        found[stage.name] = _passed(stage, found[stage.name], refused)
    return found


def _passed(stage: Stage, rows: DataFrame, refused: dict[str, DataFrame]) -> DataFrame:
    """The rows that a stage passes on; those that its quarantine refuses are put into `refused`."""
    if stage.quarantine is None:
        return rows
    passed, refused[stage.name] = divided(stage.quarantine, rows)
    return passed


def stage_result(stage: Stage, available: Mapping[str, DataFrame], spark: SparkSession) -> DataFrame:
    """The result of one stage over batches.

    Raises:
        StageError: The stage raised.
        NoBatchError: The stage keeps state in functions of its own: their timers are not due in a batch.
    """
    instance = stage.for_instance()
    context = StageContext(
        spark, stage.name, stage.instances[0], 0, 1, OperatorStateStore(), logging.getLogger("dagster_checkpoints")
    )
    call = StageCall(instance, context)
    open_stage(call)
    try:
        result = transform_stage(call, {name: available[name] for name in stage.inputs})
        if any("WithState" in str(node.nodeName()) for node in nodes(analyzed(result))):
            raise NoBatchError(f"stage {stage.name!r} keeps state in functions of its own, whose timers are not due in a batch")
        if stage.overrides_process_batch:
            processed = instance.process_batch(result, 0)
            result = result.limit(0) if processed is None else processed
        for name in stage.inputs:
            instance.end_input(name)
        held_back = instance.finish()
        return result if held_back is None else result.unionByName(held_back)
    finally:
        instance.close()


def findings(pipeline: Pipeline, sources: Mapping[str, DataFrame], spark: SparkSession) -> list[str]:
    """What a look at the plans shows of stages whose result depends on more than the rows of their inputs."""
    available = dict(sources)
    refused: dict[str, DataFrame] = {}
    texts = []
    for stage in pipeline.stages:
        given, inputs = stage.name in sources, refused if stage.takes_refused_rows else available
        with _counting_jobs(spark) as jobs:
            frame = available[stage.name] if given else stage_result(stage, inputs, spark)
            available[stage.name] = _passed(stage, frame, refused)
        read = [frame] if given else [inputs[name] for name in stage.inputs]
        known = set().union(*(_outside(analyzed(each)) for each in read))
        found = sorted(_outside(analyzed(available[stage.name])) - known)
        if not given and not stage.overrides_process_batch and not stage.overrides_finish:
            # Others may do what they like with a micro-batch.
            if jobs:
                found.append(_EVALUATES.format(jobs=len(jobs)))
            elif not found and _text(frame) != _text(stage_result(stage, inputs, spark)):
                found.append(_CHANGES)
        texts += [f"Stage {stage.name!r} ({stage.location}) {what}" for what in found]
    return texts


@contextlib.contextmanager
def local_time(spark: SparkSession, zone: str | None, *, here: bool = True) -> Iterator[None]:
    """Within the block the time zone of Spark's session and of Python's workers is another one.

    Args:
        spark: The session.
        zone: The time zone; None changes nothing.
        here: Whether this process has it, too. What it collects then has timestamps in that zone.
    """
    if zone is None:
        yield
        return
    session_zone = str(spark.conf.get("spark.sql.session.timeZone"))
    environment: dict[str, Any] = spark.sparkContext.environment
    before = os.environ.get("TZ"), environment.get("TZ")
    try:
        spark.conf.set("spark.sql.session.timeZone", zone)
        _set(environment, zone)
        if here:
            _set(os.environ, zone)
            time.tzset()
        yield
    finally:
        spark.conf.set("spark.sql.session.timeZone", session_zone)
        _set(os.environ, before[0])
        _set(environment, before[1])
        time.tzset()


def _set(environment: Any, zone: str | None) -> None:
    environment.pop("TZ", None)
    if zone is not None:
        environment["TZ"] = zone


@contextlib.contextmanager
def _counting_jobs(spark: SparkSession) -> Iterator[list[int]]:
    """The Spark jobs that this thread starts within the block."""
    context = spark.sparkContext
    group = f"check-{time.monotonic_ns()}"
    before = context.getLocalProperty("spark.jobGroup.id")
    context.setLocalProperty("spark.jobGroup.id", group)
    jobs: list[int] = []
    try:
        yield jobs
    finally:
        context.setLocalProperty("spark.jobGroup.id", before)  # type: ignore[arg-type]
        jobs += context.statusTracker().getJobIdsForGroup(group)


def _outside(plan: Any) -> set[str]:
    """What a plan reads that is no row of a source."""
    found = set()
    for node in nodes(plan):
        if node.getClass().getSimpleName() in _TABLES:
            found.add(_READS_TABLE.format(table=re.sub(r"#\d+L?", "", str(node.simpleString(3)))))
        for expression in (each for root in items(node.expressions()) for each in nodes(root)):
            name = str(expression.prettyName()).lower()
            if name in _CLOCK:
                found.add(_ASKS_CLOCK.format(name=name))
            if name in _CHANCE:
                found.add(_USES_CHANCE.format(name=name))
            if expression.getClass().getSimpleName() in _SUBQUERIES:
                found |= _outside(expression.plan())
    return found


def _text(frame: DataFrame) -> str:
    return str(analyzed(frame).canonicalized().toString())
