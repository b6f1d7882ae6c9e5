"""A plain query, one that Spark alone runs, taken over by a stage: its offsets and state become a savepoint."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.files.urls import validate_directory
from dagster_checkpoints.pipeline import Chain, Pipeline, TaskId, build_chains, fused_in
from dagster_checkpoints.spark.errors import SnapshotError
from dagster_checkpoints.spark.files.hadoop_path import HadoopFileSystem
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.spark.job.pipeline_checks import check_plans, plan_as_one_query
from dagster_checkpoints.spark.query.error_text import text_of_error
from dagster_checkpoints.spark.query.fused_plans import RefusedAtStage
from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription, with_encoding_of
from dagster_checkpoints.spark.query.plan_nodes import V2_STREAM, analyzed, streams
from dagster_checkpoints.spark.query.planned_state import ResumedBatch, numbered_operators, query_execution
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.spark.query.source_checks import source_of
from dagster_checkpoints.spark.query.stage_inputs import without_event_time
from dagster_checkpoints.spark.session.spark_version import installed_version
from dagster_checkpoints.spark.snapshots.pinned_queries import pin_query
from dagster_checkpoints.spark.snapshots.query_files import is_state_of_version
from dagster_checkpoints.spark.snapshots.query_snapshots import relocate
from dagster_checkpoints.spark.snapshots.restored_state import Restored
from dagster_checkpoints.spark.stored_state.plain_checkpoints import names_of, output_says, plain_path, read_plain_query
from dagster_checkpoints.state.metadata import (
    CheckpointMetadata,
    FusedSourceSnapshot,
    QuerySnapshot,
    StageInstanceSnapshot,
    StateFile,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import encode
from dagster_checkpoints.state.plain_queries import (
    ImportRefused,
    PlainQuery,
    SourceKind,
    StageSource,
    batch_to_take,
    import_problems,
)
from dagster_checkpoints.state.recording import recorded_chains, recorded_stages
from dagster_checkpoints.state.restore import validate_restore
from dagster_checkpoints.state.spark_versions import check_spark_version
from dagster_checkpoints.state.stage_names import with_uids
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.state_files import StateSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHECKPOINT_ID = 1
_TABLES = frozenset({"delta", "iceberg"})
_KINDS: Mapping[str, SourceKind] = {"files": "files", "kafka": "kafka", "delta": "delta"}


@dataclass(frozen=True, slots=True)
class CheckpointImport:
    """What was taken of a plain query, or would be.

    Attributes:
        url: URL of the savepoint, for `restore_from`; "" if nothing was written.
        checkpoint: URL of the query's checkpoint directory.
        query_id: The id that Spark gave the query.
        batch_id: The micro-batch as of which it is taken.
        planned_again: The micro-batch that was planned and whose rows the output does not hold: they are read again. None if
            there is none.
        watermark_ms: The watermark of the next micro-batch, milliseconds since 1970; 0 before the first.
        stages: The stages that share the query from now on, in order.
        sources: For each streaming source, in Spark's order, its description and its offset.
        operators: By number, Spark's names of the stateful operators whose state is taken.
        files: Number of files.
        bytes: Their size, in bytes.
        changes: What a run makes of it, in words: whether the query is divided, and which stages begin without state.
    """

    url: str
    checkpoint: str
    query_id: str
    batch_id: int
    planned_again: int | None
    watermark_ms: int
    stages: tuple[str, ...]
    sources: tuple[tuple[str, Any], ...]
    operators: Mapping[int, str]
    files: int
    bytes: int
    changes: tuple[str, ...]


def import_checkpoint(
    spark: SparkSession,
    pipeline: Pipeline,
    checkpoint: str | os.PathLike[str],
    *,
    stage: str,
    target: str = "",
    output: str | os.PathLike[str] | None = None,
    last_batch: int | None = None,
    spark_version: str = "",
    name: str = "imported",
    dry_run: bool = False,
    open_at: Callable[[str], ObjectStore] = open_store,
) -> CheckpointImport:
    """Write a savepoint from which a stage goes on where a plain Structured Streaming query has stopped, with its state.

    The query does not run any more, stopped or killed; its checkpoint directory is not changed. The first run of the pipeline
    names the savepoint (`restore_from`). Its other stages begin without state, and get the rows that are emitted from then on.

    Checked is what the directory holds: the number, kinds, topics and directories of the sources, the stateful operators, the
    columns of their state by Spark's own rules, the provider, the number of partitions. What it does not hold cannot be compared:
    conditions in front of an operator, or which of two functions of one type an aggregation has. The stage's function is to be
    the query's.

    Args:
        spark: A session made by the pipeline's resource, or by `build_session`.
        pipeline: The pipeline; its stages' `open`, `transform` and `close` are called.
        checkpoint: Path or URL of the query's checkpoint directory (`checkpointLocation`).
        stage: Name of a stage that is to run in this query, with the sources that it reads.
        target: URL or path of the directory below which the savepoint is written; not needed for a dry run.
        output: Path or URL of what the query has written, if Spark's file sink or Delta Lake wrote it: it says which micro-batch
            is the last one. Needed if the query was killed.
        last_batch: For other sinks, the number of the last micro-batch whose rows are completely in the output, with none of a
            later one; what `foreachBatch` has recorded.
        spark_version: The version of Spark that has run the query, such as "4.2.1". Default: the installed one.
        name: A part of the savepoint's name.
        dry_run: Whether to check everything and write nothing.
        open_at: Opens the store at a URL; default: with boto3's own configuration.

    Raises:
        ImportRefused: The stage cannot go on exactly; names all reasons that were found.
        UnknownStageError: The pipeline has no such stage.
        StageError: The plan of a stage cannot be built.
        SparkVersionChanged: The installed Spark may not read the state.
        StorageError: The savepoint cannot be written.

    Source: "Recovery Semantics after Changes in a Streaming Query",
    https://spark.apache.org/docs/latest/streaming/apis-on-dataframes-and-datasets.html
    """
    if not dry_run and not target:
        raise ImportRefused("expected target=, the directory below which the savepoint is written, found none")
    store = None if dry_run else open_at(validate_directory(target))
    chain = _chain_of(pipeline, stage)
    root = plain_path(spark, checkpoint)
    query = read_plain_query(root)
    batch_id = batch_to_take(query, output_says(spark, query.query_id, output, last_batch))
    plan, described = _plan_of(pipeline, spark, chain, query)
    execution = query_execution(spark, analyzed(plan.frame), plan.output_mode)
    found_operators = numbered_operators(execution) if described.keeps_state else {}
    operators = {number: name for number, (name, _) in found_operators.items()}
    in_one = frozenset(number for number, (_, alone) in found_operators.items() if alone)
    sources = [_stage_source(plan, leaf) for leaf in streams(plan.frame)]
    problems = import_problems(query, batch_id, sources, operators, in_one)
    if problems:
        raise _refused(stage, query, problems)
    with tempfile.TemporaryDirectory(prefix="dagster-checkpoints-import-") as folder:
        files, watermark_ms = _pinned(root, query, batch_id, Path(folder, "query"), stage)
        if described.keeps_state:
            _check_state(spark, plan, query, batch_id, files, Path(folder, "check"), stage)
        described = with_encoding_of(described, query.batches[batch_id].settings)
        task = _task(pipeline, chain, plan, described, QuerySnapshot(batch_id, imported_from=query.place), watermark_ms)
        metadata = _metadata(pipeline, chain, plan, task, query, spark_version or installed_version())
        found = CheckpointImport(
            url="",
            checkpoint=query.place,
            query_id=query.query_id,
            batch_id=batch_id,
            planned_again=query.planned[-1] if query.planned[-1] > batch_id else None,
            watermark_ms=watermark_ms,
            stages=chain.stages,
            sources=tuple(zip(described.sources, query.batches[batch_id].offsets, strict=True)),
            operators=operators,
            files=len(files),
            bytes=sum(source.identity().size for source in files.values()),
            changes=_check_restore(pipeline, spark, _with_files(metadata, [StateFile(path, "", 0) for path in files])),
        )
        if store is None:
            return found
        with CheckpointStorage(store, pipeline.name, open_elsewhere=open_at) as storage:
            directory = storage.savepoint_directory(_CHECKPOINT_ID, name, target)
            stored = directory.upload_files(files)
            named = [StateFile(path, each.sha256, each.size) for path, each in stored.items()]
            sizes = {file.sha256: file.size for file in named}
            directory.write_metadata(encode(with_uids(_with_files(metadata, named), pipeline)), sizes)
            if broken := directory.verify(sizes):
                raise ImportRefused(f"expected the new savepoint {directory.url} to be complete, found {broken[0]}")
            return replace(found, url=directory.url)


def _refused(stage: str, query: PlainQuery, problems: list[str]) -> ImportRefused:
    reasons = "".join(f"\n- {each}" for each in problems)
    return ImportRefused(f"Stage {stage!r} cannot go on exactly where the query of {query.place} has stopped:{reasons}")


def _chain_of(pipeline: Pipeline, name: str) -> Chain:
    """The stages that a plain query of a stage consists of: those in its chain, or those in front of it, sources first.

    Where they do not run as one query, a restore divides the query with its state.
    """
    chain = next(chain for chain in build_chains(pipeline) if pipeline.stage(name).name in chain.stages)
    stages = chain.stages if pipeline.stage(chain.name).kind.is_source else _in_front(pipeline, name)
    problems = []
    for each in map(pipeline.stage, stages):
        if len(each.instances) > 1:
            problems.append(f"{each.name!r} has {len(each.instances)} instances; expected one")
        if each.split_interval is not None:
            problems.append(f"{each.name!r} is a split source; expected a stream")
        problems += [
            f"{each.name!r} reads {upstream!r} as a static input; expected a stream, or a table that the stage reads by itself"
            for upstream, how in each.inputs.items()
            if how.mode == "static"
        ]
    if problems:
        raise ImportRefused(
            f"Stage {name!r} and those in front of it cannot be the query of a checkpoint directory: {'; '.join(problems)}"
        )
    return Chain(stages[0], tuple(stages), pipeline.stage(stages[0]).instances)


def _in_front(pipeline: Pipeline, name: str) -> list[str]:
    """A stage and all stages whose rows reach it, sources first."""
    found = {name}
    for stage in reversed(pipeline.stages):
        if stage.name in found:
            found.update(stage.inputs)
    ordered = [stage for stage in pipeline.stages if stage.name in found]
    return [stage.name for stage in sorted(ordered, key=lambda stage: not stage.kind.is_source)]


def _plan_of(pipeline: Pipeline, spark: SparkSession, chain: Chain, query: PlainQuery) -> tuple[QueryPlan, PlanDescription]:
    last = chain.stages[-1]
    try:
        plan, described = plan_as_one_query(pipeline, spark, chain)
    except RefusedAtStage as refused:
        raise _refused(last, query, [f"expected one query with its sources, found that {refused.reason}"]) from refused
    if not plan.streaming:
        raise _refused(last, query, [f"expected {chain.name!r} to return a stream (readStream), found a batch DataFrame"])
    return plan, described


def _check_restore(pipeline: Pipeline, spark: SparkSession, metadata: CheckpointMetadata) -> tuple[str, ...]:
    """Check what a run checks when it starts from the savepoint. Returns what becomes of the query, in words."""
    check_spark_version(metadata, installed_version())
    plan = validate_restore(pipeline, with_uids(metadata, pipeline))
    report = check_plans(pipeline, spark, Restored(plan, "the imported query"))
    for error in (*report.changed, *report.failed.values()):
        raise error
    return plan.changes


def _stage_source(plan: QueryPlan, leaf: Any) -> StageSource:
    source = source_of(plan.frame, leaf)
    kind = _KINDS.get(source.kind, "other")
    # Spark's connectors of Delta Lake and Iceberg have the names of this project's sources, and offsets of their own.
    if source.kind in _TABLES and leaf.nodeName() == V2_STREAM and not leaf.source().isDefined():
        kind = "table"
    options = dict(source.options)
    if kind == "files" and "path" in options:  # with the host of the file system, as the query's log names files
        options["path"] = str(HadoopFileSystem(plan.frame.sparkSession, options["path"]).qualified(options["path"]))
    return StageSource(source.title, kind, names_of(kind, options))


def _pinned(root: WorkPath, query: PlainQuery, batch_id: int, folder: Path, stage: str) -> tuple[Mapping[str, StateSource], int]:
    """The files of a batch: links to the query's own, which are only read, or references to them; and the next watermark."""
    committed = batch_id in query.committed
    try:
        pinned = pin_query(root, batch_id, folder, committed=committed)
        if not committed:
            QueryLog(folder).commit(batch_id)
        now = QueryLog(root)
        if (now.all_planned(), now.all_committed()) != (query.planned, query.committed):
            raise _refused(stage, query, ["expected a query that does not run, found that it has gone on meanwhile: stop it"])
        return pinned.files(), max(query.batches[batch_id].watermark_ms, QueryLog(folder).next_watermark(batch_id))
    except (SnapshotError, FileNotFoundError) as error:
        text = str(error).partition(" The checkpoint is declined")[0]
        raise _refused(
            stage,
            query,
            [
                f"expected all files of micro-batch {batch_id} in the directory, found that one is missing: {text}. Spark "
                "deletes files of batches before the last spark.sql.streaming.minBatchesToRetain ones; otherwise the directory "
                "was not copied completely"
            ],
        ) from error


