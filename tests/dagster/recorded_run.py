"""The events of a run as the plugin reports them, with Dagster's context and the clock replaced."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from dagster_checkpoints import Pipeline, pipeline_assets
from dagster_checkpoints.control.clocks import Clocks
from dagster_checkpoints.plugin.run_events import ReportIntervals, RunReporter
from dagster_checkpoints.plugin.stage_assets import StageAssets, reports_end, stage_keys
from dagster_checkpoints.spark.job.events import JobEvent, JobStarted, StageProgress
from dagster_checkpoints.storage import CheckpointStorage, open_store

STARTED = JobStarted(1, 7, None, None, (), (("numbers", "doubled"), ("total",)))


def report(reporter: RunReporter, *events: JobEvent) -> list[str]:
    """The keys that are yielded."""
    return [str(result.asset_key.to_user_string()) for event in events for result in reporter.report(event)]


class Recorder:
    """Replaces Dagster's context and the clock."""

    def __init__(self) -> None:
        self.log = logging.Logger("recorder")
        self.lines: list[tuple[str, str]] = []
        self.log.addHandler(self._Lines(self.lines))
        self.events: list[Any] = []
        self.now = 0.0
        self.instance = dg.DagsterInstance.ephemeral()
        self.run = dg.DagsterRun("numbers")
        self.assets_def: dg.AssetsDefinition
        self.progress: Mapping[str, StageProgress] = {}
        """What the job says of itself between two checkpoints."""

    def reporter(self, pipeline: Pipeline, selected: frozenset[str] | None = None, **settings: float | None) -> RunReporter:
        self.assets_def = pipeline_assets(pipeline=pipeline, name="recorded")(lambda context: iter(()))
        keys = stage_keys(self.assets_def, pipeline)
        context: Any = self
        return RunReporter(
            context,
            pipeline,
            StageAssets(keys, frozenset(keys) if selected is None else selected),
            intervals=ReportIntervals(**{"observe": 30.0, "materialize": 60.0, "checkpoint": 60.0, **settings}),
            progress=lambda: self.progress,
            storage=nowhere,
            clocks=Clocks(lambda: self.now, lambda: datetime.fromtimestamp(1_388_534_400 + self.now, UTC)),
        )

    def observed(self, key: str) -> list[dict[str, Any]]:
        """The metadata of an asset's observations, as raw values in their order."""
        found = [e for e in self.events if isinstance(e, dg.AssetObservation) and e.asset_key.to_user_string() == key]
        return [{name: value.value for name, value in e.metadata.items()} for e in found]

    def live(self, key: str) -> list[dict[str, Any]]:
        """The metadata of an asset's materializations while its stage runs, as raw values in their order."""
        found = [e for e in self.events if isinstance(e, dg.AssetMaterialization) and e.asset_key.to_user_string() == key]
        assert not any(reports_end(materialization) for materialization in found)
        return [{name: value.value for name, value in e.metadata.items()} for e in found]

    class _Lines(logging.Handler):
        def __init__(self, lines: list[tuple[str, str]]) -> None:
            super().__init__()
            self._lines = lines

        def emit(self, record: logging.LogRecord) -> None:
            self._lines.append((record.levelname, record.getMessage()))

    def unsynced(self, key: str) -> bool:
        """Whether Dagster says so of an asset."""
        graph = dg.Definitions(assets=[self.assets_def]).resolve_asset_graph()
        resolver = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        return resolver.get_status(dg.AssetKey(key)) is StaleStatus.STALE

    def log_event(self, event: Any) -> None:
        self.events.append(event)
        self.instance.report_runless_asset_event(event)


def nowhere() -> CheckpointStorage:
    return CheckpointStorage(open_store("/nowhere"), "numbers")
