"""A thread that renews a lease, so that slow storage never blocks the coordinator's loop.

Knows only the ownership. The caller's ``on_lost`` stops the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from dagster_checkpoints.errors import OwnershipLost
from dagster_checkpoints.storage.ownership import Ownership


class LeaseRenewer:
    """Renews the lease after each third of it, after each tenth while storage fails; also a context manager.

    Args:
        ownership: the ownership whose lease is renewed.
        on_lost: called once, on a thread of the renewer, with the error that ended the renewals (OwnershipLost, an
            unreadable state, or any other error); also while a renewal is under way that storage neither carries out nor refuses.
    """

    def __init__(self, ownership: Ownership, on_lost: Callable[[Exception], None]) -> None:
        self._ownership = ownership
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._reporting = threading.Lock()
        self._reported = False
        self._thread = threading.Thread(target=self._run, name="lease-renewer", daemon=True)
        self._watch = threading.Thread(target=self._watch_deadline, name="lease-deadline", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._watch.start()

    def stop(self, timeout: float | None = None) -> None:
        """Stop renewing; wait up to ``timeout`` seconds for a renewal under way (None: without limit). Idempotent."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def __enter__(self) -> LeaseRenewer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        pause = self._ownership.lease_seconds / 3
        while not self._stopping.wait(pause):
            try:
                renewed = self._ownership.renew()
                pause = self._ownership.lease_seconds / (3 if renewed else 10)
            except Exception as error:  # a thread that ended without a word would let the lease run out
                self._report(error)
                return

    def _watch_deadline(self) -> None:
        """Report the end of the lease where a renewal hangs, as on a file system whose server is away."""
        while not self._stopping.wait(self._ownership.lease_seconds / 20):
            if self._ownership.lost:
                try:
                    self._ownership.ensure()
                except OwnershipLost as error:
                    self._report(error)
                return

    def _report(self, error: Exception) -> None:
        with self._reporting:
            again, self._reported = self._reported, True
        if not again and not self._stopping.is_set():
            self._on_lost(error)
