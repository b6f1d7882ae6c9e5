"""A plain query, one that Spark alone runs, taken over by a stage or given back: as values, and which of it may be taken.

A plain query's checkpoint directory says which micro-batches were planned and which were committed. A query that was killed may
have planned one that it has not committed. Whether the rows of that batch are in its output only the output knows, and what is
taken has to fit it: rows that are there are not written again, and no others are left out.

Must not know: files, Spark, storage. `spark.stored_state.plain_checkpoints` reads the values.

Source: Spark's `MicroBatchExecution.populateStartOffsets`, `FileStreamSink.addBatch`, `OffsetSeqLog`, `CommitLog`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dagster_checkpoints.state.errors import StateError
from dagster_checkpoints.state.metadata import ChainMetadata, CheckpointMetadata

SourceKind = Literal["files", "kafka", "delta", "table", "other"]
"""Kinds of sources by the form of their offsets; "table" is `read_delta_table` or `read_iceberg_table`."""

PROVIDERS = ("RocksDBStateStoreProvider", "HDFSBackedStateStoreProvider")
_LOG_VERSION = "v1"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_WATERMARK_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"
_NAMED: Mapping[SourceKind, str] = {
    "files": "a source of files",
    "kafka": "a Kafka source",
    "delta": "a Delta table, read by Spark's connector of Delta Lake",
    "table": "a table, read by read_delta_table or read_iceberg_table",
    "other": "a source of another kind",
}


class ImportRefused(StateError):
    """A plain query's checkpoint directory cannot be taken over exactly. Nothing was written."""


class ExportRefused(StateError):
    """A stage's query in a savepoint cannot go on as a plain query exactly. Nothing was written."""


class PlainBatch(msgspec.Struct, frozen=True):
    """A planned micro-batch: an entry of the offset log.

    Attributes:
        watermark_ms: the watermark under which it ran, milliseconds since 1970; 0 before the first.
        settings: the settings of Spark that the query keeps.
        offsets: up to where it reads each source, by the number of the source; None for one without an offset yet.
    """

    watermark_ms: int
    settings: Mapping[str, str]
    offsets: tuple[Any, ...]


class PlainQuery(msgspec.Struct, frozen=True):
    """The checkpoint directory of a plain query.

    Attributes:
        place: its URL or path, as errors name it.
        query_id: the id that Spark gave the query.
        log_versions: versions of the newest entries of the offset log and the commit log, as written; none without entries.
        planned: the numbers of the micro-batches in the offset log, sorted.
        committed: those in the commit log, sorted.
        batches: the newest planned ones.
        operators: by number, Spark's names of its stateful operators; "" for one without a description.
        partitions: by number of an operator, its state partitions: the number that is described, and the numbers of
            those that have state.
        unnumbered: a file of state whose name is not that of a numbered version; "" if there is none.
        read: by number of a source, the path of a file that it has read; "" if no log of files is there, as of other sources.
    """

    place: str
    query_id: str
    log_versions: tuple[str, ...]
    planned: tuple[int, ...]
    committed: tuple[int, ...]
    batches: Mapping[int, PlainBatch]
    operators: Mapping[int, str] = {}
    partitions: Mapping[int, tuple[int, frozenset[int]]] = {}
    unnumbered: str = ""
    read: tuple[str, ...] = ()


class OutputSays(msgspec.Struct, frozen=True):
    """What is known of a plain query's output.

    Attributes:
        last: the number of the last micro-batch whose rows are in it; -1 if it has none; None if nothing is known.
        by: how that is known, in words.
    """

    last: int | None = None
    by: str = ""


class StageSource(msgspec.Struct, frozen=True):
    """A streaming source of the stage that is to go on with a plain query.

    Attributes:
        title: how errors name it.
        kind: what form its offsets have.
        names: the topics, or the directory; empty if they are not known from its options.
    """

    title: str
    kind: SourceKind
    names: tuple[str, ...] = ()


