"""Runs the users' discoveries of splits, each on a thread of its own, and reports the splits to the job.

It must not know when to discover, nor which splits are known: `execution.splits` decides that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from dagster_checkpoints.execution.job_actions import DiscoverSplits
from dagster_checkpoints.execution.job_events import TaskFailure, TaskReport
from dagster_checkpoints.execution.source_answers import SILENT_SECONDS
from dagster_checkpoints.execution.split_events import SplitsDiscovered
from dagster_checkpoints.pipeline import DiscoveryContext, InputAsset, Pipeline, SplitSource, StageKind, TaskId
from dagster_checkpoints.pipeline.errors import InvalidSplitError
from dagster_checkpoints.spark.errors import StageFailedError
from dagster_checkpoints.spark.job.runtime import failure_of
from dagster_checkpoints.spark.query.error_location import located

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPLITS_OF_A_REPORT = 1_000
"""Maximum number of splits in a report of an iterator. Its first ones have fewer: instances read while a discovery goes on."""


class SplitDiscovery:
    """The discoveries of one run.

    Args:
        pipeline: The pipeline that runs.
        spark: The session of the job.
        assets: The assets outside of the pipeline that stages read, by stage and key.
        log: The logger of the context.
        report: Receives the splits, or the failure; any thread.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        assets: Mapping[str, Mapping[str, InputAsset]],
        log: logging.Logger,
        report: Callable[[TaskReport], None],
    ) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._assets = assets
        self._log = log
        self._report = report
        self._attempts: dict[str, int] = {}
        """By source, the attempt whose discovery may go on."""

    def begin(self, action: DiscoverSplits) -> None:
        """Begin a discovery. One of an earlier attempt ends with its next split."""
        self._attempts[action.stage] = action.attempt
        threading.Thread(target=self._run, args=(action,), name=f"splits of {action.stage}", daemon=True).start()

    def stop(self, vertices: Set[str] | None) -> None:
        """End the discoveries of these vertices, None for all, with their next split."""
        self._attempts = {} if vertices is None else {s: n for s, n in self._attempts.items() if s not in vertices}

    def _run(self, action: DiscoverSplits) -> None:
        silent = threading.Timer(SILENT_SECONDS, self._warn, (action,))
        silent.daemon = True
        silent.start()
        try:
            self._discover(action, silent.cancel)
        except Exception as error:
            self._report(TaskReport(action.attempt, TaskFailure(TaskId(action.stage, 0), failure_of(error))))
        finally:
            silent.cancel()

    def _warn(self, action: DiscoverSplits) -> None:
        if self._attempts.get(action.stage) == action.attempt:
            self._log.warning(
                "Source %r has given no splits yet: its discovery has been running for %.0f s. No new split is read meanwhile, "
                "and checkpoints complete without it. Check that what it asks (a file system, a database, a broker) answers.",
                action.stage,
                SILENT_SECONDS,
            )

    def _discover(self, action: DiscoverSplits, answered: Callable[[], None]) -> None:
        """Report the splits that a source discovers.

        A list is one report, so that each checkpoint has all of its splits or none: a list says what there is at one moment, and
        after a failure another discovery may divide the same rows in another way.

        Args:
            action: The source.
            answered: Called with each split.
        """
        stage = self._pipeline.stage(action.stage)
        assert isinstance(stage, SplitSource)
        assets = self._assets.get(stage.name, {})
        context = DiscoveryContext(self._spark, stage.name, self._log, assets, stage.kind is StageKind.BOUNDED_SOURCE)
        batch: list[str] = []
        try:
            own = stage.for_instance()
            found = own.discover(context)
            if isinstance(found, str) or not isinstance(found, Iterable):  # each letter of a text would be a split
                raise InvalidSplitError(f"{own.where}: expected discover to give splits, as a list for example, found {found!r}.")
            size = None if isinstance(found, Sequence) else 1
            for split in found:
                answered()
                if self._attempts.get(stage.name) != action.attempt:
                    return
                batch.append(own.encode_split(split))
                if len(batch) == size:
                    self._report(TaskReport(action.attempt, SplitsDiscovered(stage.name, tuple(batch))))
                    batch, size = [], min(2 * size, SPLITS_OF_A_REPORT)
        except Exception as error:
            text = f"the discovery of its splits failed {located(error, stage)}"
            raise StageFailedError(stage.name, ", ".join(stage.instances), text) from error
        self._report(TaskReport(action.attempt, SplitsDiscovered(stage.name, tuple(batch), last=True)))
