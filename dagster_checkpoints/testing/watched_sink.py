"""A sink whose calls are counted event by event, and at one of these events the process kills itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dagster_checkpoints.sinks import TwoPhaseCommitSink

_EFFECTS = (
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.",
    "sqlite3.",
)
"""Beginnings of the names of audit events (https://docs.python.org/3/library/audit_events.html)."""


class CallEvents:
    """Counts events within a sink's calls: a function is called or returns (Python's profiler), a file changes (its audit).

    Args:
        kill_at: the number of the event at which SIGKILL ends the process, from 1; None to count only.

    Attributes:
        count: number of events so far.
        calls: the method of each call to the sink, and the numbers of its first and last event.
        effects: for each place in the code that is about to change something outside the process, its events. A kill at such
            an event comes between the change before it and this one.
    """

    def __init__(self, kill_at: int | None = None) -> None:
        self.count = 0
        self.calls: list[tuple[str, int, int]] = []
        self.effects: dict[tuple[str, ...], list[int]] = {}
        self._kill_at = kill_at
        self._method: str | None = None
        sys.addaudithook(self._audit)

    @contextmanager
    def within(self, method: str) -> Iterator[None]:
        """Count the events of this block, a call of the method."""
        self._event()
        first = self.count
        self._method, self._thread = method, threading.get_ident()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._method = None
            self._event()
            self.calls.append((method, first, self.count))

    def _profile(self, _frame: FrameType, _event: str, _argument: Any) -> None:
        self._event()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._method is None or self._thread != threading.get_ident() or not event.startswith(_EFFECTS):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        self.effects.setdefault((self._method, event, *_callers(sys._getframe(1))), []).append(self.count + 1)
        self._event()

    def _event(self) -> None:
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def _callers(frame: FrameType | None) -> Iterator[str]:
    while frame is not None and frame.f_globals["__name__"] != __name__:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def _counted(method: str) -> Any:
    def counted(self: WatchedSink, *arguments: Any, **named: Any) -> Any:
        call = getattr(self._sink, method)  # outside: the look-up is no event of the sink
        with self._events.within(method):
            return call(*arguments, **named)

    return counted


class WatchedSink(TwoPhaseCommitSink):
    """Hands every call on to another sink.

    Args:
        sink: the sink.
        events: counts the events within the calls.
    """

    def __init__(self, sink: TwoPhaseCommitSink, events: CallEvents) -> None:
        self._sink = sink
        self._events = events

    open = _counted("open")
    write = _counted("write")
    finish = _counted("finish")
    pre_commit = _counted("pre_commit")
    commit = _counted("commit")
    abort = _counted("abort")
    transaction_files = _counted("transaction_files")
    restore_transaction = _counted("restore_transaction")
    recover = _counted("recover")
    start_new = _counted("start_new")
    close = _counted("close")
