"""Calls that may hang, such as to storage, kept within a time.

A thread cannot be ended from outside: what is late goes on in the background, so only what may be done twice belongs here. It
must not know what is called.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dagster_checkpoints.errors import DagsterCheckpointsError

Result = TypeVar("Result")


class TimeLimitExceeded(DagsterCheckpointsError):
    """Something has not answered within the time that it was granted."""


class TimeLimit:
    """So many seconds for everything that is done under it, from now on.

    Args:
        seconds: For all of it together.
        of: What may hang, for the text of errors.
        monotonic: Clock, seconds.
    """

    def __init__(self, seconds: float, of: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._of = of
        self._monotonic = monotonic
        self._until = monotonic() + seconds

    def do(self, what: Callable[[], Result]) -> Result:
        """Call something on a thread of its own and wait for it, interruptibly.

        Raises:
            TimeLimitExceeded: The time is up.
        """
        answers: queue.Queue[Callable[[], Result]] = queue.Queue()

        def work() -> None:
            try:
                result = what()
            except Exception as error:
                answers.put(_raising(error))
            else:
                answers.put(lambda: result)

        threading.Thread(target=work, name=f"time limit for {self._of}", daemon=True).start()
        try:
            answer = answers.get(timeout=max(self._until - self._monotonic(), 0.001))
        except queue.Empty:
            raise TimeLimitExceeded(f"expected {self._of} to answer within {self._seconds:g} s, found that it did not.") from None
        return answer()


def _raising(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
