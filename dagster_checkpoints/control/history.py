"""What a pipeline's runs did, kept in ``history/`` for the report: ended checkpoints, events, and samples of the stages.

A *segment* is one file. The owner rewrites its newest segment while that grows, and begins another when it is full, so that a
write costs at most a megabyte however long the history is; any process reads them. Only the newest segments are kept. Never for
correctness: the history of a killed run may lack its last seconds, and deleting a file of it loses only what the report shows.

Source: Flink's CheckpointStatsHistory, CheckpointingStatistics and TaskCheckpointStatisticDetails, which end with the JobManager.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from dagster_checkpoints.errors import CorruptHistory, NotFound
from dagster_checkpoints.execution.moments import Moment, WithMoments
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.layout import HistoryKey

VERSION = 1

Setting = str | float | bool | None


# `gc=False`: a long history has a million of these values, without circles among them; the collector would visit all of them many
# times while they are read.


class Measured(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The measures of an instance's part in a checkpoint; of several instances the times of the slowest, the bytes of all.

    Args:
        acknowledged_after: seconds from the trigger to the acknowledgement.
        start_delay: seconds from the trigger to the first work for the checkpoint, and the way of the acknowledgement. No task
            measures it: it is what remains of `acknowledged_after` beside the three times below.
        alignment_seconds: time from the first barrier to the last.
        sync_seconds: time in which no record was processed.
        async_seconds: duration of the upload.
        new_bytes: bytes uploaded for the checkpoint.
        total_bytes: bytes of all files that the snapshot names.
        in_flight_bytes: of these, bytes of records on their way between stages.
    """

    acknowledged_after: float = 0.0
    start_delay: float = 0.0
    alignment_seconds: float = 0.0
    sync_seconds: float = 0.0
    async_seconds: float = 0.0
    new_bytes: int = 0
    total_bytes: int = 0
    in_flight_bytes: int = 0

    @staticmethod
    def of_all(parts: Iterable[Measured]) -> Measured:
        """The measures of several instances together; all 0 without any."""
        parts = tuple(parts)
        if not parts:
            return Measured()
        return Measured(
            max(part.acknowledged_after for part in parts),
            max(part.start_delay for part in parts),
            max(part.alignment_seconds for part in parts),
            max(part.sync_seconds for part in parts),
            max(part.async_seconds for part in parts),
            sum(part.new_bytes for part in parts),
            sum(part.total_bytes for part in parts),
            sum(part.in_flight_bytes for part in parts),
        )


class InstancePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One instance's part in a checkpoint.

    Args:
        name: name of the instance.
        measured: its measures; None if it has not acknowledged.
        finished: whether it had finished before the checkpoint was triggered, and has no part in it.
    """

    name: str
    measured: Measured | None = None
    finished: bool = False


class VertexParts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a vertex, which runs one stage or a chain of several.

    Args:
        stages: names of its stages.
        measured: the measures of all its instances together; None if none has acknowledged.
        instances: the parts of its instances.
    """

    stages: tuple[str, ...]
    measured: Measured | None
    instances: tuple[InstancePart, ...]


