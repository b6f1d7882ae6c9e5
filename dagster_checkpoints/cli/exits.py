"""Exit codes, and the exit code of each error."""

from __future__ import annotations

from enum import IntEnum

from dagster_checkpoints.control.health import InvalidThresholdError
from dagster_checkpoints.control.pipeline_control import NoRunningPipeline, RequestTimedOut
from dagster_checkpoints.errors import (
    DagsterCheckpointsError,
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
    OUTPUT_FAILED = 7
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


MEANINGS = {
    Exit.DONE: "done",
    Exit.FAILED: "the request failed, or a verification or check found a problem",
    Exit.USAGE: "wrong usage",
    Exit.NOT_RUNNING: "the pipeline is not running",
    Exit.TIMED_OUT: "no final answer in time; the request stays valid",
    Exit.UNREACHABLE: "storage cannot be reached, or whether it carried out a write is unknown",
    Exit.NOT_FOUND: "there is no such pipeline, checkpoint, savepoint or request",
    Exit.OUTPUT_FAILED: "standard output could not be written; a request that was sent stays valid",
    Exit.INTERRUPTED: "interrupted; a request that was sent stays valid",
    Exit.OUTPUT_CLOSED: "the reader of standard output has ended (head, less); a request that was sent stays valid",
}


class NothingThere(DagsterCheckpointsError):
    """A pipeline, checkpoint or file that the user has named does not exist."""


class UsageProblem(DagsterCheckpointsError):
    """The arguments do not fit what the storage or the code holds."""


class OutputFailed(Exception):
    """Standard output cannot be written.

    Args:
        found: the error of the operating system.
    """

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found
        self.done = ""
        """What the command has done, if it changes something."""

    def __str__(self) -> str:
        return f"expected to write the result to standard output, found: {self.found}" + (f". {self.done}" if self.done else "")


class OutputClosed(OutputFailed):
    """The reader of standard output has ended before it has read all, on purpose as a rule: no text says so."""

    def __str__(self) -> str:
        return super().__str__() if self.done else ""


def exit_code(error: BaseException) -> Exit:
    """The exit code of an error that is raised on purpose."""
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return code
    return Exit.FAILED


_CODES: tuple[tuple[tuple[type[BaseException], ...], Exit], ...] = (
    ((KeyboardInterrupt,), Exit.INTERRUPTED),
    ((OutputClosed,), Exit.OUTPUT_CLOSED),
    ((OutputFailed,), Exit.OUTPUT_FAILED),
    ((NoRunningPipeline,), Exit.NOT_RUNNING),
    ((RequestTimedOut,), Exit.TIMED_OUT),
    ((StorageUnavailable, OutcomeUnknown), Exit.UNREACHABLE),
    ((NothingThere, NotFound, UnknownRequest), Exit.NOT_FOUND),
    (
        (UsageProblem, NoStorageError, InvalidStorageUrl, InvalidKey, InvalidRequest, InvalidThresholdError, RequestConflict),
        Exit.USAGE,
    ),
)
