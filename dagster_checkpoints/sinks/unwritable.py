"""Places that a sink cannot write to: what an error of the operating system means, and a trial that leaves nothing behind.

The one place that decides whether another attempt may succeed. Must not know which sink it is.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dagster_checkpoints.errors import BucketMissing, ConditionalWritesUnsupported, InvalidKey, StorageAccessDenied
from dagster_checkpoints.systems.errors import InvalidSinkPath, SinkError, SinkUnavailable

# What another attempt meets again, with what the user does about it.
_PERMANENT = {
    errno.EACCES: "Give {user} the right to write there, or choose another place",
    errno.EPERM: "Give {user} the right to write there, or choose another place",
    errno.EROFS: "The file system is mounted read-only: mount it writable, or choose another place",
    errno.ENOTDIR: "A part of the path is a file, not a directory: choose another place, or move that file away",
    errno.EEXIST: "There is a file, or a broken link, where a directory is needed: choose another place, or move it away",
    errno.EISDIR: "There is a directory where a file is needed: choose another place, or move it away",
    errno.ENAMETOOLONG: "A file system has names of at most 255 bytes, most paths at most 4096: choose a shorter place",
    errno.ELOOP: "Symbolic links of the path lead in a circle: correct them, or choose another place",
}
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# A catalog in a SQLite file. Source: https://www.sqlite.org/rescode.html
_SQLITE = {
    "SQLITE_READONLY": errno.EROFS,
    "SQLITE_PERM": errno.EACCES,
    "SQLITE_CANTOPEN": errno.ENOENT,
    "SQLITE_FULL": errno.ENOSPC,
}
_NUMBER = re.compile(r"(?:os error |Os \{ code: |[Ee]rrno:? ?)(\d+)")
_DENIED = re.compile(r"access.?denied|InvalidAccessKeyId|SignatureDoesNotMatch|status 403|NO_?SUCH_?BUCKET", re.IGNORECASE)
_REFUSED = (StorageAccessDenied, BucketMissing, ConditionalWritesUnsupported, InvalidKey)
_EXPIRED = re.compile(r"expired", re.IGNORECASE)


def place_error(error: BaseException, sink: str, place: object, found: str = "") -> SinkError | None:
    """The sink's error for one of the file system below its place, or of the store that holds the place.

    Args:
        error: an OSError, or an error that has one as a cause or in its text, as libraries raise it.
        sink: the sink as errors name it.
        place: the path or the URL that the sink writes to.
        found: the error's text without credentials; empty if it has none.

    Returns:
        An error that repeats if another attempt would meet the same; None if it is not known what the error means.
    """
    number, found = _number(error), found or _found(error)
    if number == errno.ENOENT and not isinstance(error, OSError):  # a catalog: a file that an OSError misses may appear
        return InvalidSinkPath(
            f"{sink}: expected to open the database at {place}, found: {found}. Create its directory, or give {_user()} the "
            "right to write there; then start the run again"
        )
    if number in _PERMANENT:
        remedy = _PERMANENT[number].format(user=_user())
        return InvalidSinkPath(f"{sink}: expected to write to {place}, found: {found}. {remedy}; then start the run again")
    if number in _FULL:
        return SinkUnavailable(
            f"{sink}: expected to write to {place}, found: {found}{_space(place)}. Free space there, or enlarge the file system "
            "or the quota. Nothing is lost: the job continues from its latest checkpoint, and another attempt may succeed"
        )
    denied = isinstance(error, _REFUSED) or _DENIED.search(str(error))
    if denied and not _EXPIRED.search(str(error)):
        if isinstance(error, _REFUSED):  # storage says the remedy
            return InvalidSinkPath(f"{sink}: {error}; then start the run again")
        return InvalidSinkPath(
            f"{sink}: expected to write to {place}, found: {found}. Correct the place, the credentials or their rights; then "
            "start the run again"
        )
    return None


@contextmanager
def reaching(sink: str, place: object) -> Iterator[None]:
    """Turn errors of the file system in the block into the sink's, as far as it is known what they mean.

    Args:
        sink: the sink as errors name it.
        place: the path or the URL that the sink writes to; errors of files elsewhere are not the sink's.
    """
    try:
        yield
    except OSError as error:
        known = place_error(error, sink, place) if _concerns(error, place) else None
        if known is None:
            raise
        raise known from error


def try_directory(directory: Path, sink: str) -> None:
    """Refuse a directory in which no file can be written, or below which it cannot be created; changes nothing that is seen.

    Args:
        directory: the directory, which need not exist: then the nearest one above it is tried.
        sink: the sink as errors name it.

    Raises:
        InvalidSinkPath: the directory cannot be written.
        SinkUnavailable: its file system is full, or fails in another way.
    """
    nearest = directory
    try:
        while not nearest.exists():  # raises what a run would meet, for example for a name that is too long
            if nearest.is_symlink():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(nearest))
            nearest = nearest.parent
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
        with tempfile.TemporaryFile(dir=nearest, prefix=".dagster-checkpoints-check-") as file:  # without a name, where possible
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        found = _found(OSError(error.errno, error.strerror, str(nearest)))  # not the name of the trial's file
        raise place_error(error, sink, directory, found) or SinkUnavailable(
            f"{sink}: expected to write to {directory}, found: {found}. Check that its file system is mounted, and that "
            "files can be created there; another attempt may succeed"
        ) from error


def _number(error: BaseException) -> int | None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno
        database = str(getattr(getattr(cause, "orig", None), "sqlite_errorname", ""))
        for name, number in _SQLITE.items():
            if database.startswith(name):
                return number
        cause = cause.__cause__
    named = _NUMBER.search(str(error))
    return int(named[1]) if named is not None else None


def _found(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _concerns(error: OSError, place: object) -> bool:
    """Whether the error is about the place: about a path in it or above it, or about no path."""
    if not isinstance(error.filename, str | bytes) or not isinstance(place, Path):
        return True
    path = Path(os.fsdecode(error.filename))
    return path.is_relative_to(place) or place.is_relative_to(path)


def _user() -> str:
    with suppress(KeyError, OSError):
        return f"the user {getpass.getuser()!r} of the run"
    return f"the user {os.getuid()} of the run"


def _space(place: object) -> str:
    """How much space the file system of a directory has; empty for other places."""
    if not isinstance(place, Path):
        return ""
    with suppress(OSError):
        nearest = next(path for path in (place, *place.parents) if path.exists())
        usage = shutil.disk_usage(nearest)
        return f"; {usage.free / 1e6:,.0f} MB of {usage.total / 1e6:,.0f} MB are free"
    return ""
