"""The work directory: its allowed values, when it must be set, and one directory below it for each attempt.

Records between stages and Spark's own files are stored in it. The driver and every executor write and read them, so
all of them must see the same directory under the same path; `executor_check` checks that at start. Must not know Spark.
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
    """The setting for the work directory has a value that is not supported, or is missing where it is required."""


class WorkDirectoryNotSharedError(DagsterCheckpointsError):
    """An executor sees another directory under the path of the work directory, or none."""


def parse_work_directory(text: str) -> Path:
    """The directory in a user's setting: a path, `~` for the home directory, or a `file:///` URL.

    Raises:
        WorkDirectoryError: The text is empty, or a URL of another kind.
    """
    found = f"expected work_directory to be a path or a URL such as file:///shared/work, found {text!r}"
    scheme = url_scheme(text)
    if not text.strip():
        raise WorkDirectoryError(f"{found}: it is empty. Leave the setting out to use the directory for temporary files")
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


class WorkDirectory:
    """The work directory of one pipeline, with one directory below it for each attempt.

    Args:
        path: The pipeline's work directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, epoch: int, attempt: int) -> Path:
        """Create a new directory for an attempt; remove those of earlier attempts of this owner."""
        self.clear(epoch, own=True)
        folder = self._path / f"epoch-{epoch}-attempt-{attempt}"
        folder.mkdir(parents=True)
        return folder

    def proof(self, epoch: int) -> Path:
        """Create a new directory for the check of the executors; :meth:`clear` removes it."""
        self.clear(epoch, own=True)
        folder = self._path / f"epoch-{epoch}-proof"
        folder.mkdir(parents=True)
        return folder

    def clear(self, epoch: int, *, own: bool) -> None:
        """Remove directories in the work directory, never those of a later owner.

        Args:
            epoch: Epoch of this owner.
            own: True removes this owner's directories, False those of earlier owners.
        """
        for folder in self._path.glob("epoch-*"):
            folder_epoch = int(folder.name.split("-")[1])
            if folder_epoch == epoch if own else folder_epoch < epoch:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._path.rmdir()
