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
from typing import Any

from dagster_checkpoints.pipeline import Stage
from dagster_checkpoints.spark.errors import StageQueryError
from dagster_checkpoints.spark.query.error_location import CodeLine

_GUARDED = "_dagster_checkpoints_guarded"
_current = threading.local()  # `running`: the stage and the instance whose function runs on this thread


@contextmanager
def refusing_queries(stage: Stage, instance: str) -> Iterator[None]:
    """While a function of this stage runs on this thread, starting a streaming query raises StageQueryError."""
    outer = getattr(_current, "running", None)
    _current.running = (stage, instance)
    try:
        yield
    finally:
        _current.running = outer


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
        running: tuple[Stage, str] | None = getattr(_current, "running", None)
        if running is not None:
            stage, instance = running
            raise StageQueryError(
                stage.name,
                instance,
                f"starts a streaming query itself ({_line(stage)}). Checkpoints do not cover such a query: after a restart "
                "its rows would be lost or written twice. The query was not started. Return the DataFrame; write it with "
                "sink=, or handle each micro-batch in process_batch.",
            )
        return method(*args, **options)

    setattr(start, _GUARDED, True)
    return start


def _line(stage: Stage) -> CodeLine:
    frames = [CodeLine(f.filename, f.lineno or 0, f.name) for f in traceback.extract_stack()[:-2]]
    return next((frame for frame in reversed(frames) if frame.file == stage.location.file), frames[-1])
