"""The work directory: what may be said of it, and when it must be said; and one directory below it for each attempt.

Records between stages and Spark's own files are stored there. The driver writes and reads them and so does every executor, so
all of them must see the same directory under the same path. It must not know Spark; `executor_check` proves it at start.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.storage.urls import local_path, url_scheme

SHARED_REMEDY = (
    "Set work_directory= of CheckpointCoordinatorResource to a directory that the driver and every executor see under the same "
    "path (NFS, a shared volume)"
)


class WorkDirectoryError(DagsterCheckpointsError):
    """The work directory is named in a way that is not supported, or not named where it has to be."""


class WorkDirectoryNotSharedError(DagsterCheckpointsError):
    """An executor sees another directory under the path of the work directory, or none."""


def parse_work_directory(text: str) -> Path:
    """The directory that a user has named: a path, `~` for the home directory, or a `file:///` URL.

    Raises:
        WorkDirectoryError: It is empty, or a URL of another kind.
    """
    found = f"expected work_directory to be a path or a URL such as file:///shared/work, found {text!r}"
    scheme = url_scheme(text)
    if not text.strip():
        raise WorkDirectoryError(f"{found}: it is empty. Leave it out for a directory for temporary files")
    if scheme == "file":
        path = local_path(text)
        if path is None:
            raise WorkDirectoryError(f"{found}: a file URL has three slashes and an absolute path")
        return path
    if scheme is not None:
        raise WorkDirectoryError(
            f"{found}: {scheme}: is not supported. Spark and Python both work on these files, through the operating system. Name "
            "a directory that is mounted on the driver and on every executor under the same path (NFS, a shared volume); "
            "checkpoints themselves may be stored elsewhere, see storage="
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise WorkDirectoryError(f"{found}: {error}") from None


def is_local(master: str) -> bool:
    """Whether Spark's executor is the driver's own process."""
    return master == "local" or master.startswith("local[")


def check_work_directory_named(master: str, *, named: bool) -> None:
    """The default is a directory of the driver's machine alone: with executors on others it will not do.

    Args:
        master: Spark's master URL. `local-cluster[...]`, whose executors are processes of this machine, counts as local here.
        named: Whether the user has named a work directory.

    Raises:
        WorkDirectoryError: The user has to.
    """
    if named or master.startswith("local"):
        return
    raise WorkDirectoryError(
        f"expected work_directory to be set, since Spark's master is {master}: executors on other machines do not see this "
        f"machine's directory for temporary files, which is the default. {SHARED_REMEDY}"
    )


class WorkDirectory:
    """The directory in which a pipeline's runs work, one below it for each attempt.

    Args:
        path: Of the pipeline.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, epoch: int, attempt: int) -> Path:
        """A new directory for an attempt; those of earlier attempts of this owner are removed."""
        self.clear(epoch, own=True)
        folder = self._path / f"epoch-{epoch}-attempt-{attempt}"
        folder.mkdir(parents=True)
        return folder

    def proof(self, epoch: int) -> Path:
        """A new directory in which executors prove that they see what the driver sees; :meth:`clear` removes it."""
        self.clear(epoch, own=True)
        folder = self._path / f"epoch-{epoch}-proof"
        folder.mkdir(parents=True)
        return folder

    def clear(self, epoch: int, *, own: bool) -> None:
        """Remove this owner's directories, or those of the dead: never those of a later owner."""
        for folder in self._path.glob("epoch-*"):
            found = int(folder.name.split("-")[1])
            if found == epoch if own else found < epoch:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._path.rmdir()