def kind_of_offset(offset: Any) -> SourceKind:
    """The kind of source that an offset is of, by its form."""
    if not isinstance(offset, Mapping):
        return "other"
    if offset.keys() == {"logOffset"}:
        return "files"
    if "reservoirId" in offset:
        return "delta"
    if {"table", "first", "version", "read"} == offset.keys():
        return "table"
    if offset and all(isinstance(each, Mapping) and all(part.isdecimal() for part in each) for each in offset.values()):
        return "kafka"
    return "other"


def batch_to_take(query: PlainQuery, output: OutputSays) -> int:
    """The micro-batch as of which offsets and state are taken.

    ::

        planned  committed  in the output     taken
           n         n      n, or not known     n
          n+1        n      n                   n      n+1 is planned again
          n+1        n      n+1                n+1     its state is complete: an output holds a batch only after all of it ran

    Args:
        query: the checkpoint directory.
        output: what is known of the output.

    Raises:
        ImportRefused: the logs are those of no query, or of one that committed nothing; or the output says something else; or
            the last batch was not committed, and nothing is known of the output.
    """
    where = query.place
    if not query.planned:
        raise ImportRefused(
            f"expected the checkpoint directory of a Structured Streaming query at {where}, with entries in offsets/, found "
            "none. Name the directory that the query has as checkpointLocation"
        )
    if set(query.log_versions) != {_LOG_VERSION}:
        raise ImportRefused(
            f"expected logs of version v1 in {where}, found {' and '.join(query.log_versions)}: a query whose sources have names "
            "of Spark's own, or with spark.sql.streaming.offsetLog.formatVersion=2 or stateStore.checkpointFormatVersion=2. A "
            "query keeps these for ever. Begin the pipeline as a new start"
        )
    planned, committed = query.planned[-1], max(query.committed, default=-1)
    if not committed <= planned <= committed + 1:
        raise ImportRefused(
            f"expected the last planned micro-batch in {where} to be the last committed one or the one after it, found planned "
            f"{planned}, committed {committed}. A query with asynchronous progress tracking leaves such logs, and so does a "
            "directory that was copied while the query ran. Stop the query, start it without asyncProgressTrackingEnabled, stop "
            "it again, and copy the directory after that"
        )
    last = output.last
    if planned == committed:
        taken = planned
        if last is not None and last != planned:
            side = "is not the output of this checkpoint directory, or rows were removed" if last < planned else _OLD_COPY
            raise ImportRefused(
                f"expected micro-batch {planned} as the last one in the output, which {where} has committed, found {last} "
                f"({output.by}): the output {side}. Name the right output, or the right directory"
            )
    elif last is None:
        raise ImportRefused(
            f"{where} has planned micro-batch {planned} and not committed it: the query was stopped or killed in the middle. Its "
            "rows may be in the output or not, which the checkpoint directory does not say. Name the output (output=, --output) "
            "if it is that of Spark's file sink or of Delta Lake; of another sink, name the last micro-batch whose rows are "
            f"completely in the output, with nothing of a later one: last_batch={committed} or last_batch={planned} "
            "(--last-batch). If you cannot know, as with Spark's Kafka sink, start the query once more and stop it between two "
            "batches: StreamingQuery.stop() after processAllAvailable()"
        )
    elif last in (committed, planned):
        taken = last
    else:
        raise ImportRefused(
            f"expected micro-batch {committed} or {planned} as the last one in the output: {where} has committed the first and "
            f"planned the second. Found {last} ({output.by}). Name the right output, or the right directory"
        )
    if taken < 0:
        raise ImportRefused(
            f"{where} has committed no micro-batch, and the output holds none: there is nothing to take over. Start the pipeline "
            "without a checkpoint (restore_from: none)"
        )
    return taken


_OLD_COPY = "is ahead of it, and the directory probably an older copy"


