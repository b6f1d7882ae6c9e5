"""A directory of an attempt or a task: in the work directory, and on the driver's machine for links and copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dagster_checkpoints.spark.files.work_path import WorkPath, remove_tree


@dataclass(frozen=True)
class WorkFolder:
    """A directory of an attempt or a task.

    Attributes:
        work: The directory that the driver and all executors see.
        scratch: A directory of the driver's machine; the same one if the work directory is on a file system of this machine, so
            that files can be linked and moved.
    """

    work: WorkPath
    scratch: Path

    def __truediv__(self, part: str, /) -> WorkFolder:
        return WorkFolder(self.work / part, self.scratch / part)

    def remove(self) -> None:
        """Remove the directory with all that is in it, at both places; what cannot be removed stays."""
        remove_tree(self.work)
        remove_tree(self.scratch)
