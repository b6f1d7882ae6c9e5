"""Starts processes that tests kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.processes.killed_runs import Child
from tests.spark.replayed_traces import check_replayed_traces


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts runs in the test's folder; no run outlives its test. The traces of all runs are replayed."""
    children: list[Child] = []

    def begin(run_id: str, **settings: Any) -> Child:
        children.append(Child(tmp_path, run_id, **settings))
        return children[-1]

    yield begin
    for child in children:
        try:
            os.killpg(child.process.pid, signal.SIGCONT)
            os.killpg(child.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        child.process.wait(30)
    check_replayed_traces(tmp_path, {child.run_id for child in children if child.events("JobStarted")})