def import_problems(
    query: PlainQuery,
    batch: int,
    sources: Sequence[StageSource],
    operators: Mapping[int, str],
    in_one_partition: Collection[int] = (),
) -> list[str]:
    """Why a stage cannot go on from a micro-batch of a plain query, each in words; empty if it can as far as that is known.

    Args:
        query: the checkpoint directory.
        batch: the micro-batch.
        sources: the sources of the stage's query, in the order of Spark's numbers.
        operators: by number, Spark's names of the stateful operators that it plans for the stage's query.
        in_one_partition: those of them whose state is in one partition, whatever the number of partitions.
    """
    entry = query.batches[batch]
    return [
        *_log_problems(query, batch),
        *_state_problems(query, entry, operators),
        *_partition_problems(query, in_one_partition),
        *_source_problems(query, entry, sources),
    ]


def export_problems(metadata: CheckpointMetadata, chain: ChainMetadata) -> list[str]:
    """Why a recorded chain cannot go on as a plain query, each in words; empty if it can as far as the metadata says.

    Args:
        metadata: the metadata of the savepoint.
        chain: the chain.
    """
    if metadata.kind != "savepoint":
        return [
            f"expected a savepoint, found checkpoint {metadata.checkpoint_id}. Its rows may not be committed yet, and those of "
            "later checkpoints may be: with the plain query, rows would be missing, or there twice. Stop the pipeline with a "
            "savepoint (dagster-checkpoints stop), and give that back; if the pipeline has failed, start it again, and stop it"
        ]
    recorded = {stage.name: stage for stage in metadata.stages}
    head = recorded[chain.name]
    if len(head.instances) > 1:
        return [f"expected one instance, found {_listed(head.instances)}: each has a query and state of its own"]
    task = chain.tasks.get(0)
    if task is None or task.end_of_data == "drain":
        return ["expected rows that are still to come, found that it has reached the end of its data: no state is left"]
    if task.channels or head.inputs:
        inputs = [each.stage for each in head.inputs or ()]
        return [
            f"expected a query that begins with its sources, found that {chain.name!r} reads {_listed(inputs) or 'other stages'} "
            "through channels of the pipeline, which Spark alone does not have"
        ]
    if head.enumerator is not None:
        return [f"expected a streaming source, found that {chain.name!r} is read in splits, which Spark alone does not have"]
    found = []
    if task.query is None or task.query.batch_id < 0:
        found.append("expected a query that has committed a micro-batch, found none: start the plain query as a new one")
    for name, stage in task.stages.items():
        if names := [state.name for state in stage.operator_states if state.items]:
            found.append(
                f"expected state in Spark's operators alone, found that {name!r} keeps {_listed(names)} in context.state, which "
                "a plain query does not have"
            )
    return found


def _log_problems(query: PlainQuery, batch: int) -> list[str]:
    found = [f"offsets/{n}" for n in (batch - 1, batch) if n >= 0 and n not in query.planned]
    found += [f"commits/{n}" for n in (batch - 1,) if n >= 0 and n not in query.committed]
    if not found:
        return []
    return [
        f"expected {' and '.join(found)} in {query.place}, which Spark reads when it goes on from micro-batch {batch}, found "
        "nothing there. Spark keeps spark.sql.streaming.minBatchesToRetain batches: raise it to 2 at least, and run the query "
        "once more"
    ]


def _state_problems(query: PlainQuery, entry: PlainBatch, operators: Mapping[int, str]) -> list[str]:
    found = []
    if query.unnumbered:
        found.append(
            f"expected state in the form of checkpointFormatVersion 1, whose files are called after their versions, found "
            f"{query.unnumbered} in {query.place}. State of spark.sql.streaming.stateStore.checkpointFormatVersion=2 cannot be "
            "taken over; Spark has no way back to version 1"
        )
    provider = entry.settings.get(_PROVIDER, PROVIDERS[0])
    if query.operators and provider.rpartition(".")[2] not in PROVIDERS:
        found.append(
            f"expected state of one of Spark's own providers ({' or '.join(PROVIDERS)}), found {provider}, whose files are not "
            "known. Begin the pipeline as a new start"
        )
    if len(entry.offsets) > 1 and entry.settings.get(_WATERMARK_POLICY, "min") != "min":
        found.append(
            f"expected {_WATERMARK_POLICY}=min, found {entry.settings[_WATERMARK_POLICY]}: with it rows of the slower source are "
            "dropped as late, and Spark keeps the setting of a query for ever. Begin the pipeline as a new start"
        )
    unknown = [number for number, name in query.operators.items() if not name]
    if unknown:
        found.append(
            f"expected a description of each stateful operator (state/<number>/_metadata), found none of number "
            f"{', '.join(map(str, unknown))}: a Spark before 4.0 wrote the state. Run the query once more with Spark 4.1 or newer"
        )
    elif dict(query.operators) != dict(operators):
        found.append(
            f"expected the stateful operators that Spark plans for the stage ({_operators_text(operators)}), found in the state "
            f"of {query.place}: {_operators_text(query.operators)}. Spark numbers them from the output to the input. Write the "
            "stage so that its query has the same ones in the same order"
        )
    return found