def _check_state(
    spark: SparkSession,
    plan: QueryPlan,
    query: PlainQuery,
    batch_id: int,
    files: Mapping[str, StateSource],
    folder: Path,
    stage: str,
) -> None:
    """Let Spark compare the plan with the descriptions of the state, in a copy: it writes to the directory."""
    from pyspark.errors import PySparkException

    for path, source in files.items():
        if not is_state_of_version(path):
            with source.local() as file:
                copy = folder / path
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    relocate(folder, folder)
    QueryLog(folder).plan_batch(batch_id + 1, query.batches[batch_id].watermark_ms)  # as Spark has when it compares
    first = ResumedBatch(folder, batch_id + 1, query.batches[batch_id].settings)
    try:
        query_execution(spark, analyzed(plan.frame), plan.output_mode, first).executedPlan()
    except Exception as error:
        raised = getattr(error, "java_exception", None)
        if raised is None and not isinstance(error, PySparkException):
            raise
        text = text_of_error(error) if raised is None else str(raised)
        raise _refused(stage, query, [f"Spark does not read its state with the plan of the stage: {text}"]) from error


def _task(
    pipeline: Pipeline, chain: Chain, plan: QueryPlan, described: PlanDescription, query: QuerySnapshot, watermark_ms: int
) -> TaskSnapshot:
    """The snapshot of the query's task, without files: as one of its own checkpoints would describe it."""
    planned = described.planned
    fused = fused_in(pipeline, chain.stages)
    return TaskSnapshot(
        stages={
            name: StageInstanceSnapshot(
                rows_out=0, state_plan=described.operators[name], planned=planned[name] if planned is not None else None
            )
            for name in chain.stages
        },
        query=msgspec.structs.replace(query, own_watermark=plan.own_watermark, sources=described.sources),
        fused=tuple(FusedSourceSnapshot(name, plan.fused[name].position) for name in fused),
        valve_watermark=watermark_ms if fused and watermark_ms else None,
    )


