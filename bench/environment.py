"""The environment that all parts share: one Spark session, a folder for the run, the generated rows, and the run of a pipeline.

Must not know the measured values.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.restarts import FailoverStrategy, FixedDelayRestart
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.resource import ALIGNED_CHECKPOINT_TIMEOUT
from dagster_checkpoints.spark.job.events import CheckpointDone, JobEvent, JobResult
from dagster_checkpoints.spark.job.job_execution import JobExecution
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session
from dagster_checkpoints.storage import CheckpointStorage, open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORES = 2
NO_PERIODIC = 24 * 3600.0  # an interval longer than any run: only final checkpoints


BY_DEFAULT: Mapping[str, Any] = {"unaligned": True, "aligned_checkpoint_timeout": ALIGNED_CHECKPOINT_TIMEOUT}
"""How barriers wait if the resource of Dagster has no settings for it."""


class BenchFailed(Exception):
    """A measured run failed, or had a wrong result."""


def session_settings() -> dict[str, object]:
    """The settings of every Spark session of the benchmark, for plain Spark and for this project."""
    return {
        "spark.master": f"local[{CORES}]",
        "spark.app.name": "bench",
        "spark.sql.shuffle.partitions": CORES,
        "spark.driver.memory": "2g",
    }


@dataclass(frozen=True)
class JobRun:
    """One finished execution of a pipeline.

    Attributes:
        seconds: Duration of `JobExecution.run`.
        started_at: `time.monotonic()` at the call of `run`.
        events: The job's events, each with the `time.monotonic()` of its report.
    """

    result: JobResult
    seconds: float
    started_at: float
    events: tuple[tuple[float, JobEvent], ...]

    @property
    def checkpoints(self) -> list[CheckpointDone]:
        return [event for _, event in self.events if isinstance(event, CheckpointDone)]


@dataclass
class Environment:
    """The command line's options, and the objects that are created once.

    Attributes:
        rows: Number of generated input rows.
        repeats: Number of measurements of each computation; the result is their median.
        cache: Directory that keeps generated rows for the next run.
    """

    rows: int
    repeats: int
    cache: Path
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="dagster-checkpoints-bench-")))
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @cached_property
    def spark(self) -> SparkSession:
        return build_session(session_settings())

    def fresh(self, name: str) -> Path:
        """Create a new, empty directory."""
        folder = self.folder / f"{next(self._numbers):03d}-{name}"
        folder.mkdir(parents=True)
        return folder

    def run_job(
        self,
        pipeline: Pipeline,
        folder: Path,
        interval: float = NO_PERIODIC,
        *,
        checkpoints: Mapping[str, Any] | None = None,
        lease_seconds: float = 15.0,
        on_event: Callable[[JobEvent, JobExecution], None] | None = None,
        restarts: int = 0,
        failover: FailoverStrategy = "region",
        keep_events: bool = True,
    ) -> JobRun:
        """Run a pipeline to its end on the shared session, with local storage below `folder`.

        Args:
            checkpoints: More settings of `CheckpointConfig`.
            restarts: Maximum number of restarts after failures.
            failover: What restarts after a failure.
            keep_events: Whether the events are in the result.
        """
        storage = CheckpointStorage(open_store(str(folder / "store")), pipeline.name)
        settings = {"interval": interval, "retained": 1, "tolerable_failed_checkpoints": 1_000, **(checkpoints or {})}
        restart = FixedDelayRestart(restarts)
        options = JobOptions(
            CheckpointConfig(**settings), restart, folder / "work", lease_seconds=lease_seconds, failover=failover
        )
        events: list[tuple[float, JobEvent]] = []

        def keep(event: JobEvent) -> None:
            if keep_events:
                events.append((time.monotonic(), event))
            if on_event is not None:
                on_event(event, job)

        job = JobExecution(pipeline, storage=storage, options=options, session=lambda: self.spark, on_event=keep, run_id="bench")
        began = time.monotonic()
        result = job.run()
        seconds = time.monotonic() - began
        if result.status not in ("FINISHED", "SUSPENDED"):
            raise BenchFailed(f"pipeline {pipeline.name!r} ended {result.status}") from result.error
        return JobRun(result, seconds, began, tuple(events))

    def say(self, text: str) -> None:
        """Print progress to stderr, so that stdout holds only the table."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if "spark" in self.__dict__:
            self.spark.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
