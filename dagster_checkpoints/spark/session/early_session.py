"""A Spark session that is created before it is needed, on a thread of its own.

A run that waits for the lease of another owner can start Spark meanwhile, which touches nothing of the pipeline. An owner that is
alive renews its lease within a third of it, and then this run is refused; so Spark is started only after that. It must not know
storage, nor why a run waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class EarlySession:
    """Creates a session at the first call, or earlier. Each method is called on one and the same thread.

    Args:
        create: Creates or joins the session; called once, on any thread but the main one.
    """

    def __init__(self, create: Callable[[], SparkSession]) -> None:
        self._create = create
        self._decided = threading.Event()  # to end the delay: the session is needed, or will not be
        self._closed = False
        self._thread: threading.Thread | None = None
        self._session: SparkSession | None = None
        self._error: BaseException | None = None

    def create_after(self, seconds: float) -> None:
        """Create the session on a thread after a delay, in seconds, unless it is needed before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(seconds,), name="spark-start", daemon=True)
            self._thread.start()

    def __call__(self) -> SparkSession:
        """The session; waits for it if it is being created.

        Raises:
            Exception: The error of `create`.
        """
        if self._thread is None:
            return self._create()
        self._decided.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._session is not None
        return self._session

    def close(self) -> None:
        """Do not create the session any more; wait for one that is being created."""
        self._closed = True
        self._decided.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, seconds: float) -> None:
        self._decided.wait(seconds)
        if self._closed:
            return
        try:
            self._session = self._create()
        except BaseException as error:
            self._error = error
