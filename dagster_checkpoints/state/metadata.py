"""What a checkpoint holds, and its form in storage: the `_metadata` file.

Two lines of JSON. The first names format, version, length and checksum; the second is the body::

    {"format":"dagster-checkpoints","version":1,"length":1234,"sha256":"…"}
    {"pipeline":"flights","checkpoint_id":7,…}

The checksum covers version, length and body, so that any flipped byte is a `CorruptMetadata` and never a
misread one; an intact file of another version is an `UnknownMetadataVersion`. The first line is the same in
every version, for ever. A new version adds its structs beside these; every version ever written stays
readable (tests/state/examples). Must not know: storage, Spark, the pipeline.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

import msgspec

from dagster_checkpoints.state.errors import CorruptMetadata, UnknownMetadataVersion

FORMAT = "dagster-checkpoints"
VERSION = 1

EndOfDataFlag = Literal["none", "drain", "suspend"]
ChannelEnd = Literal["none", "drain", "suspend", "partition"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the metadata: immutable; a field that this release does not know is refused, not skipped."""


class StateFile(_Struct, frozen=True):
    """A file of state, content-addressed.

    Attributes:
        path: where it goes, relative to the task's restored directory.
        sha256: of its bytes, hexadecimal; its name in shared/.
        size: bytes.
    """

    path: str
    sha256: str
    size: int


class Segment(_Struct, frozen=True, tag_field="type", tag="segment"):
    """Records of a channel, as one or more Parquet files."""

    files: tuple[StateFile, ...]
    rows: int


class WatermarkElement(_Struct, frozen=True, tag_field="type", tag="watermark"):
    """Event time has come to `ms` (milliseconds since 1970) on the channel."""

    ms: int


class IdleElement(_Struct, frozen=True, tag_field="type", tag="idle"):
    """The channel has fallen silent, or speaks again."""

    idle: bool


class EndOfDataElement(_Struct, frozen=True, tag_field="type", tag="end_of_data"):
    """No more records on the channel."""

    drain: bool


class EndOfPartitionElement(_Struct, frozen=True, tag_field="type", tag="end_of_partition"):
    """Nothing at all follows on the channel."""


ChannelElement = Segment | WatermarkElement | IdleElement | EndOfDataElement | EndOfPartitionElement


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
    """

    batch_id: int
    files: tuple[StateFile, ...] = ()
    own_watermark: bool = False


class OperatorState(_Struct, frozen=True):
    """One of a stage's own states (`context.state`); items are opaque bytes."""

    name: str
    kind: Literal["list", "union", "broadcast"]
    items: tuple[bytes, ...] = ()


class StageInstanceSnapshot(_Struct, frozen=True, omit_defaults=True):
    """One instance of one stage.

    Attributes:
        operator_states: its own states.
        transactions: what its sink has pre-committed, opaque to everybody else.
        rows_out: rows emitted so far, for reporting.
        transaction_files: the files that a transaction's data lies in, by its position in `transactions`. Only a
            savepoint has them: restored later, it must not lose what was aborted meanwhile. Not written when
            empty, so that older readers refuse only what they cannot restore.
    """

    operator_states: tuple[OperatorState, ...] = ()
    transactions: tuple[str, ...] = ()
    rows_out: int = 0
    transaction_files: dict[int, tuple[StateFile, ...]] = {}


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


class StageMetadata(_Struct, frozen=True):
    """One stage: who of its instances has finished.

    Attributes:
        instances: their names, in order.
        finished: the indices of those that have finished.
        fully_finished: all have; the stage holds nothing and is not run again.
        output_schema: of its rows as channels carry them, in Spark's JSON form, so that its consumers can be
            restored without it; empty for a stage inside a chain.
        rows: emitted so far by all instances, finished ones included, for reporting.
    """

    name: str
    parallelism: int
    instances: tuple[str, ...]
    finished: tuple[int, ...] = ()
    fully_finished: bool = False
    output_schema: str = ""
    rows: int = 0


class ChainMetadata(_Struct, frozen=True):
    """A chain: which stages shared a query, in order, and its unfinished tasks by index."""

    name: str
    stages: tuple[str, ...]
    tasks: dict[int, TaskSnapshot] = {}


class CheckpointMetadata(_Struct, frozen=True):
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
        """The sha256 of every file that the checkpoint refers to: what must not be deleted while it is
        retained."""
        return frozenset(file.sha256 for chain in self.chains for t in chain.tasks.values() for file in task_files(t))


def task_files(task: TaskSnapshot) -> list[StateFile]:
    """Every file that a task's snapshot refers to."""
    found = list(task.query.files) if task.query is not None else []
    for channel in task.channels:
        found += [f for element in channel.in_flight if isinstance(element, Segment) for f in element.files]
    for table in task.static:
        found += [f for segment in table.segments for f in segment.files]
    for stage in task.stages.values():
        found += [f for files in stage.transaction_files.values() for f in files]
    return found


def encode(metadata: CheckpointMetadata) -> bytes:
    """The bytes of the `_metadata` file; dictionaries keep their order, which for a chain's stages means
    something."""
    body = msgspec.json.encode(metadata)
    return _header(metadata.version, body) + b"\n" + body + b"\n"


def decode(data: bytes, where: str) -> CheckpointMetadata:
    """Read the bytes of a `_metadata` file.

    Args:
        data: the whole file.
        where: its location, for the errors.

    Raises:
        CorruptMetadata: the bytes are not what was written.
        UnknownMetadataVersion: they are, by a release that this one cannot read.
    """
    header, newline, rest = data.partition(b"\n")
    version = _read_version(header, where)
    if not newline or not rest.endswith(b"\n") or _header(version, rest[:-1]) != header:
        raise _corrupt(
            where,
            f"its first line promises {header[:200].decode('utf-8', 'replace')}, and the "
            f"{max(len(rest) - 1, 0)} "
            "bytes behind it do not match that length and checksum",
        )
    if version != VERSION:
        raise UnknownMetadataVersion(
            f"The checkpoint metadata at {where} is intact and of format version {version}; this release "
            "reads "
            f"version {VERSION}. Use a release of dagster-checkpoints that knows version {version}, or "
            "restore "
            "from another checkpoint."
        )
    try:
        metadata = msgspec.json.decode(rest, type=CheckpointMetadata)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UnknownMetadataVersion(
            f"The checkpoint metadata at {where} is intact, but says something that this release does not "
            f"understand: {error}. It was written by another release of dagster-checkpoints; use that one, "
            "or "
            "restore from another checkpoint."
        ) from error
    return metadata


def _header(version: int, body: bytes) -> bytes:
    covered = b"%s %d %d\n%s" % (FORMAT.encode(), version, len(body), body)
    fields = {
        "format": FORMAT,
        "version": version,
        "length": len(body),
        "sha256": hashlib.sha256(covered).hexdigest(),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _read_version(header: bytes, where: str) -> int:
    try:
        fields = json.loads(header)
        version = fields["version"]
        known = fields["format"] == FORMAT and type(version) is int
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(where, f"its first line is no metadata header ({error})") from error
    if not known:
        raise _corrupt(where, f"its first line does not name the format {FORMAT!r} and a version")
    return int(version)


def _corrupt(where: str, found: str) -> CorruptMetadata:
    return CorruptMetadata(
        f"The checkpoint metadata at {where} is damaged: {found}. Expected a file written by "
        "dagster-checkpoints, "
        "unchanged. Restore from another retained checkpoint or savepoint."
    )