def _metadata(
    pipeline: Pipeline, chain: Chain, plan: QueryPlan, task: TaskSnapshot, query: PlainQuery, spark_version: str
) -> CheckpointMetadata:
    """The metadata of the savepoint: a checkpoint of a pipeline with the stages of this query alone."""
    now = time.time()
    stages = (each for each in recorded_stages(pipeline, build_chains(pipeline), ()) if each.name in chain.stages)
    known = {name: without_event_time(plan.outputs[name].schema) for name in fused_in(pipeline, chain.stages)}
    schemas = {name: json.dumps(schema.jsonValue()) for name, schema in {**known, chain.stages[-1]: plan.schema}.items()}
    return CheckpointMetadata(
        pipeline=pipeline.name,
        checkpoint_id=_CHECKPOINT_ID,
        stages=tuple(msgspec.structs.replace(each, output_schema=schemas.get(each.name, ""), rows=0) for each in stages),
        chains=recorded_chains((chain,), {TaskId(chain.name, 0): task}),
        kind="savepoint",
        job_id="0",
        run_id=f"imported from query {query.query_id}",
        triggered_at=now,
        completed_at=now,
        spark_version=spark_version,
    )


def _with_files(metadata: CheckpointMetadata, files: Sequence[StateFile]) -> CheckpointMetadata:
    (chain,) = metadata.chains
    task = chain.tasks[0]
    assert task.query is not None
    query = msgspec.structs.replace(task.query, files=tuple(files))
    changed = msgspec.structs.replace(chain, tasks={0: msgspec.structs.replace(task, query=query)})
    return msgspec.structs.replace(metadata, chains=(changed,))
