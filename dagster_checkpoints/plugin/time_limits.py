"""Time limits for calls that may hang, such as calls to storage.

A thread cannot be stopped from outside: a call that exceeds its limit continues in the background, so only calls that may be
repeated can have a limit. While many of them continue, as at a file system that does not answer, no further one is begun. This
module must not know the calls.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dagster_checkpoints.errors import DagsterCheckpointsError

Returned = TypeVar("Returned")


MOST_UNANSWERED = 200
"""Number of calls of one system that have not returned, in this process, from which no further one is begun."""


class TimeLimitExceeded(DagsterCheckpointsError):
    """A call has not returned within its time limit."""


class TimeLimit:
    """A time limit for several calls together, which starts when it is created.

    Args:
        seconds: Longest time for all calls together.
        of: Name of the called system, for errors.
        monotonic: Monotonic clock, in seconds.
    """

    def __init__(self, seconds: float, of: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._of = of
        self._monotonic = monotonic
        self._until = monotonic() + seconds

    def do(self, call: Callable[[], Returned]) -> Returned:
        """Call a function on its own thread and wait for its result; the wait can be interrupted.

        Args:
            call: The function.

        Raises:
            TimeLimitExceeded: The function has not returned in time, or too many earlier ones have not returned yet.
        """
        name = f"time limit for {self._of}"
        unanswered = sum(thread.name == name for thread in threading.enumerate())
        if unanswered >= MOST_UNANSWERED:
            raise TimeLimitExceeded(
                f"expected {self._of} to answer, found that {unanswered} earlier calls of this process have had no answer yet: "
                "no further one is begun."
            )
        answers: queue.Queue[Callable[[], Returned]] = queue.Queue()

        def work() -> None:
            try:
                result = call()
            except Exception as error:
                answers.put(_raising(error))
            else:
                answers.put(lambda: result)

        threading.Thread(target=work, name=name, daemon=True).start()
        try:
            answer = answers.get(timeout=max(self._until - self._monotonic(), 0.001))
        except queue.Empty:
            raise TimeLimitExceeded(f"expected {self._of} to answer within {self._seconds:g} s, found that it did not.") from None
        return answer()


def _raising(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
