"""Procedures on storage as steps: generators that yield requests and are sent the answers.

A procedure decides which requests are made, in which order, and what each outcome means; its driver performs the requests: the
storage floor on real storage, the simulator in its world. A request that fails is answered by raising one of the
errors of storage (:mod:`dagster_checkpoints.errors`) at the `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from dagster_checkpoints.execution.pipeline_state import PipelineState

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""A generator that yields requests, is sent their answers, and returns the result of the procedure."""
StateVersion = str | int
"""A version of ``state.json``: an etag of the store, which is only compared for equality."""


class ReadState(msgspec.Struct, frozen=True):
    """Read ``state.json``.

    Answer: a :class:`StoredState`, or None if there is no such file.
    Errors: StorageUnavailable; the errors of the storage floor for a file that it cannot decode.
    """


class ReplaceState(msgspec.Struct, frozen=True):
    """Replace ``state.json`` if it still has the expected version.

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
    """The content of ``state.json`` as it was read or written, and its version."""

    state: PipelineState
    version: StateVersion


class StatePlace(msgspec.Struct, frozen=True):
    """The location of a pipeline's ``state.json``, for the text of errors.

    Attributes:
        pipeline: name of the pipeline.
        root: URL of the checkpoint storage.
        url: URL of the file.
    """

    pipeline: str
    root: str
    url: str


class DriverValues(msgspec.Struct, frozen=True):
    """Values that only a driver has: times and random tokens.

    Attributes:
        elapsed: returns seconds by a clock of this process that never goes back; only compared with each other.
        wall: returns the wall-clock time in UTC, for people.
        new_token: returns a text that no other call has returned, on any machine.
    """

    elapsed: Callable[[], float]
    wall: Callable[[], datetime]
    new_token: Callable[[], str]


def drive(steps: Steps[T], perform: Callable[[Any], Any]) -> T:
    """Run a procedure to its end.

    Args:
        steps: the procedure.
        perform: performs one request: returns the answer, or raises an error, which the procedure gets at its `yield`.

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
