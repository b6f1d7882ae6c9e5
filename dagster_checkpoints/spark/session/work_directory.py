"""The work directory: its allowed values, when it must be set, and one directory below it for each attempt.

Records between stages and Spark's own files are stored in it. The driver and every executor write and read them, so
all of them must see the same directory under the same path or URL; `work_directory_check` checks that at start.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.files.urls import file_url_rule, local_path, url_scheme
from dagster_checkpoints.spark.files.hadoop_path import HadoopFileSystem, HadoopPath
from dagster_checkpoints.spark.files.work_path import WorkFolder, WorkPath, entries_of, remove_if_empty, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://[^/]*/.*[^/].*", re.IGNORECASE)
_OTHER_NAMES = {"s3": "s3a", "s3n": "s3a", "gcs": "gs"}

SHARED_REMEDY = (
    "Set work_directory= of CheckpointCoordinatorResource to a directory that the driver and every executor see under the same "
    "path (NFS, a shared volume) or URL (hdfs://, s3a://, gs://, abfss://)"
)


class WorkDirectoryError(DagsterCheckpointsError):
    """The setting for the work directory has a value that is not supported, or is missing; or the directory cannot be used."""


class WorkDirectoryNotSharedError(DagsterCheckpointsError):
    """An executor sees another directory under the path of the work directory, or none."""


@dataclass(frozen=True)
class RemoteDirectory:
    """A directory on a file system that only Spark's Hadoop client reaches.

    Attributes:
        url: The URL, such as `hdfs://namenode:8020/work`, without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, part: str, /) -> RemoteDirectory:
        return RemoteDirectory(f"{self.url}/{part}")

    def open(self, spark: SparkSession) -> HadoopPath:
        """The directory, as the driver's JVM reaches it.

        Raises:
            WorkDirectoryError: Hadoop's client cannot use the URL.
        """
        try:
            return HadoopFileSystem(spark, self.url).qualified(self.url)
        except OSError as error:
            raise WorkDirectoryError(
                f"expected work_directory {self.url} to be on a file system that Spark's Hadoop client reaches, found: {error}. "
                "Add the file system's jar to the session (for s3a://: hadoop-aws of Spark's Hadoop version, in "
                "spark.jars.packages of the resource's spark_config), and its settings (spark.hadoop.*)"
            ) from error


def parse_work_directory(text: str) -> Path | RemoteDirectory:
    """The directory in a user's setting: a path, `~` for the home directory, a `file:///` URL, or a URL of Hadoop's.

    Raises:
        WorkDirectoryError: The text is empty, or a URL of another kind.
    """
    found = f"expected work_directory to be a path or a URL such as file:///shared/work or hdfs://host:8020/work, found {text!r}"
    scheme = url_scheme(text)
    if not text.strip():
        raise WorkDirectoryError(f"{found}: it is empty. Leave the setting out to use the directory for temporary files")
    if scheme == "file":
        path = local_path(text)
        if path is None:
            raise WorkDirectoryError(f"{found}: {file_url_rule(text)}")
        return path
    if scheme in _OTHER_NAMES:
        raise WorkDirectoryError(f"{found}: Spark's Hadoop client knows {scheme}:// under the name {_OTHER_NAMES[scheme]}://")
    if scheme is not None:
        if not _REMOTE.fullmatch(text):
            raise WorkDirectoryError(f"{found}: a URL has two slashes after {scheme}:, and a path that is not empty")
        return RemoteDirectory(text.rstrip("/"))
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise WorkDirectoryError(f"{found}: {error}") from None


def is_local(master: str) -> bool:
    """Whether Spark's executor is the driver's own process."""
    return master == "local" or master.startswith("local[")


def check_work_directory_named(master: str, *, named: bool) -> None:
    """Check that a work directory is set if executors run on other machines: the default is on the driver's machine alone.

    Args:
        master: Spark's master URL. `local-cluster[...]`, whose executors are processes of this machine, counts as local.
        named: Whether the user has set a work directory.

    Raises:
        WorkDirectoryError: The user has to set one.
    """
    if named or master.startswith("local"):
        return
    raise WorkDirectoryError(
        f"expected work_directory to be set, since Spark's master is {master}: executors on other machines do not see this "
        f"machine's directory for temporary files, which is the default. {SHARED_REMEDY}"
    )


