"""The clocks by which a run is reported. It must not know what is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from dagster_checkpoints.storage.ownership import now_utc


@dataclass(frozen=True)
class Clocks:
    """The clocks of a process; a test has its own.

    Attributes:
        monotonic: Seconds that never go back, compared only with each other.
        wall: Wall-clock time in UTC, for display.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], datetime] = now_utc


CLOCKS = Clocks()
"""Those of this process."""
