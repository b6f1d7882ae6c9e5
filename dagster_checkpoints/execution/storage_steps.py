"""Procedures on storage as steps: generators that yield requests and are sent the answers.

A procedure decides what is asked for, in which order, and what each outcome means; its driver performs the requests: the storage
floor on real storage, the simulator on its world. A request that fails is answered by raising one of the
:mod:`storage_errors` at the `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from dagster_checkpoints.execution.pipeline_state import PipelineState

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""Yields requests, is sent their answers, and returns the result of the procedure."""
StateVersion = str | int
"""Which version of ``state.json`` is meant: an etag of the store; only ever compared for equality."""


class ReadState(msgspec.Struct, frozen=True):
    """Read ``state.json``.

    Answer: a :class:`StoredState`, or None if there is no such file.
    Errors: StorageUnavailable; whatever the storage floor raises for a file that it cannot read.
    """


class ReplaceState(msgspec.Struct, frozen=True):
    """Replace ``state.json`` if it is still the version expected.

    Answer: the new version.
    Errors: Precondition, StorageUnavailable, WriteConflict, OutcomeUnknown.

    Attributes:
        expected: the version that is replaced.
        state: the new content.
    """

    expected: StateVersion
    state: PipelineState


class CreateState(msgspec.Struct, frozen=True):
    """Create ``state.json``.

    Answer: its version.
    Errors: AlreadyExists, StorageUnavailable, WriteConflict, OutcomeUnknown.

    Attributes:
        state: the content.
    """

    state: PipelineState


class StoredState(msgspec.Struct, frozen=True):
    """A content of ``state.json`` that was read, and its version."""

    state: PipelineState
    version: StateVersion


class StatePlace(msgspec.Struct, frozen=True):
    """Where the ``state.json`` of a pipeline is, for the text of errors.

    Attributes:
        pipeline: its name.
        root: URL of the storage that it is in.
        url: of the file.
    """

    pipeline: str
    root: str
    url: str


class DriverValues(msgspec.Struct, frozen=True):
    """Values that only a driver has: times and random tokens.

    Attributes:
        elapsed: seconds by a clock of this process that never goes back; to be compared with each other alone.
        wall: wall-clock time in UTC, for people.
        new_token: a text that no other call has returned, on any machine.
    """

    elapsed: Callable[[], float]
    wall: Callable[[], datetime]
    new_token: Callable[[], str]


def drive(steps: Steps[T], perform: Callable[[Any], Any]) -> T:
    """Run a procedure to its end.

    Args:
        steps: the procedure.
        perform: performs one request: returns the answer, or raises, which the procedure then sees at its `yield`.

    Returns:
        The result of the procedure.
    """
    try:
        request = next(steps)
        while True:
            try:
                answer = perform(request)
            except Exception as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