def unusable_directory(directory: WorkDirectory, error: OSError) -> WorkDirectoryError:
    """The error of a run whose tasks cannot be built in the work directory, with the remedy."""
    found = WorkDirectoryError(
        f"expected to create the files of the stages' queries in the work directory {directory}, found: {error}. Check that it "
        "is a directory that may be written, that its disk is not full, and that no other program deletes its files; or choose "
        "another work_directory. Nothing is lost: what no checkpoint has committed is read again"
    )
    found.__cause__ = error
    return found


class WorkDirectory:
    """The work directory of one pipeline, with one directory below it for each attempt.

    Args:
        place: The pipeline's work directory.
        scratch: The directory of this machine for links and copies, if the work directory is elsewhere.
        history: The id of the pipeline's `state.json`. Directories of other ids are left alone: two machines may each have a
            storage under one path, with pipelines of one name, and share the work directory.
    """

    def __init__(self, place: Path | RemoteDirectory, scratch: Path, history: str) -> None:
        self._history = history
        self._place = place
        self._work: WorkPath | None = place if isinstance(place, Path) else None
        self._scratch = place if isinstance(place, Path) else scratch

    @property
    def is_remote(self) -> bool:
        """Whether only Spark's Hadoop client reaches the directory."""
        return isinstance(self._place, RemoteDirectory)

    def __str__(self) -> str:
        return str(self._work or self._place)

    def open(self, spark: SparkSession) -> None:
        """Connect with the directory's file system; before that, only directories of this machine are removed.

        Raises:
            WorkDirectoryError: See :meth:`RemoteDirectory.open`.
        """
        if isinstance(self._place, RemoteDirectory):
            self._work = self._place.open(spark)

    def create(self, epoch: int, attempt: int, in_use: Collection[int] = ()) -> WorkFolder:
        """Create new directories for an attempt; remove those of earlier attempts of this owner.

        Args:
            epoch: Epoch of this owner.
            attempt: The attempt's number within the run.
            in_use: Earlier attempts of which tasks still run.

        Raises:
            OSError: They cannot be created.
        """
        self.clear(epoch, own=True, kept=[self._name(epoch, earlier) for earlier in in_use])
        assert self._work is not None
        name = self._name(epoch, attempt)
        folder = WorkFolder(self._work / name, self._scratch / name)
        folder.work.mkdir(parents=True)
        if self.is_remote:
            folder.scratch.mkdir(parents=True, exist_ok=True)
        return folder

    def proof(self, epoch: int) -> WorkPath:
        """Create a new directory for the check of the executors; :meth:`clear` removes it.

        Raises:
            OSError: It cannot be created.
        """
        self.clear(epoch, own=True)
        assert self._work is not None
        folder = self._work / f"{self._history}-epoch-{epoch}-proof"
        folder.mkdir(parents=True)
        return folder

    def clear(self, epoch: int, *, own: bool, kept: Collection[str] = ()) -> None:
        """Remove directories in the work directory, never those of a later owner.

        Args:
            epoch: Epoch of this owner.
            own: True removes this owner's directories, False those of earlier owners.
            kept: Names of directories that stay.
        """
        self._clear(self._scratch, epoch, own, kept)
        if self.is_remote and self._work is not None:
            self._clear(self._work, epoch, own, kept)

    def _name(self, epoch: int, attempt: int) -> str:
        return f"{self._history}-epoch-{epoch}-attempt-{attempt}"

    def _clear(self, place: WorkPath, epoch: int, own: bool, kept: Collection[str]) -> None:
        with contextlib.suppress(OSError):  # what stays is removed by the next run
            for folder in entries_of(place):
                number = re.match(rf"{re.escape(self._history)}-epoch-(\d+)-", folder.name) if folder.name not in kept else None
                if number is not None and (int(number[1]) == epoch if own else int(number[1]) < epoch):
                    remove_tree(folder)
        remove_if_empty(place)
