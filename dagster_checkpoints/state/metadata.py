"""What a checkpoint holds, as values; `metadata_file` says how they are written.

A new version of the format adds its structs beside these. An addition within a version is a field that is not
written as long as it says nothing: older releases refuse only what they would misread. Must not know: storage, Spark,
the pipeline.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1

EndOfDataFlag = Literal["none", "drain", "suspend"]
ChannelEnd = Literal["none", "drain", "suspend", "partition"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A part of the metadata: immutable; a field that this release does not know is refused, not skipped, and one that
    says nothing is not written.

    Values that cannot form cycles need no garbage collector, which would go over all of them several times while a
    large checkpoint is read: that took four times as long.
    """


class StateFile(_Struct, frozen=True):
    """A file of state, content-addressed.

    Attributes:
        path: where it goes, relative to the task's restored directory.
        sha256: of its bytes, hexadecimal.
        size: bytes.
        stored_by: epoch of the owner that stored it in shared/, part of its name there; 0 if its name is the sha256 alone,
            as in a savepoint's directory and where a release stored it that did not know epochs in names.
    """

    path: str
    sha256: str
    size: int
    stored_by: int = 0

    @property
    def name(self) -> str:
        """What it is called in storage."""
        return f"{self.sha256}-{self.stored_by}" if self.stored_by else self.sha256


class Segment(_Struct, frozen=True, tag_field="type", tag="segment"):
    """Records of a channel, as one or more Parquet files."""

    files: tuple[StateFile, ...]
    rows: int


class Mark(_Struct, frozen=True):
    """An element of a channel that holds no records. Those in here may lie in front of a barrier, and so be in-flight data."""


class WatermarkAt(Mark, frozen=True, tag_field="type", tag="watermark"):
    """No record before `ms` (milliseconds since 1970) follows on the channel, except late ones. MAX_WATERMARK_MS: none at all."""

    ms: int


class WatermarkStatus(Mark, frozen=True, tag_field="type", tag="idle"):
    """The channel is idle, and is left out of the minimum until it speaks again; or it speaks again."""

    idle: bool


class EndOfData(Mark, frozen=True, tag_field="type", tag="end_of_data"):
    """No more records on the channel; barriers may still follow.

    Attributes:
        drain: False after a suspend: the data goes on when the job is resumed from the savepoint.
    """

    drain: bool


class EndOfPartition(Mark, frozen=True, tag_field="type", tag="end_of_partition"):
    """Nothing at all follows on the channel."""


ChannelElement = Segment | WatermarkAt | WatermarkStatus | EndOfData | EndOfPartition


class ChannelSnapshot(_Struct, frozen=True):
    """One input channel of a task.

    Attributes:
        channel: its name.
        position: how many elements of its log lie in front of the snapshot.
        watermark: the last one, milliseconds; None before the first.
        idle: whether it is left out of the minimum.
        ended: how it has ended.
        in_flight: elements that belong to the checkpoint and were not yet processed, in order.
    """

    channel: str
    position: int
    watermark: int | None = None
    idle: bool = False
    ended: ChannelEnd = "none"
    in_flight: tuple[ChannelElement, ...] = ()


class StaticTableSnapshot(_Struct, frozen=True):
    """A static input that is ready: the table is the consumer's state, because the upstream holds nothing."""

    input: str
    segments: tuple[Segment, ...] = ()


class QuerySnapshot(_Struct, frozen=True):
    """The checkpoint directory of a Spark query as of batch `batch_id`.

    Attributes:
        batch_id: the last committed batch; -1 before the first.
        files: the pruned directory.
        own_watermark: the query takes its event time from its source (`withWatermark`) and not from channels.
        sources: what its streaming sources read, in the order of their offsets. None in a checkpoint of a release that did
            not record them.
    """

    batch_id: int
    files: tuple[StateFile, ...] = ()
    own_watermark: bool = False
    sources: tuple[str, ...] | None = None


class OperatorState(_Struct, frozen=True):
    """One of a stage's own states (`context.state`); items are opaque bytes."""

    name: str
    kind: Literal["list", "union", "broadcast"]
    items: tuple[bytes, ...] = ()


