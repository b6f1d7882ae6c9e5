"""The content of a checkpoint, as values; `metadata_file` encodes them.

A new version of the format adds its structs beside these. An addition within a version is a field that is not
written while it has its default: older releases refuse only metadata that they would misread. Must not know: storage, Spark,
the pipeline.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1

EndOfDataFlag = Literal["none", "drain", "suspend"]
ChannelEnd = Literal["none", "drain", "suspend", "partition"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A part of the metadata: immutable; a field that this release does not know is refused and not skipped, and a field with
    its default is not written.

    The garbage collector skips these values, which cannot form cycles: otherwise it would visit all of them several times
    while a large checkpoint is read, and reading took four times as long.
    """


class StateFile(_Struct, frozen=True):
    """A file of state, content-addressed.

    Attributes:
        path: its path after a restore, relative to the task's restored directory.
        sha256: sha256 of its bytes, hexadecimal.
        size: size in bytes.
        stored_by: fencing epoch of the owner that stored it in shared/, a part of its name; 0 if its name is the sha256 alone,
            as in a savepoint's directory, and as earlier releases stored it.
    """

    path: str
    sha256: str
    size: int
    stored_by: int = 0

    @property
    def name(self) -> str:
        """Its name in storage."""
        return f"{self.sha256}-{self.stored_by}" if self.stored_by else self.sha256


class Segment(_Struct, frozen=True, tag_field="type", tag="segment"):
    """Records of a channel, as one or more Parquet files."""

    files: tuple[StateFile, ...]
    rows: int


class Mark(_Struct, frozen=True):
    """An element of a channel that holds no records. Those of this module may be in-flight data."""


class WatermarkAt(Mark, frozen=True, tag_field="type", tag="watermark"):
    """No record before `ms` (milliseconds since 1970) follows on the channel, except late ones. MAX_WATERMARK_MS: no record."""

    ms: int


class WatermarkStatus(Mark, frozen=True, tag_field="type", tag="idle"):
    """The channel is idle, and is left out of the minimum until it is active again; or it is active again."""

    idle: bool


class EndOfData(Mark, frozen=True, tag_field="type", tag="end_of_data"):
    """No more records on the channel; barriers may still follow.

    Attributes:
        drain: False after a suspend: more records follow when the job is resumed from the savepoint.
    """

    drain: bool


class EndOfPartition(Mark, frozen=True, tag_field="type", tag="end_of_partition"):
    """No element follows on the channel."""


ChannelElement = Segment | WatermarkAt | WatermarkStatus | EndOfData | EndOfPartition


class ChannelSnapshot(_Struct, frozen=True):
    """One input channel of a task.

    Attributes:
        channel: name of the channel.
        position: number of elements of its log in front of the snapshot.
        watermark: its last watermark, milliseconds; None before the first.
        idle: whether it is idle, and left out of the minimum.
        ended: how it has ended.
        in_flight: elements in front of the barrier that were not processed before the snapshot, in order.
        behind: whether it is active again after idleness, and left out of the minimum until it has caught up. A release that does
            not know the field recorded such a channel as idle.
    """

    channel: str
    position: int
    watermark: int | None = None
    idle: bool = False
    ended: ChannelEnd = "none"
    in_flight: tuple[ChannelElement, ...] = ()
    behind: bool = False


class StaticTableSnapshot(_Struct, frozen=True):
    """A static input that is ready: its table is state of the consumer, because the upstream stage has none."""

    input: str
    segments: tuple[Segment, ...] = ()


class QuerySnapshot(_Struct, frozen=True):
    """The checkpoint directory of a Spark query as of batch `batch_id`.

    Attributes:
        batch_id: the last committed batch; -1 before the first.
        files: the pruned directory.
        own_watermark: whether the query takes its event time from its source (`withWatermark`) and not from channels.
        sources: descriptions of its streaming sources, in the order of their offsets. None in a checkpoint of a release that did
            not record them; empty for a part of a query that was divided, which has read none of its sources.
        imported_from: in a savepoint that was made from the checkpoint directory of a plain query: that directory. "" in others.
    """

    batch_id: int
    files: tuple[StateFile, ...] = ()
    own_watermark: bool = False
    sources: tuple[str, ...] | None = None
    imported_from: str = ""


class OperatorState(_Struct, frozen=True):
    """One operator state of a stage (`context.state`); items are opaque bytes."""

    name: str
    kind: Literal["list", "union", "broadcast"]
    items: tuple[bytes, ...] = ()


class PlannedInput(_Struct, frozen=True):
    """What an operator that Spark has planned takes from one of its inputs: a join has two, every other operator one.

    Attributes:
        columns: what its state holds of this input, in order: a join's columns as "name: type", the names of an aggregation's
            functions.
        origins: the same, traced through the query to the columns of the sources.
        steps: what stands between the sources and the operator, without order: filters, lookups, the sources themselves.
    """

    columns: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()


