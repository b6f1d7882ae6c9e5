"""File operations of sinks and snapshots. All but those that link are durable: the files survive a power cut."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path


def link_or_copy(source: Path, target: Path) -> bool:
    """Create ``target`` with the bytes and the times of ``source``: as a hard link where possible, else as a copy.

    Returns:
        Whether it is a link.

    Raises:
        FileExistsError: There is a file ``target``; it is not touched.
        FileNotFoundError: There is no file ``source``, or no directory of ``target``.
    """
    try:
        os.link(source, target)
        return True
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
        return False


def link_or_new_file(source: Path, target: Path) -> None:
    """As :func:`link_or_copy`, but a copy has times of its own.

    A deleted copy and a later one may have the same inode. With the time of files that were written at the same moment, the later
    copy of another file of that size would be taken for the first one (`storage.state_files.LocalSource.identity`).
    """
    if not link_or_copy(source, target):
        now = time.time_ns()
        os.utime(target, ns=(now, now))


def place(source: Path, target: Path) -> None:
    """Give ``target`` the bytes of ``source``, durably: as a hard link where possible, else as a copy."""
    try:
        link_or_copy(source, target)
    except FileExistsError:
        shutil.copyfile(source, target)
    sync(target)


def place_all(sources: Mapping[str, Path], root: Path) -> None:
    """Create files, durably, with their directories.

    Args:
        sources: by name below `root`, the file with the bytes.
        root: as that of :func:`make_directory`.
    """
    folders = {(root / name).parent for name in sources}
    for folder in folders:
        make_directory(folder, root)
    for name, source in sources.items():
        place(source, root / name)
    for folder in folders:
        sync(folder)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(folder: Path, root: Path) -> None:
    """Create a directory, durably, with those above it.

    Args:
        folder: below `root`, or the root.
        root: a directory of which the parent's name need not be made durable.
    """
    if folder.exists():
        return
    if folder != root:
        make_directory(folder.parent, root)
    folder.mkdir(parents=True, exist_ok=True)
    sync(folder.parent)


def sizes(directory: Path) -> dict[str, int]:
    """The size of each file in a directory, by name."""
    return {file.name: file.stat().st_size for file in directory.iterdir()}
