"""Refuses streaming queries that a stage starts itself; only tasks start queries.

Spark offers no hook for this, so `DataStreamWriter.start` and `toTable` are wrapped once in this process. The wrappers raise
on a thread that is inside a stage's function, and otherwise call the wrapped method.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.errors import StageQueryError
from dagster_checkpoints.spark.query.error_location import CodeLine

if TYPE_CHECKING:
    from dagster_checkpoints.spark.query.stage_calls import StageCall

_GUARDED = "_dagster_checkpoints_guarded"
_current = threading.local()  # `call`: the stage whose function runs on this thread


@contextmanager
def refusing_queries(call: StageCall) -> Iterator[None]:
    """While a function of this stage runs on this thread, starting a streaming query raises StageQueryError."""
    outer = getattr(_current, "call", None)
    _current.call = call
    try:
        yield
    finally:
        _current.call = outer


def guard_queries() -> None:
    """Install the wrappers in this process, so that :func:`refusing_queries` works. Idempotent."""
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    for name in ("start", "toTable"):
        method = getattr(DataStreamWriter, name)
        if not hasattr(method, _GUARDED):
            setattr(DataStreamWriter, name, _guarded(method))


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def start(*args: Any, **options: Any) -> Any:
        call: StageCall | None = getattr(_current, "call", None)
        if call is not None:
            raise StageQueryError(
                call.stage.name,
                call.context.instance,
                f"starts a streaming query itself ({_line(call)}). Checkpoints do not cover such a query: after a restart "
                "its rows would be lost or written twice. The query was not started. Return the DataFrame; write it with "
                "sink=, or handle each micro-batch in process_batch.",
            )
        return method(*args, **options)

    setattr(start, _GUARDED, True)
    return start


def _line(call: StageCall) -> CodeLine:
    frames = [CodeLine(f.filename, f.lineno or 0, f.name) for f in traceback.extract_stack()[:-2]]
    return next((frame for frame in reversed(frames) if frame.file == call.stage.location.file), frames[-1])
