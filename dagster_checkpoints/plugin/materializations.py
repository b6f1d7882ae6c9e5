"""The materializations of a pipeline's stages: their content, their order, and their number.

A stage is materialized when it has finished. A stage with a sink is materialized also while it runs, when its sink has committed:
such a materialization has the tag `LIVE`, and readers that wait for the end of a stage must skip it (`reports_end`). This
module must not know observations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from dagster_checkpoints.control.clocks import Clocks
from dagster_checkpoints.pipeline import CheckEvaluation, Pipeline
from dagster_checkpoints.plugin.commit_checks import HeldChecks, check_result, evaluation_event
from dagster_checkpoints.plugin.event_metadata import event_time_metadata, version_tags
from dagster_checkpoints.plugin.event_schedules import CommitSchedule
from dagster_checkpoints.plugin.stage_assets import (
    COMMITTED_ROWS,
    FINISHED_BEFORE,
    LIVE,
    StageAssets,
    instance_key,
    table_metadata,
)
from dagster_checkpoints.sinks import SinkCommit, merged
from dagster_checkpoints.spark.job.events import (
    CommitRefused,
    InstanceFinished,
    JobEndedBefore,
    JobStarted,
    SinkCommitted,
    StageFinished,
)

COMMIT_LABELS = ("committed_rows", "committed_bytes", "committed_files", "table_version", "commits", "first_checkpoint")
"""The labels of what was committed since a stage's last materialization, in the order in which Dagster shows them; unknown values
are left out."""


@dataclass(frozen=True, slots=True)
class _HeldCommits:
    """The commits of a stage since its last materialization, as one.

    Attributes:
        newest: The newest commit, with the rows, bytes and files of all of them.
        first_checkpoint: The checkpoint of the oldest one.
        commits: Their number.
    """

    newest: SinkCommitted
    first_checkpoint: int
    commits: int = 1

    def and_then(self, event: SinkCommitted) -> _HeldCommits:
        assert self.newest.commit is not None and event.commit is not None
        commit = merged([self.newest.commit, event.commit])
        sample = event.sample or self.newest.sample
        return _HeldCommits(replace(event, commit=commit, sample=sample), self.first_checkpoint, self.commits + 1)


class PipelineMaterializations:
    """Makes the materializations of one run.

    Args:
        context: The context of the op, through which the commits of running stages are logged.
        pipeline: The pipeline that runs.
        assets: The assets of the pipeline's stages.
        schedule: Decides which commits are reported, and when.
        refusals: Decides which refused commits are reported, and when.
        clocks: The clocks; a watermark's lag is measured against the wall clock.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        assets: StageAssets,
        schedule: CommitSchedule,
        refusals: CommitSchedule,
        clocks: Clocks,
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self._assets = assets
        self._schedule = schedule
        self._refusals = refusals
        self._clock = clocks.monotonic
        self._wall = clocks.wall
        self._job_id = 0
        self._columns: Mapping[str, tuple[tuple[str, str], ...]] = {}
        self._held: dict[str, _HeldCommits] = {}
        self._checks = HeldChecks()
        self._finished: dict[str, StageFinished] = {}
        self._yielded: set[str] = set()

    def job_started(self, event: JobStarted | JobEndedBefore) -> None:
        """Take the job's number, and the columns of its stages, if its plans are built."""
        self._job_id = event.job_id
        self._columns = event.columns if isinstance(event, JobStarted) else {}

    def missing(self) -> list[str]:
        """The selected stages whose end has not been materialized, in topological order."""
        return [s.name for s in self._pipeline.stages if s.name in self._assets.selected - self._yielded]

    # While a stage runs

    def committed(self, event: SinkCommitted) -> None:
        """A sink has committed: materialize its stage, or hold the commit."""
        if event.stage not in self._assets.selected:
            return
        self._checks.add(event.stage, event.checks)
        event = event if event.commit is not None else self._of_restore(event)
        if event.commit is None:
            return
        held = self._held.get(event.stage)
        self._held[event.stage] = held.and_then(event) if held is not None else _HeldCommits(event, event.checkpoint_id)
        if event.last:
            self._schedule.last_committed(event.stage)
        elif self._schedule.committed(event.stage, self._clock()):
            self._log(event.stage)

    def refused(self, event: CommitRefused) -> None:
        """Rows did not pass a blocking check: show the results, unless some were shown a moment ago."""
        if event.stage in self._assets.selected and self._refusals.committed(event.stage, self._clock()):
            self._log_checks(event.stage, event.checks)

    def _of_restore(self, event: SinkCommitted) -> SinkCommitted:
        """The event with what a restore has committed since the stage's newest materialization; as it is if that is nothing."""
        held = self._held.get(event.stage)
        known = held.newest.rows if held is not None else self._shown_rows(event.stage)
        if known == event.rows:
            return event
        return replace(event, commit=SinkCommit(rows=event.rows - known if event.rows > known else None))

    def _shown_rows(self, stage: str) -> int:
        """The number of rows committed by this job that the stage's newest materialization shows; 0 without one."""
        newest = self._context.instance.get_latest_materialization_event(self._assets.keys[stage])
        shown = newest.asset_materialization if newest is not None else None
        if shown is None or "job" not in shown.metadata or shown.metadata["job"].value != self._job_id:
            return 0
        return int((shown.tags or {}).get(COMMITTED_ROWS, 0))

    def may_be_due(self) -> bool:
        """Whether the materialization of a running stage is due."""
        return self._schedule.may_be_due(self._clock())

    def log_due(self) -> None:
        """Materialize the running stages whose commits have been held for long enough."""
        self._log_all(self._schedule.due(self._clock()))

    def run_ended(self) -> None:
        """The run ends: materialize the stages that have not finished, with the commits that were held."""
        self._log_all(self._schedule.run_ended())

    def instance_finished(self, event: InstanceFinished) -> None:
        """An instance has ended: materialize its partition of the asset beside the stage's, if there are several instances."""
        if self._pipeline.stage(event.stage).parallelism == 1 or event.stage not in self._assets.keys:
            return
        rows = {"rows": event.rows, "dagster/partition_row_count": event.rows} if event.rows is not None else {}
        key = instance_key(self._assets.keys[event.stage])
        self._context.log_event(dg.AssetMaterialization(key, partition=event.instance, metadata=rows))

    def _log_all(self, stages: Collection[str]) -> None:
        for stage in self._pipeline.stages:
            if stage.name in stages:
                self._log(stage.name)

    def _log(self, stage: str) -> None:
        for upstream in self._pipeline.upstream(stage):  # or the stage would be "Unsynced" as soon as they are materialized
            if self._schedule.hurried(upstream, self._clock()):
                self._log(upstream)
        held, key = self._held.pop(stage), self._assets.keys[stage]
        metadata = {
            **self._table(stage, held.newest.rows),
            **self._commits(held),
            **event_time_metadata(self._pipeline, stage, held.newest.watermark_ms, self._wall),
            "state": "running",
            "job": self._job_id,
            "checkpoint": held.newest.checkpoint_id,
        }
        version = f"job-{self._job_id}-checkpoint-{held.newest.checkpoint_id}"
        tags = {LIVE: "true", COMMITTED_ROWS: str(held.newest.rows), **version_tags(self._context, key, version)}
        self._context.log_event(dg.AssetMaterialization(key, metadata=metadata, tags=tags))
        self._log_checks(stage, self._checks.take(stage))

    def _log_checks(self, stage: str, evaluations: Iterable[CheckEvaluation]) -> None:
        for evaluation in evaluations:
            self._context.log_event(evaluation_event(self._assets.keys[stage], evaluation))

    # The end of a stage

    def stage_finished(self, event: StageFinished) -> bool:
        """A stage has finished; :meth:`possible` materializes it. False if that is known already."""
        if event.stage in self._finished:
            return False
        self._finished[event.stage] = event
        self._schedule.stage_ended(event.stage)
        return True

    def possible(self) -> Iterator[dg.MaterializeResult[Any]]:
        """The possible ends: Dagster requires an asset after those it depends on, in whatever order stages finish."""
        for stage in self._pipeline.stages:
            name = stage.name
            if name in self._yielded or name not in self._finished or name not in self._assets.selected:
                continue
            if all(up in self._yielded or up not in self._assets.selected for up in self._pipeline.upstream(name)):
                self._yielded.add(name)
                # The same version in each run of the job: a stage that had finished before has not changed.
                earlier, newest = self._checks.end(name)
                self._log_checks(name, earlier)
                yield dg.MaterializeResult(
                    asset_key=self._assets.keys[name],
                    metadata=self.end(self._finished[name]),
                    data_version=dg.DataVersion(f"job-{self._job_id}"),
                    check_results=[check_result(self._assets.keys[name], each) for each in newest],
                )

    def log_end(self, end: dg.MaterializeResult[Any]) -> None:
        """Log the end of a stage, as Dagster does with one that the op yields."""
        assert end.asset_key is not None and end.data_version is not None
        key = dg.AssetKey.from_coercible(end.asset_key)
        tags = version_tags(self._context, key, end.data_version.value)
        self._context.log_event(dg.AssetMaterialization(key, metadata=end.metadata, tags=tags))
        for each in end.check_results or ():
            shown = {name: getattr(each, name) for name in ("check_name", "passed", "metadata", "severity", "description")}
            self._context.log_event(dg.AssetCheckEvaluation(asset_key=key, **shown))

    def end(self, event: StageFinished) -> dict[str, Any]:
        """The metadata of a stage's end."""
        stage = self._pipeline.stage(event.stage)
        metadata: dict[str, Any] = {"job": self._job_id, "instances": stage.parallelism}
        if event.checkpoint_id is not None:
            metadata["checkpoint"] = event.checkpoint_id
        if event.restored:
            metadata[FINISHED_BEFORE] = True
        elif event.rows is not None:
            metadata["rows"] = event.rows
        if event.late_rows:
            metadata["late_rows"] = event.late_rows
        path = getattr(stage.sink, "path", None)
        if path is not None:
            metadata["path"] = dg.MetadataValue.path(str(path))
        if stage.sink is not None:
            held = self._held.get(event.stage)
            metadata |= {**self._table(event.stage, event.rows), **(self._commits(held) if held is not None else {})}
        return metadata

    # Metadata

    def _table(self, stage: str, rows: int | None) -> dict[str, Any]:
        """The metadata of the table that a sink writes, by Dagster's own names."""
        sink = self._pipeline.stage(stage).sink
        shown: dict[str, Any] = {}
        if self._pipeline.stage(stage).output_mode == "append" and sink is not None and sink.appends and rows is not None:
            shown["dagster/row_count"] = rows
        if columns := self._columns.get(stage):
            shown["dagster/column_schema"] = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns])
        return shown | table_metadata(sink)

    def _commits(self, held: _HeldCommits) -> dict[str, Any]:
        commit = held.newest.commit or SinkCommit()
        several = (held.commits, held.first_checkpoint) if held.commits > 1 else (None, None)
        values = (commit.rows, commit.bytes, commit.files, commit.version, *several)
        shown = {label: value for label, value in zip(COMMIT_LABELS, values, strict=True) if value is not None}
        return {**shown, "sample": _as_table(held.newest.sample)} if held.newest.sample else shown


def _as_table(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue[Any]:
    def scalar(value: object) -> str | int | float:
        is_shown = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))  # JSON has no NaN
        return value if is_shown else str(value)  # type: ignore[return-value]

    return dg.MetadataValue.table([dg.TableRecord({name: scalar(value) for name, value in row.items()}) for row in rows])
