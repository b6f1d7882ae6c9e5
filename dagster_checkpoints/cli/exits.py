"""Exit codes, and the exit code of each error."""

from __future__ import annotations

from enum import IntEnum

from dagster_checkpoints.control import NoRunningPipeline, RequestTimedOut
from dagster_checkpoints.control.health import InvalidThresholdError
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.storage import (
    InvalidKey,
    InvalidRequest,
    InvalidStorageUrl,
    NotFound,
    OutcomeUnknown,
    RequestConflict,
    StorageUnavailable,
    UnknownRequest,
)
from dagster_checkpoints.storage.root import NoStorageError


class Exit(IntEnum):
    """The exit codes of the command line; part of its interface."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    TIMED_OUT = 4
    UNREACHABLE = 5
    NOT_FOUND = 6
    INTERRUPTED = 130


MEANINGS = {
    Exit.DONE: "done",
    Exit.FAILED: "the request failed, or a verification or check found a problem",
    Exit.USAGE: "wrong usage",
    Exit.NOT_RUNNING: "the pipeline is not running",
    Exit.TIMED_OUT: "no final answer in time; the request stays valid",
    Exit.UNREACHABLE: "storage cannot be reached, or whether it carried out a write is unknown",
    Exit.NOT_FOUND: "there is no such pipeline, checkpoint, savepoint or request",
    Exit.INTERRUPTED: "interrupted; a request that was sent stays valid",
}


class NothingThere(DagsterCheckpointsError):
    """A pipeline, checkpoint or file that the user has named does not exist."""


class UsageProblem(DagsterCheckpointsError):
    """The arguments do not fit what the storage or the code holds."""


def exit_code(error: BaseException) -> Exit:
    """The exit code of an error that is raised on purpose."""
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return code
    return Exit.FAILED


_CODES: tuple[tuple[tuple[type[BaseException], ...], Exit], ...] = (
    ((KeyboardInterrupt,), Exit.INTERRUPTED),
    ((NoRunningPipeline,), Exit.NOT_RUNNING),
    ((RequestTimedOut,), Exit.TIMED_OUT),
    ((StorageUnavailable, OutcomeUnknown), Exit.UNREACHABLE),
    ((NothingThere, NotFound, UnknownRequest), Exit.NOT_FOUND),
    (
        (UsageProblem, NoStorageError, InvalidStorageUrl, InvalidKey, InvalidRequest, InvalidThresholdError, RequestConflict),
        Exit.USAGE,
    ),
)