class PlannedOperator(_Struct, frozen=True):
    """A stateful operator as Spark has planned it: analysis, optimization and planning done.

    Attributes:
        kind: what it is, such as "inner join of streams".
        keys: the expressions of the key of its state, in order, traced to the columns of the sources; of a join both sides.
        bounds: the conditions of a join that decide what its state holds and for how long.
        pushed: the conditions that the query applies behind the operator, and Spark in front of it.
        sides: its inputs, from left to right.
    """

    kind: str
    keys: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    pushed: tuple[str, ...] = ()
    sides: tuple[PlannedInput, ...] = ()


_OUTPUT_MODE = "output mode "
"""How the text in a stage's `state_plan` begins that is not an operator."""


class LastCommit(_Struct, frozen=True):
    """What the sink of an instance had committed last when the snapshot was taken.

    Attributes:
        transaction: the transaction; only the sink reads it.
        location: the sink's place; empty if the sink does not know it.
    """

    transaction: str
    location: str


class StageInstanceSnapshot(_Struct, frozen=True):
    """One instance of one stage.

    Attributes:
        operator_states: its operator states.
        transactions: the transactions that its sink has pre-committed; only the sink reads them.
        rows_out: number of rows emitted so far, for reporting; None if it is not known. See `row_counts`.
        transaction_files: by position in `transactions`, the files with the transaction's data. Only a savepoint has them: it
            must be complete also after its transactions were aborted.
        state_plan: descriptions of the stage's stateful operators, for comparison; empty for a stage without state. None in a
            checkpoint of a release that did not record them.
        late_rows: number of rows dropped as late so far, for reporting.
        planned: the stage's stateful operators as Spark has planned them, from the highest number of an operator to the lowest,
            for comparison. Empty for a stage without state; None in a checkpoint of a release that did not record them.
        committed: what its sink had committed last; None if it had committed nothing.
    """

    operator_states: tuple[OperatorState, ...] = ()
    transactions: tuple[str, ...] = ()
    rows_out: int | None = None
    transaction_files: dict[int, tuple[StateFile, ...]] = {}
    state_plan: tuple[str, ...] | None = None
    late_rows: int = 0
    planned: tuple[PlannedOperator, ...] | None = None
    committed: LastCommit | None = None

    @property
    def operators(self) -> tuple[str, ...]:
        """The texts of its stateful operators; empty if they were not recorded."""
        return tuple(text for text in self.state_plan or () if not text.startswith(_OUTPUT_MODE))


class FusedSourceSnapshot(_Struct, frozen=True):
    """One of the fused sources with which a task's chain begins.

    Attributes:
        source: name of the source.
        position: position of its stream among the streams of the query, from 0.
        ended: whether it has ended. Its stage has finished with this checkpoint, although the task runs on.
        watermark: its own watermark, milliseconds; None before the first.
        idle: whether it is idle, and left out of the minimum.
        behind: whether it is active again after idleness, and left out of the minimum until it has caught up.
    """

    source: str
    position: int
    ended: bool = False
    watermark: int | None = None
    idle: bool = False
    behind: bool = False


class TaskSnapshot(_Struct, frozen=True):
    """One task: an instance of a chain.

    Attributes:
        stages: by stage name, its part, in the order of the chain.
        query: its Spark query; None before it has one.
        channels: its input channels.
        static: its static inputs that are ready.
        end_of_data: "drain" for a task that had finished its operators; after a restore it waits for the
            final checkpoint. Such a task is not finished: the snapshot holds its sinks' transactions.
        watermark: its output watermark, milliseconds; None before the first.
        output_positions: by output channel, the number of elements that had been written.
        valve_watermark: its input watermark, milliseconds; None before the first.
        fused: the fused sources of its chain, in the order of the chain.
        splits: the splits that a split source was assigned and has not read to their end.
    """

    stages: dict[str, StageInstanceSnapshot] = {}
    query: QuerySnapshot | None = None
    channels: tuple[ChannelSnapshot, ...] = ()
    static: tuple[StaticTableSnapshot, ...] = ()
    end_of_data: EndOfDataFlag = "none"
    watermark: int | None = None
    output_positions: dict[str, int] = {}
    valve_watermark: int | None = None
    fused: tuple[FusedSourceSnapshot, ...] = ()
    splits: tuple[str, ...] = ()

    @property
    def ended_sources(self) -> frozenset[str]:
        """The fused sources that have ended."""
        return frozenset(each.source for each in self.fused if each.ended)


class EnumeratorState(_Struct, frozen=True):
    """The state of the enumerator of a source's splits; there is one per stage, for any parallelism.

    Each split is in one of the three fields. The state is kept after all instances have finished.

    Attributes:
        discovered: splits that no instance reads yet, in the order in which they are to be assigned; opaque.
        assigned: splits that an instance reads.
        finished: splits that were read to their end.
        complete: whether the source is bounded and all its splits are discovered.
    """

    discovered: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    complete: bool = False