class CheckpointEntry(WithMoments, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint or savepoint that has ended.

    Args:
        checkpoint_id: its id.
        epoch: epoch of the run that triggered it.
        kind: checkpoint or savepoint.
        status: how it ended.
        triggered_at, ended_at: wall clock of the run.
        acknowledged, expected: number of tasks that acknowledged it, and that had to.
        periodic: whether the interval asked for it.
        unaligned: whether its barriers overtook records.
        stops_job: whether it is the savepoint of a stop.
        location: its location; "" if it failed.
        reason, message: of a failed one, the name of a ``FailureReason`` and the explanation for people.
        measured: the measures of all tasks together.
        vertices: the parts of the vertices, in topological order.
    """

    checkpoint_id: int
    epoch: int
    kind: str
    status: Literal["completed", "failed"]
    triggered_at: Moment
    ended_at: Moment
    acknowledged: int
    expected: int
    periodic: bool = False
    unaligned: bool = False
    stops_job: bool = False
    location: str = ""
    reason: str = ""
    message: str = ""
    measured: Measured = Measured()
    vertices: tuple[VertexParts, ...] = ()

    @property
    def duration(self) -> float:
        """Seconds from the trigger to the end."""
        return (self.ended_at - self.triggered_at).total_seconds()


EventKind = Literal["run_started", "job_started", "restarting", "stage_finished", "stopping", "run_ended"]


class EventEntry(WithMoments, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a run.

    Args:
        at: wall clock of the run.
        epoch: epoch of the run.
        kind: "run_started"; "job_started" when an attempt's tasks start; "restarting" after a failure; "stage_finished";
            "stopping" when a stop begins; "run_ended".
        text: the cause of a restart, "suspend" or "drain" of a stop, the error of a run's end.
        run_id: of a run's start, the id of the run.
        job_id: of an attempt's start, the id of the job.
        attempt: number of the attempt that starts, or will start.
        checkpoint_id, location: of an attempt's start, the checkpoint that it begins from; None and "" for a new start.
        stages: the stages that restart or finish; empty for all.
        instances: of a run's start, the number of instances of each stage.
        settings: of a run's start, its settings.
        status: of a run's end, the final status of its job.
        ended_by: of a run's end, what brought a FINISHED job to its end.
    """

    at: Moment
    epoch: int
    kind: EventKind
    text: str = ""
    run_id: str = ""
    job_id: int = 0
    attempt: int = 0
    checkpoint_id: int | None = None
    location: str = ""
    stages: tuple[str, ...] = ()
    instances: dict[str, int] = msgspec.field(default_factory=dict)
    settings: dict[str, Setting] = msgspec.field(default_factory=dict)
    status: str = ""
    ended_by: str = ""


class StageSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stage at one moment.

    Args:
        rows: number of rows emitted since the job began; None if it is not known.
        rows_behind: unread messages of all its instances; None if it is not known.
        watermark_ms: the lowest output watermark of its instances, milliseconds since 1970; None before the first.
    """

    rows: int | None = None
    rows_behind: int | None = None
    watermark_ms: int | None = None


class HistorySample(WithMoments, frozen=True):
    """All stages at one moment: wall clock and epoch of the run, and the stages by name."""

    at: Moment
    epoch: int
    stages: dict[str, StageSample]


class Entries(msgspec.Struct, frozen=True):
    """Entries of a history, each kind in the order of its times."""

    checkpoints: tuple[CheckpointEntry, ...] = ()
    events: tuple[EventEntry, ...] = ()
    samples: tuple[HistorySample, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.events or self.samples)

    @staticmethod
    def joined(parts: Iterable[Entries]) -> Entries:
        """All entries of these parts, in their order."""
        parts = tuple(parts)
        return Entries(
            tuple(entry for part in parts for entry in part.checkpoints),
            tuple(entry for part in parts for entry in part.events),
            tuple(entry for part in parts for entry in part.samples),
        )

    def distinct(self) -> Entries:
        """The entries without repetitions, each kind by epoch and time.

        A run takes over the entries of its predecessor's last file, and deletes that file afterwards: for a while both are there.
        """
        checkpoints = {(entry.epoch, entry.checkpoint_id): entry for entry in self.checkpoints}
        events = {(entry.epoch, entry.at, entry.kind, entry.text, entry.stages): entry for entry in self.events}
        samples = {(sample.epoch, sample.at): sample for sample in self.samples}
        return Entries(
            tuple(sorted(checkpoints.values(), key=lambda entry: (entry.epoch, entry.ended_at, entry.checkpoint_id))),
            tuple(sorted(events.values(), key=lambda entry: (entry.epoch, entry.at))),
            tuple(sorted(samples.values(), key=lambda sample: (sample.epoch, sample.at))),
        )


class _Segment(msgspec.Struct, frozen=True):
    entries: Entries
    version: int = VERSION


class _SegmentVersion(msgspec.Struct):
    version: int


# Made at import: two threads that decode a type for the first time at the same moment crash msgspec.
_VERSIONS = msgspec.json.Decoder(_SegmentVersion)
_SEGMENTS = msgspec.json.Decoder(_Segment)


def encode_segment(entries: Entries) -> bytes:
    """``entries`` as the bytes of a file in ``history/``."""
    return msgspec.json.encode(_Segment(entries))


def decode_segment(data: bytes, url: str) -> Entries:
    """The entries in the bytes of a file in ``history/``.

    Args:
        data: content of the file.
        url: URL of the file, for errors.

    Raises:
        CorruptHistory: the file is no part of a history, or a newer release wrote it.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version == VERSION:
            return _SEGMENTS.decode(data).entries
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptHistory(
            f"expected a part of a pipeline's history as JSON in {url}, found {len(data)} bytes that are not: {error}. It is for "
            "the report only: delete the file, and the report lacks what it held"
        ) from error
    raise CorruptHistory(
        f"expected version {VERSION} in {url}, found version {version}: a newer release of dagster-checkpoints wrote it. "
        "Read the report with that release"
    )


FULL_CHECKPOINTS = 200
"""Number of checkpoints with which a segment is full."""
FULL_BYTES = 1_000_000
"""Size with which a segment is full."""
KEPT_SEGMENTS = 50
"""Number of full segments that are kept: of 10,000 checkpoints."""
_REMEMBERED = 5
"""Number of full segments that the owner keeps in memory for the page that it writes."""


def read_history(storage: CheckpointStorage) -> tuple[Entries, tuple[str, ...]]:
    """The pipeline's history, and a text for each segment that cannot be read.

    Raises:
        StorageUnavailable: the storage cannot be reached.
    """
    parts, problems = [], []
    for segment in _stored(storage):
        try:
            parts.append(_read(storage, segment))
        except CorruptHistory as error:
            problems.append(str(error))
        except NotFound:  # the running owner has deleted it meanwhile
            continue
    return Entries.joined(parts).distinct(), tuple(problems)


class HistorySegments:
    """The owner's side: appends entries. For one thread.

    Args:
        storage: storage of the pipeline, which this process owns.
        epoch: epoch of the owner; the names of all segments that it writes contain it.
    """

    def __init__(self, storage: CheckpointStorage, epoch: int) -> None:
        self._storage = storage
        self._epoch = epoch
        self._number = 1
        self._begun = False
        self._growing = Entries()
        self._full: deque[Entries] = deque(maxlen=_REMEMBERED)
        self._stored: list[HistoryKey] = []
        """All full segments in storage, oldest first."""
        self._replaced: list[HistoryKey] = []
        """Segments of earlier owners whose entries are in the growing one."""
        self.problems: tuple[str, ...] = ()
        """A text for each segment of earlier owners that this owner could not read."""

    def append(self, entries: Entries) -> None:
        """Write entries. If that fails, the next call writes them too.

        Raises:
            StorageUnavailable, OutcomeUnknown: the entries may not be stored.
        """
        self._growing = Entries.joined((self._growing, entries))
        self._begin()
        data = encode_segment(self._growing)
        layout, key = self._storage.layout, HistoryKey(self._epoch, self._number)
        self._storage.store.put(layout.history_segment(key), data)
        if len(data) >= FULL_BYTES or len(self._growing.checkpoints) >= FULL_CHECKPOINTS:
            self._full.append(self._growing)
            self._stored.append(key)
            self._growing, self._number = Entries(), self._number + 1
        expired = self._stored[:-KEPT_SEGMENTS]
        if expired or self._replaced:
            self._storage.store.delete(layout.history_segment(each) for each in (*expired, *self._replaced))
            self._stored, self._replaced = self._stored[len(expired) :], []

    def latest(self) -> Entries:
        """The newest entries, of this owner and of those before it: the latest 1,000 checkpoints and up to 200 more."""
        return Entries.joined((*self._full, self._growing)).distinct()

    def _begin(self) -> None:
        """Continue the history of earlier owners: their last segment, unless it is full, becomes a part of the first one here."""
        if self._begun:
            return
        found = [key for key in _stored(self._storage) if key.epoch < self._epoch]
        read: list[tuple[HistoryKey, Entries]] = []
        problems = []
        for key in found[-_REMEMBERED:]:
            try:
                read.append((key, _read(self._storage, key)))
            except CorruptHistory as error:
                problems.append(str(error))
            except NotFound:
                found.remove(key)
        if read and len(read[-1][1].checkpoints) < FULL_CHECKPOINTS:
            key, entries = read.pop()
            found.remove(key)
            self._replaced = [key]
            self._growing = Entries.joined((entries, self._growing))
        self._full.extend(entries for _, entries in read)
        self._stored, self.problems, self._begun = found, tuple(problems), True


def _stored(storage: CheckpointStorage) -> list[HistoryKey]:
    """All segments in storage, oldest first."""
    keys: Iterable[HistoryKey | None] = (
        storage.layout.parse_history(found.key) for found in storage.store.list(storage.layout.history)
    )
    return sorted(key for key in keys if key is not None)


def _read(storage: CheckpointStorage, key: HistoryKey) -> Entries:
    name = storage.layout.history_segment(key)
    return decode_segment(storage.store.get(name), f"{storage.store.url}/{name}")
