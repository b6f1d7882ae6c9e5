"""A stage's query in a savepoint, given back to Spark: a checkpoint directory from which a plain query goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.files.urls import local_path, url_scheme
from dagster_checkpoints.pipeline.names import suggestion
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.spark.snapshots.query_snapshots import relocate
from dagster_checkpoints.spark.stored_state.plain_checkpoints import begin_file_sink
from dagster_checkpoints.state.errors import UnknownStage
from dagster_checkpoints.state.metadata import ChainMetadata, CheckpointMetadata, TaskSnapshot
from dagster_checkpoints.state.plain_queries import ExportRefused, export_problems
from dagster_checkpoints.storage.locating import StoredCheckpoint, opened_at


@dataclass(frozen=True, slots=True)
class CheckpointExport:
    """What was given back to Spark.

    Attributes:
        directory: The checkpoint directory, for the option `checkpointLocation`.
        stages: The stages that the plain query has to consist of, in order: their functions, one after the other.
        batch_id: The micro-batch after which it goes on.
        watermark_ms: The watermark of the next micro-batch, milliseconds since 1970; 0 before the first.
        spark_version: The version of Spark that wrote the state.
        sources: For each streaming source, in Spark's order, its description and its offset.
        transactions: Number of the sink's transactions that the savepoint holds. The pipeline commits their rows, and the plain
            query does not write them: a stop commits them; after a savepoint of a pipeline that runs on, its next checkpoint.
    """

    directory: Path
    stages: tuple[str, ...]
    batch_id: int
    watermark_ms: int
    spark_version: str
    sources: tuple[tuple[str, Any], ...]
    transactions: int


def export_checkpoint(
    location: str,
    directory: str | os.PathLike[str],
    *,
    stage: str,
    output: str | os.PathLike[str] | None = None,
    open_at: Callable[[str], ObjectStore] = open_store,
) -> CheckpointExport:
    """Write a checkpoint directory from which a plain Structured Streaming query goes on where a stage has stopped.

    The plain query has the plan of the stages that share the stage's query: the same sources in the same order, and the same
    stateful operators, which Spark checks when it starts. Its rows follow those that the pipeline has committed up to the
    savepoint. Stop the pipeline with the savepoint, or both go on.

    Args:
        location: URL or path of the savepoint.
        directory: A directory of this machine that is empty or does not exist. State of `transformWithState` names the place: the
            query has to find the directory there.
        stage: Name of the stage; of one that was renamed, its uid.
        output: A new directory of this machine for the rows of the plain query, if Spark's file sink writes them: that demands
            a record of all batches from the first one on, and gets one that says that they are not in this directory.
        open_at: Opens the store at a URL; default: with boto3's own configuration.

    Raises:
        ExportRefused: It is a checkpoint; or the stage's query cannot go on by itself; names all reasons that were found.
            Nothing was written. Or the directory cannot be written.
        UnknownStage: The savepoint has no such stage.
        StorageError: The files cannot be read.
    """
    target = _new(directory)
    rows = None if output is None else _new(output)
    with opened_at(location, open_at) as stored:
        metadata = stored.read()
        chain = _chain_of(stage, metadata, stored)
        task = next(iter(chain.tasks.values()), TaskSnapshot())
        problems = export_problems(metadata, chain)
        if problems or task.query is None:
            raise _refused(stage, stored, problems)
        # An existing directory stays: a volume that is mounted there cannot be replaced.
        unfinished = target / ".unfinished" if target.exists() else target.with_name(f".{target.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            stored.fetch(task.query.files, unfinished)
            log, batch_id = QueryLog(unfinished), task.query.batch_id
            planned = log.planned(batch_id)
            names = task.query.sources or ("",) * len(planned.sources)
            if problems := _offset_problems(task, names, planned.sources):
                raise _refused(stage, stored, problems)
            log.become_another_query()
            relocate(unfinished, target)
            if unfinished.parent == target:
                for entry in sorted(unfinished.iterdir()):
                    entry.rename(target / entry.name)
            else:
                unfinished.rename(target)
            if rows is not None:
                begin_file_sink(rows, batch_id)
        except OSError as error:
            raise ExportRefused(f"expected a directory that can be written at {target}, found: {error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return CheckpointExport(
            directory=target,
            stages=chain.stages,
            batch_id=batch_id,
            watermark_ms=max(planned.watermark_ms, QueryLog(target).next_watermark(batch_id)),
            spark_version=metadata.spark_version,
            sources=tuple(zip(names, planned.sources, strict=True)),
            transactions=sum(len(each.transactions) for each in task.stages.values()),
        )


def _new(directory: str | os.PathLike[str]) -> Path:
    text = os.fspath(directory)
    if url_scheme(text) is not None and local_path(text) is None:  # as a path it would be a directory below this one
        raise ExportRefused(
            f"expected a directory of this machine, found the URL {text!r}. Name a path, where the file system is mounted"
        )
    path = (local_path(text) or Path(text).expanduser()).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ExportRefused(f"expected an empty directory, or none, at {path}, found something there. Name another one")
    return path


def _chain_of(stage: str, metadata: CheckpointMetadata, stored: StoredCheckpoint) -> ChainMetadata:
    for chain in metadata.chains:
        if stage in chain.stages:
            return chain
    known = suggestion(stage, (each.name for each in metadata.stages))
    raise UnknownStage(f"expected a stage {stage!r} in {stored.url}, found none of that name. {known}")


def _refused(stage: str, stored: StoredCheckpoint, problems: list[str]) -> ExportRefused:
    reasons = "".join(f"\n- {each}" for each in problems)
    return ExportRefused(f"The query of stage {stage!r} in {stored.url} cannot go on as a plain query:{reasons}")


def _offset_problems(task: TaskSnapshot, names: tuple[str, ...], offsets: tuple[Any, ...]) -> list[str]:
    """A source that had ended before the last restore has lost its position: a plain query would read it from its beginning."""
    positions = {each.position: each.source for each in task.fused if each.ended}
    return [
        f"expected an offset of each source, found that {positions[number]!r} ({names[number]}) had ended before the job was "
        "restored: its position is not kept, and a plain query would read it again. Let the plain query begin as a new one"
        for number, offset in enumerate(offsets)
        if number in positions and not offset
    ]