def _partition_problems(query: PlainQuery, in_one_partition: Collection[int]) -> list[str]:
    found = []
    for number, (described, there) in query.partitions.items():
        expected = frozenset({0} if number in in_one_partition else range(described))
        if described and there != expected:
            found.append(
                f"expected the state partitions {sorted(expected)} of operator {number}, as it is described, found "
                f"state in {sorted(there)}. The directory was not copied completely; or the function of foreachBatch has not "
                "evaluated a batch, which Spark then commits without state"
            )
    return found


def _operators_text(operators: Mapping[int, str]) -> str:
    return ", ".join(f"[{number}] {name}" for number, name in sorted(operators.items())) or "none"


def _source_problems(query: PlainQuery, entry: PlainBatch, sources: Sequence[StageSource]) -> list[str]:
    if len(sources) != len(entry.offsets):
        return [
            f"expected {len(sources)} streaming source(s), which the query of the stage reads "
            f"({', '.join(each.title for each in sources)}), found offsets of {len(entry.offsets)} in {query.place}. Spark knows "
            "the sources of a query by their order only: let the stage read the same ones in the same order"
        ]
    found = []
    for number, (source, offset) in enumerate(zip(sources, entry.offsets, strict=True)):
        kind = kind_of_offset(offset)
        at = f"source [{number}], {source.title}"
        if source.kind == "other":
            found.append(
                f"{at}: expected files, Kafka, or a Delta or Iceberg table, whose rows can be read again and whose offsets are "
                "known. Begin the pipeline as a new start"
            )
        elif offset is None:  # Spark begins to read it
            continue
        elif kind != source.kind:
            found.append(
                f"{at}: expected the offset of {_NAMED[source.kind]}, found that of {_NAMED[kind]}: {_json(offset)}. Spark knows "
                "the sources of a query by their order only: let the stage read the same ones in the same order"
            )
        elif kind == "kafka" and source.names and set(source.names) != set(offset):
            found.append(
                f"{at}: expected offsets of the topics {_listed(source.names)}, found offsets of {_listed(offset)}. Subscribe to "
                "the same topics; others can be added after the first checkpoint, in a source of their own"
            )
        elif kind == "files" and not query.read[number]:
            found.append(
                f"{at}: expected the log of the files that were read in {query.place}/sources/{number}, found none: without it "
                "they are read again. The directory was not copied completely"
            )
        elif kind == "files" and not any(_is_below(query.read[number], name) for name in source.names):
            found.append(
                f"{at}: expected files below {_listed(source.names)}, found that the query has read {query.read[number]}. Read "
                "the same directory; files that were moved would be read again"
            )
    return found


def _is_below(file: str, directory: str) -> bool:
    """Whether a file is below a directory, or below what stands in front of the first special character of a pattern."""
    fixed = min((at for at in map(directory.find, "*?[{") if at >= 0), default=None)
    if fixed is not None:
        return file.startswith(directory[:fixed])
    return file == directory or file.startswith(f"{directory.rstrip('/')}/")


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _json(offset: Any) -> str:
    return msgspec.json.encode(offset).decode()
