"""The names of a sink's files below the location of a lake table.

::

    dagster-checkpoints/<pipeline>/<stage>-0/job1-e7.h1-<attempt>/000003/part-000012-0000.parquet    data
    dagster-checkpoints/<pipeline>/<stage>-0/job1-e7.h1-<attempt>/000003/remainders/e7-<random>-of-1.h1-0000.parquet
                                   rows of files that this transaction replaces by key, without the rows that have its keys
    _dagster_checkpoints/<pipeline>/<stage>-0/transactions/1.h1/42-since-0-e7.h1-<attempt>-000003.json
    _dagster_checkpoints/<pipeline>/<stage>-0/attempts/job1-e7.h1-<attempt>

Data files are visible to readers only through the table's metadata. Readers of lake tables, and the programs that delete files
which no table refers to, skip names that begin with ``_``.

Must not know what is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import uuid4

_DATA = "dagster-checkpoints"
_OWN = "_dagster_checkpoints"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_INSTANCE = rf"{_OWN}/(?P<pipeline>{_NAME})/(?P<stage>{_NAME})-(?P<index>\d+)"
_TRANSACTION = re.compile(
    rf"{_INSTANCE}/transactions/(?P<job>\d+(?:\.\w+)?)/"
    rf"(?P<id>\d+)-since-(?P<since>\d+)-(?P<attempt>{_NAME})-(?P<number>\d{{6,}})\.json"
)
_AGAIN = re.compile("/again-[0-9a-f]{12}/")
_JOB = re.compile(r"^job\d+-")
_ATTEMPT = re.compile(r"job(?P<job>\d+)-e(?P<epoch>\d+)(?:\.(?P<history>\w+))?-.*")
_REMAINDER = re.compile(r"e(?P<epoch>\d+)-[0-9a-f]+-of-(?P<job>\d+(?:\.\w+)?|others)-\d+\.parquet")
_DATA_FILE = re.compile(
    rf"{_DATA}/(?P<pipeline>{_NAME})/(?P<stage>{_NAME})-\d+/(?P<attempt>{_NAME})/(?P<number>\d{{6,}})/"
    r"(?:remainders/)?(?P<file>[^/]+)"
)


@dataclass(frozen=True, slots=True)
class InstanceNames:
    """The files of one instance of a stage.

    Args:
        pipeline: the pipeline's name.
        stage: the stage's name.
        index: the instance's index.
    """

    pipeline: str
    stage: str
    index: int

    @property
    def transactions(self) -> str:
        """The folder of the instance's transactions, of all jobs."""
        return f"{self._own}/transactions"

    @property
    def attempts(self) -> str:
        """The folder with an empty file for each attempt that may have left files."""
        return f"{self._own}/attempts"

    def data(self, attempt: str, number: int) -> str:
        """The folder of a transaction's data files.

        Args:
            attempt: the attempt that wrote them, with its job and its owner.
            number: the transaction's number in that attempt, from 0.
        """
        return f"{_DATA}/{self.pipeline}/{self.stage}-{self.index}/{attempt}/{number:06d}"

    def transaction_data(self, file: str) -> str | None:
        """The folder of the transaction that has placed a data file of the instance; None for other files."""
        found = _DATA_FILE.fullmatch(original_name(file))
        folder = self.data(found["attempt"], int(found["number"])) if found is not None else None
        return folder if folder is not None and file.startswith(f"{folder}/") else None

    @property
    def _own(self) -> str:
        return f"{_OWN}/{self.pipeline}/{self.stage}-{self.index}"


