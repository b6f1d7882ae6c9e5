"""Dagster's interrupts, kept away from code that an exception in any line would break.

Dagster terminates a run by a signal whose handler raises in the main thread, in the middle of whatever it does: of a write to
Dagster's own event log as well. It must not know Dagster.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Handle interrupts that arrive inside when the block is left.

    For short blocks only. Off the main thread, where there are no interrupts, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, remember) for number in _SIGNALS}
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)
        for number in received[:1]:
            signal.raise_signal(number)