class StageInstanceSnapshot(_Struct, frozen=True):
    """One instance of one stage.

    Attributes:
        operator_states: its own states.
        transactions: what its sink has pre-committed, opaque to everybody else.
        rows_out: rows emitted so far, for reporting.
        transaction_files: the files that a transaction's data lies in, by its position in `transactions`. Only a
            savepoint has them: restored later, it must not lose what was aborted meanwhile.
        state_plan: the stage's stateful operators, to be read and compared; none of a stage without state. None in a
            checkpoint of a release that did not record them.
        late_rows: rows that it has dropped as late so far, for reporting.
    """

    operator_states: tuple[OperatorState, ...] = ()
    transactions: tuple[str, ...] = ()
    rows_out: int = 0
    transaction_files: dict[int, tuple[StateFile, ...]] = {}
    state_plan: tuple[str, ...] | None = None
    late_rows: int = 0


class TaskSnapshot(_Struct, frozen=True):
    """One task: an instance of a chain.

    Attributes:
        stages: by stage name, in the order of the chain.
        query: its Spark query; None if there is none (yet).
        channels: its input channels.
        static: its static inputs that are ready.
        end_of_data: "drain" for a task that had finished its operators; it is restored into waiting for the
            final checkpoint. Such a task is not finished: its sinks' transactions are in here.
        watermark: its output watermark, milliseconds; None before the first.
        output_positions: by output channel, how many elements had been written.
        valve_watermark: its input watermark, milliseconds; None before the first.
    """

    stages: dict[str, StageInstanceSnapshot] = {}
    query: QuerySnapshot | None = None
    channels: tuple[ChannelSnapshot, ...] = ()
    static: tuple[StaticTableSnapshot, ...] = ()
    end_of_data: EndOfDataFlag = "none"
    watermark: int | None = None
    output_positions: dict[str, int] = {}
    valve_watermark: int | None = None


class EnumeratorState(_Struct, frozen=True):
    """What the enumerator of a source's splits knows; there is one per stage, whatever its parallelism.

    No run on Spark reaches it yet: Spark reads the sources. A split is in one of the three. How far an assigned one was read is
    its reader's state. Kept after all instances have finished.

    Attributes:
        discovered: splits that nobody reads yet, in the order in which they are to be assigned; opaque.
        assigned: those that an instance reads.
        finished: those that were read to their end.
    """

    discovered: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()


class InputMetadata(_Struct, frozen=True):
    """How a stage reads one of its upstream stages.

    Attributes:
        stage: the upstream stage.
        mode: "stream", or "static" for a table that is read whole.
        pattern: which of its instances feed which.
        key: the column by which rows are dealt out to the instances; empty without one.
    """

    stage: str
    mode: Literal["stream", "static"] = "stream"
    pattern: Literal["pointwise", "all_to_all"] = "pointwise"
    key: str = ""


class StageMetadata(_Struct, frozen=True):
    """One stage: who of its instances has finished.

    Attributes:
        instances: their names, in order.
        finished: the indices of those that have finished.
        fully_finished: all have; the stage holds nothing and is not run again.
        output_schema: of its rows as channels carry them, in Spark's JSON form, so that its consumers can be
            restored without it; empty for a stage inside a chain.
        rows: emitted so far by all instances, finished ones included, for reporting.
        max_parallelism: the number of key groups of its keyed state, fixed since its first checkpoint; 0 without one.
        enumerator: of a source that enumerates splits.
        inputs: how it reads its upstream stages, which decides what its instances hold; none of a source. None in a
            checkpoint of a release that did not record it.
        late_rows: dropped as late so far by all instances, finished ones included, for reporting.
    """

    name: str
    parallelism: int
    instances: tuple[str, ...]
    finished: tuple[int, ...] = ()
    fully_finished: bool = False
    output_schema: str = ""
    rows: int = 0
    max_parallelism: int = 0
    enumerator: EnumeratorState | None = None
    inputs: tuple[InputMetadata, ...] | None = None
    late_rows: int = 0


class ChainMetadata(_Struct, frozen=True):
    """A chain: which stages shared a query, in order, and its unfinished tasks by index."""

    name: str
    stages: tuple[str, ...]
    tasks: dict[int, TaskSnapshot] = {}


class CheckpointMetadata(_Struct, frozen=True, omit_defaults=False):
    """A whole checkpoint.

    Attributes:
        kind: "checkpoint" or "savepoint".
        job_id: of the execution that took it. run_id: the Dagster run's.
        epoch: the fencing epoch under which it was written.
        triggered_at, completed_at: seconds since 1970.
        stages: every stage of the pipeline, in topological order.
        chains: the layout of chains, with the tasks' snapshots.
        spark_version: state written by another one may not be readable.
        statistics: numbers for reporting.
        version: of the format.
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

    def files(self) -> frozenset[str]:
        """The name in storage of every file that the checkpoint refers to: what must not be deleted while it is
        retained."""
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