@dataclass(frozen=True, slots=True)
class TransactionName:
    """A transaction, as the name of its file says it.

    Args:
        instance: the instance that wrote it.
        job: the job: its number, with the history that counts it.
        checkpoint_id: the checkpoint that it was pre-committed for.
        since: the first checkpoint of the branch that the checkpoint is on; 0 for the job's first branch.
        attempt: the attempt that wrote it, with its job and its owner.
        number: its number in that attempt, from 0.
    """

    instance: InstanceNames
    job: str
    checkpoint_id: int
    since: int
    attempt: str
    number: int

    @property
    def file(self) -> str:
        """The name of its file."""
        name = f"{self.checkpoint_id}-since-{self.since}-{self.attempt}-{self.number:06d}.json"
        return f"{self.instance.transactions}/{self.job}/{name}"

    @property
    def staged(self) -> str:
        """The transaction's name in a checkpoint."""
        return staged_name(self.attempt, self.number)

    @property
    def data(self) -> str:
        """The folder of its data files."""
        return self.instance.data(self.attempt, self.number)

    def remainder(self, epoch: int, token: str, origin: str | None, number: int) -> str:
        """The name of a file with the rows that the transaction leaves of other files.

        Args:
            epoch: the epoch of the owner that writes it.
            token: random letters from a to f and digits.
            origin: the job of this stage that has written the rows; None if another program may have.
            number: the file's number among those of this owner, token and origin, from 0.
        """
        return f"{self.remainders}/e{epoch}-{token}-of-{origin or 'others'}-{number:04d}.parquet"

    @property
    def remainders(self) -> str:
        """The folder of these files."""
        return f"{self.data}/remainders"


def parse_transaction(file: str) -> TransactionName | None:
    """The transaction that a file's name says; None for a file that is not a transaction's."""
    found = _TRANSACTION.fullmatch(file)
    if found is None:
        return None
    return TransactionName(
        InstanceNames(found["pipeline"], found["stage"], int(found["index"])),
        found["job"],
        int(found["id"]),
        int(found["since"]),
        found["attempt"],
        int(found["number"]),
    )


def staged_name(attempt: str, number: int) -> str:
    """The name in a checkpoint of the transaction with this number of an attempt, as :class:`StagedName` has it."""
    return f"{_JOB.sub('', attempt)}-{number:06d}"


def attempt_and_number(staged: str, job: str) -> tuple[str, int]:
    """The attempt of a job's transaction, with its job and owner, and the transaction's number; see :func:`staged_name`."""
    attempt, _, number = staged.rpartition("-")
    return f"job{job.partition('.')[0]}-{attempt}", int(number)


def renewed_name(file: str) -> str:
    """A new name for a data file that was removed from the table and is added to it again."""
    folder, _, name = original_name(file).rpartition("/")
    return f"{folder}/again-{uuid4().hex[:12]}/{name}"


def original_name(file: str) -> str:
    """The name that a data file had first, before :func:`renewed_name`."""
    return _AGAIN.sub("/", file)


def pipeline_folder(pipeline: str) -> str:
    """The folder with the sink's own files of all stages of a pipeline."""
    return f"{_OWN}/{pipeline}"


def transactions_in(files: Iterable[str]) -> list[TransactionName]:
    """The transactions among files."""
    return [name for file in files if (name := parse_transaction(file)) is not None]


def owner_epoch(attempt: str) -> int:
    """The epoch of the owner that an attempt's name says."""
    found = _ATTEMPT.fullmatch(attempt)
    return int(found["epoch"]) if found else 0


def remainder_epoch(file: str) -> int | None:
    """The epoch of the owner that wrote a file of remaining rows; None for other files."""
    found = _REMAINDER.fullmatch(file.rpartition("/")[2])
    return None if found is None else int(found["epoch"])


def origin_of(file: str, pipeline: str, stage: str) -> str | None:
    """The job of a stage that has written the rows of a data file; None if another stage or program may have written some.

    Args:
        file: the file's name.
        pipeline: the pipeline's name.
        stage: the stage's name.
    """
    found = _DATA_FILE.fullmatch(original_name(file))
    if found is None or (found["pipeline"], found["stage"]) != (pipeline, stage):
        return None
    remainder = _REMAINDER.fullmatch(found["file"])
    if remainder is not None:
        return None if remainder["job"] == "others" else remainder["job"]
    attempt = _ATTEMPT.fullmatch(found["attempt"])
    if attempt is None:
        return None
    return f"{attempt['job']}.{attempt['history']}" if attempt["history"] else attempt["job"]
