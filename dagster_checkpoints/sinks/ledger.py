"""What a sink's target records beside its rows, as values: the newest owner of an instance, and what each job has committed.

A transaction is committed if and only if its branch (see :mod:`branches`) has committed its checkpoint or a later one: on one
branch an instance commits in the order of ids. So a ledger does not grow with the number of checkpoints. Which rows readers see
follows from the branches, too: those on the way to the checkpoint that was restored last, until the job's next checkpoint.

Values only; must not know how a target stores them. :mod:`engine` decides what changes. A stored field that this release does not
know is refused: it is a damaged name, and the field of that name would silently have its default, such as no commits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dagster_checkpoints.sinks.branches import Branches
from dagster_checkpoints.systems.errors import SinkPathInUse, UnreadableSinkTransaction

_AFTER_ALL = 2**62
_LEDGER_VERSION = 1
_TEXT_VERSION = 2
_NAME = re.compile(r"e(\d+)(?:\.(\w+))?-(.+)-(\d{6,})")


class SinkOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run that owns the pipeline. Epochs of two histories cannot be compared.

    Args:
        epoch: its fencing epoch; 0 if the pipeline has no owners: then nothing is fenced.
        history: random id of the storage that counts the epochs.
    """

    epoch: int = 0
    history: str = ""

    def is_replaced_by(self, other: SinkOwner) -> bool:
        """Whether `other` is a newer owner: then this one must change nothing any more."""
        return bool(self.epoch) and self.history == other.history and other.epoch > self.epoch


class StagedName(msgspec.Struct, frozen=True):
    """The name of a transaction: its owner, the attempt that wrote it, and its number in that attempt, from 0."""

    owner: SinkOwner
    attempt: str
    number: int

    @property
    def text(self) -> str:
        history = f".{self.owner.history}" if self.owner.history else ""
        return f"e{self.owner.epoch}{history}-{self.attempt}-{self.number:06d}"


def parse_name(text: str) -> StagedName | None:
    """The name that a text is; None for any other text."""
    found = _NAME.fullmatch(text)
    return None if found is None else StagedName(SinkOwner(int(found[1]), found[2] or ""), found[3], int(found[4]))


