"""Delays Dagster's interrupts in code that an exception at an arbitrary line would break.

Dagster terminates a run by a signal whose handler raises in the main thread at any moment, also during a write to Dagster's event
log. This module must not import Dagster.
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
    """Delay interrupts that arrive inside the block until the block ends.

    For short blocks only. Outside of the main thread, which alone is interrupted, it has no effect.
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