class InputMetadata(_Struct, frozen=True):
    """How a stage reads one of its upstream stages.

    Attributes:
        stage: name of the upstream stage.
        mode: "stream", or "static" for a table that is complete before it is read.
        pattern: which upstream instances each instance reads.
        key: the column by which rows are distributed to the instances; empty without one.
    """

    stage: str
    mode: Literal["stream", "static"] = "stream"
    pattern: Literal["pointwise", "all_to_all"] = "pointwise"
    key: str = ""


class StageMetadata(_Struct, frozen=True):
    """One stage, and which of its instances have finished.

    Attributes:
        name: name of the stage.
        parallelism: number of its instances.
        instances: names of its instances, in order.
        finished: indices of the instances that have finished.
        fully_finished: whether all have finished; the stage then has no state and is not run again.
        output_schema: schema of its rows in channels, in Spark's JSON form, so that its consumers can be
            restored without it; empty for a stage inside a chain, except a fused source.
        rows: number of rows emitted so far by all instances, finished ones included, for reporting; None if it is not known.
        max_parallelism: number of key groups of its keyed state, fixed since its first checkpoint; 0 without keyed state.
        enumerator: the enumerator's state of a source that enumerates splits; None for others.
        inputs: how it reads its upstream stages, which decides the content of its state; empty for a source. None in a
            checkpoint of a release that did not record it.
        late_rows: number of rows dropped as late so far by all instances, finished ones included, for reporting.
        most_instances: the largest number of instances that the stage has had, if it has fewer now; otherwise 0. The sinks of the
            others may hold rows of the job.
        state_partitions: number of its state partitions over all instances, if each of them is a key group; 0 if a state
            partition holds keys of several groups, as in each checkpoint of a release that did not record it.
        ending: names of the instances of a source that a request has ended, and that have not finished.
    """

    name: str
    parallelism: int
    instances: tuple[str, ...]
    finished: tuple[int, ...] = ()
    fully_finished: bool = False
    output_schema: str = ""
    rows: int | None = None
    max_parallelism: int = 0
    enumerator: EnumeratorState | None = None
    inputs: tuple[InputMetadata, ...] | None = None
    late_rows: int = 0
    most_instances: int = 0
    state_partitions: int = 0
    ending: tuple[str, ...] = ()


class ChainMetadata(_Struct, frozen=True):
    """A chain: the stages that share a query, in order, and its unfinished tasks by index."""

    name: str
    stages: tuple[str, ...]
    tasks: dict[int, TaskSnapshot] = {}

    @property
    def ended_sources(self) -> frozenset[str]:
        """The fused sources of the chain that have ended while their task runs."""
        return frozenset(name for task in self.tasks.values() for name in task.ended_sources)


class CheckpointMetadata(_Struct, frozen=True, omit_defaults=False):
    """A whole checkpoint.

    Attributes:
        pipeline: name of the pipeline.
        checkpoint_id: id of the checkpoint or savepoint.
        stages: every stage of the pipeline, in topological order.
        chains: the layout of chains, with the tasks' snapshots.
        kind: "checkpoint" or "savepoint".
        job_id: id of the job that took it.
        run_id: id of the Dagster run that took it.
        epoch: fencing epoch of the owner that wrote it.
        triggered_at, completed_at: seconds since 1970.
        spark_version: Spark's version; another one may not be able to read the state.
        statistics: numbers for reporting.
        version: version of the format.
    """

    pipeline: str
    checkpoint_id: int
    stages: tuple[StageMetadata, ...] = ()
    chains: tuple[ChainMetadata, ...] = ()
    kind: Literal["checkpoint", "savepoint"] = "checkpoint"
    job_id: str = ""
    run_id: str = ""
    epoch: int = 0
    triggered_at: float = 0.0
    completed_at: float = 0.0
    spark_version: str = ""
    statistics: dict[str, float] = {}
    version: int = VERSION

    @property
    def imported(self) -> bool:
        """Whether it is a savepoint that was made from the checkpoint directory of a plain query."""
        queries = (task.query for chain in self.chains for task in chain.tasks.values())
        return any(query is not None and bool(query.imported_from) for query in queries)

    def files(self) -> frozenset[str]:
        """The names in storage of all files that the checkpoint refers to: none may be deleted while it is retained."""
        return frozenset(file.name for chain in self.chains for t in chain.tasks.values() for file in task_files(t))


def in_flight_files(task: TaskSnapshot) -> list[StateFile]:
    """The files with the records that a task has received and not yet processed."""
    elements = [element for channel in task.channels for element in channel.in_flight]
    return [file for element in elements if isinstance(element, Segment) for file in element.files]


def task_files(task: TaskSnapshot) -> list[StateFile]:
    """Every file that a task's snapshot refers to."""
    found = list(task.query.files) if task.query is not None else []
    found += in_flight_files(task)
    for table in task.static:
        found += [f for segment in table.segments for f in segment.files]
    for stage in task.stages.values():
        found += [f for files in stage.transaction_files.values() for f in files]
    return found