class Commit(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """What rows are committed under: once for each job, instance and checkpoint."""

    job: str
    index: int
    checkpoint: int


class Staged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pre-committed transaction.

    Args:
        name: its name, see :class:`StagedName`.
        commit: what its rows will be committed under.
        rows: number of rows.
        bytes: size of its files, in bytes; None if it has none.
        files: number of its files; None likewise.
        payload: what else the target needs to publish the rows, as JSON has it.
    """

    name: str
    commit: Commit
    rows: int
    bytes: int | None = None
    files: int | None = None
    payload: Any = None


class JobLedger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one instance has committed in one job.

    Args:
        branches: the branches of the job's checkpoints.
        newest: id of the newest committed checkpoint of each branch, by the branch's first checkpoint (0: the first branch).
        latest: checkpoint and name of the transaction that was committed last.
        stretches: branch and first checkpoint of each sequence of commits on one branch, in the order of the commits.
        shown: the checkpoint to which readers see the rows, since a restore; None: the newest branch, to its end.
        again: other checkpoints whose rows readers see: a savepoint that a job continues holds them.
    """

    branches: Branches = Branches()
    newest: dict[int, int] = {}
    latest: tuple[int, str] = (0, "")
    stretches: tuple[tuple[int, int], ...] = ()
    shown: int | None = None
    again: tuple[int, ...] = ()

    def is_committed(self, checkpoint: int) -> bool:
        """Whether the transaction of a checkpoint is committed, also if its rows were taken back since."""
        return self.newest.get(self.branches.branch_of(checkpoint), -1) >= checkpoint

    def sees(self, checkpoint: int) -> bool:
        """Whether readers see the rows that this checkpoint has committed, or would commit now."""
        return checkpoint in self.again or self.branches.is_ancestor(checkpoint, _AFTER_ALL if self.shown is None else self.shown)

    @property
    def ends(self) -> set[int]:
        """The checkpoints behind which commits may be seen otherwise than up to them."""
        shown = () if self.shown is None else (self.shown,)
        return {*self.newest.values(), *(branch.restored for branch in self.branches.branches), *shown, *self.again}

    def committed(self, checkpoint: int, name: str) -> JobLedger:
        """The ledger after the commit of a transaction."""
        branch = self.branches.branch_of(checkpoint)
        begins = not self.stretches or self.stretches[-1][0] != branch
        return msgspec.structs.replace(
            self,
            newest={**self.newest, branch: checkpoint},
            latest=(checkpoint, name),
            stretches=(*self.stretches, (branch, checkpoint)) if begins else self.stretches,
        )

    def showing(self, restored: int) -> JobLedger:
        """The ledger when readers see exactly the rows on the way to a checkpoint."""
        return msgspec.structs.replace(self, shown=restored, again=())

    def showing_also(self, checkpoint: int) -> JobLedger:
        """The ledger when readers see the rows of one more checkpoint."""
        return msgspec.structs.replace(self, again=(*self.again, checkpoint))

    def begun(self, restored: int, first: int) -> JobLedger:
        """The ledger when the job takes its first checkpoint after a restore; see :meth:`Branches.begun`."""
        return msgspec.structs.replace(self, branches=self.branches.begun(restored, first), shown=None)

    def in_order(self, checkpoints: Iterable[int]) -> list[int]:
        """Committed checkpoints in the order of their commits."""

        def stretch(checkpoint: int) -> int:
            branch = self.branches.branch_of(checkpoint)
            found = (at for at, (of, first) in enumerate(self.stretches) if of == branch and first <= checkpoint)
            return max(found, default=-1)  # -1: before stretches were recorded

        return sorted(checkpoints, key=lambda checkpoint: (stretch(checkpoint), checkpoint))


class Moves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows that change their visibility.

    Args:
        publish: transactions whose rows become visible.
        hide: commits whose rows are taken back.
        show: commits whose rows were taken back, and become visible again.
    """

    publish: tuple[Staged, ...] = ()
    hide: tuple[Commit, ...] = ()
    show: tuple[Commit, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.publish or self.hide or self.show)


class Unfinished(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change whose moves have begun, with what its job's ledger says when they are done."""

    job: str
    moves: Moves
    after: JobLedger


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is recorded of one instance.

    Args:
        owner: the newest owner that has opened the instance.
        jobs: by job.
        unfinished: for a target that changes rows and ledger one after the other, the change that has begun.
    """

    owner: SinkOwner = SinkOwner()
    jobs: dict[str, JobLedger] = {}
    unfinished: Unfinished | None = None
    version: int = _LEDGER_VERSION

    def job(self, job: str) -> JobLedger:
        return self.jobs.get(job) or JobLedger()

    def with_job(self, job: str, ledger: JobLedger) -> Ledger:
        return msgspec.structs.replace(self, jobs={**self.jobs, job: ledger})


class Change(msgspec.Struct, frozen=True):
    """A change of one instance's rows and ledger.

    Args:
        ledger: the ledger after it.
        job: the job whose rows and ledger change.
        moves: the rows that change their visibility.
        alone: whether the rows of all other jobs are removed, of every instance. Repeated, it changes nothing; rows of `job`
            stay.
    """

    ledger: Ledger
    job: str
    moves: Moves = Moves()
    alone: bool = False


class StagedText(msgspec.Struct, frozen=True):
    """The text of a transaction in a checkpoint, decoded.

    Args:
        sink: the kind of the sink.
        place: where the sink writes to: a table, a topic, a location.
        staged: the transaction.
    """

    sink: str
    place: str
    staged: Staged
    version: int = _TEXT_VERSION


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_TEXTS = msgspec.json.Decoder(StagedText)
_LEDGERS = msgspec.json.Decoder(Ledger)


def encode_ledger(ledger: Ledger) -> bytes:
    """A ledger as JSON."""
    return msgspec.json.encode(ledger)


def decode_ledger(data: bytes | str) -> Ledger:
    """A ledger from JSON. Raises msgspec.DecodeError, for one that a later release has written, too."""
    found = _LEDGERS.decode(data)
    if found.version != _LEDGER_VERSION:
        raise msgspec.ValidationError(f"expected version {_LEDGER_VERSION}, found {found.version}, of a later release")
    return found


def stored_ledger(data: bytes | str, place: str) -> Ledger:
    """A ledger that a target has stored.

    Args:
        data: the ledger as JSON.
        place: the file, row or message, as errors name it.

    Raises:
        SinkPathInUse: it cannot be read; also one that a later release has written.
    """
    try:
        return decode_ledger(data)
    except msgspec.DecodeError as error:
        raise SinkPathInUse(
            f"expected {place} to say what an instance of the sink has committed, found a record that cannot be read: {error}. "
            "Restore it from a backup; or delete it if no checkpoint or savepoint of the job will be restored; or give the sink "
            "another place"
        ) from error


def encode_text(kind: str, place: str, staged: Staged) -> str:
    """The text of a transaction, for a checkpoint."""
    return msgspec.json.encode(StagedText(kind, place, staged)).decode()


def decode_texts(texts: Sequence[str], kind: str, place: str, index: int, sink: str) -> list[Staged]:
    """The transactions of texts, all of them, or an error.

    Args:
        texts: texts of :func:`encode_text`.
        kind: the kind of the sink.
        place: where it writes to.
        index: the instance's index.
        sink: the sink as errors name it.

    Raises:
        UnreadableSinkTransaction: one is not a transaction of this kind of sink, place and instance.
    """
    return [_decoded(text, kind, place, index, sink) for text in texts]


def commit_in(text: str, kind: str, index: int, job: str) -> Commit | None:
    """The commit of a text, if it is one of this kind of sink, this instance and this job.

    Args:
        text: a text of any sink.
        kind: the kind of the sink.
        index: the instance's index.
        job: the job's name.
    """
    try:
        decoded = _TEXTS.decode(text)
    except msgspec.DecodeError:
        return None
    commit = decoded.staged.commit
    return commit if (decoded.sink, commit.index, commit.job) == (kind, index, job) else None


def _decoded(text: str, kind: str, place: str, index: int, sink: str) -> Staged:
    try:
        decoded = _TEXTS.decode(text)
    except msgspec.DecodeError as error:
        raise UnreadableSinkTransaction(
            f"{sink}: expected the text of one of its transactions, found {text!r}: {error}. Did the stage have another kind of "
            "sink, or did an earlier release of dagster-checkpoints run, when the checkpoint was taken? Restore with that, or "
            "start the job without restoring"
        ) from error
    if decoded.sink != kind or decoded.version != _TEXT_VERSION:
        raise UnreadableSinkTransaction(
            f"{sink}: expected the text of one of its transactions, found {text!r}: it is of the kind {decoded.sink!r}, version "
            f"{decoded.version}. Did the stage have another kind of sink when the checkpoint was taken? Restore with that kind "
            "of sink, or start the job without restoring"
        )
    staged = decoded.staged
    if (decoded.place, staged.commit.index) != (place, index) or parse_name(staged.name) is None:
        raise UnreadableSinkTransaction(
            f"{sink}: expected a transaction of instance {index} for {place!r}, found {staged.name!r} of instance "
            f"{staged.commit.index} for {decoded.place!r}: the stage's sink wrote to another place when the checkpoint was "
            "taken. Restore with that place, or start the job without restoring"
        )
    return staged
