"""Conditions for the drain of a pipeline: values that say whether they hold, and why.

``&`` and ``|`` combine them. It must not know what happens when they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

import dagster as dg

from dagster_checkpoints.control.status import StageStatus
from dagster_checkpoints.files.store import ObjectInfo
from dagster_checkpoints.pipeline import Pipeline, StageKind, StageRows
from dagster_checkpoints.plugin.sensors.pipeline_sensor import RunningPipeline
from dagster_checkpoints.plugin.stage_assets import FINISHED_BEFORE, reports_end

Argument = TypeVar("Argument")
_AT_ONCE = 200
_VISIBLE_SECONDS = 600.0
"""Seconds after which every materialization is visible: in PostgreSQL one may become visible after another with a larger id."""


@dataclass(frozen=True)
class ConditionContext:
    """The facts that a condition may use.

    Attributes:
        pipeline: The pipeline.
        running: The pipeline's run and its latest status.
        instance: The Dagster instance.
        now: The time of the tick, in UTC.
        head: Returns the description of an object, by its key below the pipeline's directory in storage, or by URL or absolute
            path; None if there is no such object.
    """

    pipeline: Pipeline
    running: RunningPipeline
    instance: dg.DagsterInstance
    now: datetime
    head: Callable[[str], ObjectInfo | None]

    @property
    def rows(self) -> StageRows:
        """The number of rows that each stage has emitted since the job began; 0 before the first report."""
        reported = {stage.name: stage.rows for stage in (self.running.status.stages if self.running.status is not None else ())}
        return StageRows({stage.name: reported.get(stage.name, 0) for stage in self.pipeline.stages})


@dataclass(frozen=True)
class ConditionResult:
    """The result of a condition.

    Attributes:
        holds: Whether the condition holds.
        text: What the condition found, for the tick's log.
        needs_confirmation: Whether the condition may end at any moment, so that the sensor confirms it at the next tick.
        key: Names the alternative that holds, if there are several.
    """

    holds: bool
    text: str
    needs_confirmation: bool = False
    key: str = ""


class DrainCondition:
    """The base of all conditions. The easiest way to write your own condition is :func:`when`."""

    def look(self, at: ConditionContext) -> ConditionResult:
        """Evaluate the condition. Called once per tick; must not wait.

        Args:
            at: The facts at this tick.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """The condition's text on the sensor's page: a clause that follows "when"; default: the name of the class."""
        return type(self).__name__

    def __and__(self, other: DrainCondition) -> DrainCondition:
        return all_of(self, other)

    def __or__(self, other: DrainCondition) -> DrainCondition:
        return any_of(self, other)


def all_of(*conditions: DrainCondition) -> DrainCondition:
    """A condition that holds while all given conditions hold."""
    return _AllOf(_several(conditions, "all_of"))


def any_of(*conditions: DrainCondition) -> DrainCondition:
    """A condition that holds while at least one of the given conditions holds."""
    return _AnyOf(_several(conditions, "any_of"))


def assets_materialized(*assets: dg.AssetKey | str | Sequence[str]) -> DrainCondition:
    """All these assets have been materialized since the pipeline's job began.

    The job's beginning counts, not the run's: a run after a crash or a suspend continues the same job. If an asset is a stage of
    another pipeline, the end of the stage counts, not the commits of its sink while it runs, nor that a later run of the same
    job materializes it again.

    Args:
        assets: The keys of the assets; a text as Dagster writes a key, `raw/events`.
    """
    return _AssetsMaterialized(tuple(map(_asset_key, _several(assets, "assets_materialized"))))


def _asset_key(asset: dg.AssetKey | str | Sequence[str]) -> dg.AssetKey:
    """The key. Dagster would take a text with slashes for one part of a key, and the condition would never hold."""
    return dg.AssetKey.from_user_string(asset) if isinstance(asset, str) else dg.AssetKey.from_coercible(asset)


def bounded_stages_finished() -> DrainCondition:
    """All bounded stages have finished, and all their rows are committed.

    Without periodic checkpoints (`interval=None`) nothing is committed before the job ends. Then it holds when all bounded
    sources have been read to their end.
    """
    return _BoundedStagesFinished()


def live_lag_zero() -> DrainCondition:
    """All unbounded sources have read all available input: each was asked after its last micro-batch, and had nothing new.

    This may change at any moment, so the drain sensor confirms it: it must hold, together with all conditions that it is combined
    with, in two reports of the pipeline some seconds apart. Input that arrives while the pipeline drains is not read.
    """
    return _LiveLagZero()


def marker_object(where: str, *, of_any_age: bool = False) -> DrainCondition:
    """An object exists, with any content, that was written since the pipeline's job began.

    Args:
        where: The object's key below the pipeline's directory in storage, such as `drain-now`; or a URL or an absolute path.
        of_any_age: Whether an older object counts as well. It must then be removed before a new job starts, or the new job is
            drained too.
    """
    return _MarkerObject(where, of_any_age)


def at_time(moment: datetime) -> DrainCondition:
    """A point in time has come, for a job that began before it.

    Args:
        moment: The point in time, with a time zone.

    Raises:
        ValueError: `moment` has no time zone.
    """
    if moment.tzinfo is None:
        raise ValueError(f"expected a time with a time zone, found {moment!r}: say at_time(datetime(..., tzinfo=UTC))")
    return _AtTime(moment)


def when(
    function: Callable[[ConditionContext], bool | tuple[bool, str]], *, says: str | None = None, needs_confirmation: bool = False
) -> DrainCondition:
    """A condition from a function that you write.

    Args:
        function: Takes the :class:`ConditionContext`; returns whether the condition holds, or that and a text of what it found.
            It runs within the sensor's tick and must not wait. An error that it raises fails the tick.
        says: The name of the condition in the tick's log; default: the function's name.
        needs_confirmation: Whether the result may change at any moment, so that the sensor confirms it at the next tick.
    """
    return _When(function, says or str(getattr(function, "__name__", function)), needs_confirmation)


@dataclass(frozen=True)
class _AllOf(DrainCondition):
    conditions: tuple[DrainCondition, ...]

    def look(self, at: ConditionContext) -> ConditionResult:
        results = [condition.look(at) for condition in self.conditions]
        return ConditionResult(
            all(result.holds for result in results),
            "; ".join(result.text for result in results),
            any(result.needs_confirmation for result in results),
            "&".join(result.key for result in results),
        )

    def describe(self) -> str:
        parts = ((condition.describe(), isinstance(condition, _AnyOf)) for condition in self.conditions)
        return " and ".join(f"({text})" if alternatives else text for text, alternatives in parts)


@dataclass(frozen=True)
class _AnyOf(DrainCondition):
    conditions: tuple[DrainCondition, ...]

    def look(self, at: ConditionContext) -> ConditionResult:
        results = [condition.look(at) for condition in self.conditions]
        holding = [(number, result) for number, result in enumerate(results) if result.holds]
        text = " or: ".join(result.text for result in results)
        if not holding:
            return ConditionResult(False, text)
        # An alternative that lasts needs no confirmation, even if another one that holds does.
        number, result = min(holding, key=lambda numbered: numbered[1].needs_confirmation)
        return ConditionResult(True, text, result.needs_confirmation, f"({number}{result.key})")

    def describe(self) -> str:
        return " or ".join(condition.describe() for condition in self.conditions)


@dataclass
class _Read:
    """What earlier ticks have read of an asset: a stage that another pipeline runs for months has many commits, and no end.

    Attributes:
        since: The moment since which the asset's materializations count.
        newest: Storage id of the newest materialization that no tick has to read again; None before the first.
        repeated: The jobs whose end was reported again.
    """

    since: datetime
    newest: int | None = None
    repeated: set[object] = field(default_factory=set)


def _materialized_since(at: ConditionContext, asset: dg.AssetKey, read: _Read) -> bool:
    """Whether an asset has been materialized since a moment; the commits of a running stage do not count.

    A run that continues a job materializes again the stages that had finished before it. That counts only where it is the first
    report of their end: the run in which they finished may have died before it could report it.
    """
    moment = read.since.timestamp()
    wanted = dg.AssetRecordsFilter(asset_key=asset, after_timestamp=moment, after_storage_id=read.newest)
    for record in _records(at.instance, wanted, ascending=True):
        end = _end_in(record)
        if end is not None and FINISHED_BEFORE not in end.metadata:
            return True
        if end is not None:
            read.repeated.add(_job_of(end))
        if record.timestamp < at.now.timestamp() - _VISIBLE_SECONDS:
            read.newest = record.storage_id
    if not read.repeated:
        return False
    earlier = _records(at.instance, dg.AssetRecordsFilter(asset_key=asset, before_timestamp=moment), ascending=False)
    before = next((end for end in map(_end_in, earlier) if end is not None), None)
    return bool(read.repeated - ({_job_of(before)} if before is not None else set()))


def _records(instance: dg.DagsterInstance, wanted: dg.AssetRecordsFilter, *, ascending: bool) -> Iterator[dg.EventLogRecord]:
    cursor: str | None = None
    while True:
        page = instance.fetch_materializations(wanted, limit=_AT_ONCE, cursor=cursor, ascending=ascending)
        yield from page.records
        if not page.has_more:
            return
        cursor = page.cursor


def _end_in(record: dg.EventLogRecord) -> dg.AssetMaterialization | None:
    """The materialization of a record, if it reports that its asset is complete."""
    materialization = record.asset_materialization
    return materialization if materialization is not None and reports_end(materialization) else None


def _job_of(end: dg.AssetMaterialization) -> object:
    job = end.metadata.get("job")
    return job.value if job is not None else None


@dataclass(frozen=True)
class _AssetsMaterialized(DrainCondition):
    assets: tuple[dg.AssetKey, ...]
    _read: dict[dg.AssetKey, _Read] = field(default_factory=dict, compare=False, repr=False)

    def look(self, at: ConditionContext) -> ConditionResult:
        since = at.running.job_started_at
        missing = []
        for asset in self.assets:
            read = self._read.get(asset)
            if read is None or read.since != since:
                read = self._read[asset] = _Read(since)
            if not _materialized_since(at, asset, read):
                missing.append(asset.to_user_string())
        if missing:
            return ConditionResult(
                False, f"not materialized since {_clock(since)}, when job {at.running.job_id} began: {', '.join(missing)}"
            )
        return ConditionResult(True, f"materialized: {', '.join(asset.to_user_string() for asset in self.assets)}")

    def describe(self) -> str:
        return f"{', '.join(asset.to_user_string() for asset in self.assets)} materialized since its job began"


@dataclass(frozen=True)
class _BoundedStagesFinished(DrainCondition):
    def look(self, at: ConditionContext) -> ConditionResult:
        stages = _stages(at)
        if stages is None:
            return ConditionResult(False, "the pipeline has not yet reported the state of its stages")
        assert at.running.status is not None
        if at.running.status.phase == "running" and at.running.status.checkpoint_interval is None:
            return _bounded_sources_read(at, stages)
        bounded = [stage.name for stage in at.pipeline.stages if at.pipeline.is_bounded(stage.name)]
        running = [name for name in bounded if name not in stages or not stages[name].finished]
        if running:
            return ConditionResult(
                False, f"{len(bounded) - len(running)} of {len(bounded)} bounded stages finished, not: {', '.join(running)}"
            )
        return ConditionResult(True, f"all {len(bounded)} bounded stages finished")

    def describe(self) -> str:
        return "all bounded stages have finished"


@dataclass(frozen=True)
class _LiveLagZero(DrainCondition):
    def look(self, at: ConditionContext) -> ConditionResult:
        stages = _stages(at)
        if stages is None:
            return ConditionResult(
                False, "the pipeline has not yet reported how far its live sources have read", needs_confirmation=True
            )
        assert at.running.status is not None
        if at.running.status.phase != "running":
            return ConditionResult(False, f"the pipeline is {at.running.status.phase}", needs_confirmation=True)
        live = [stage for stage in at.pipeline.stages if stage.kind is StageKind.UNBOUNDED_SOURCE]
        behind = [name for stage in live for name in _behind(stage.name, stage.instances, stages.get(stage.name))]
        if behind:
            return ConditionResult(False, f"not caught up: {', '.join(behind)}", needs_confirmation=True)
        return ConditionResult(
            True, f"caught up: {', '.join(stage.name for stage in live) or 'no live source'}", needs_confirmation=True
        )

    def describe(self) -> str:
        return "all live sources have read all their input, in two consecutive ticks"


@dataclass(frozen=True)
class _MarkerObject(DrainCondition):
    where: str
    of_any_age: bool

    def look(self, at: ConditionContext) -> ConditionResult:
        found = at.head(self.where)
        if found is None:
            return ConditionResult(False, f"no marker {self.where}")
        since = at.running.job_started_at
        if not self.of_any_age and found.modified < since:
            return ConditionResult(
                False,
                f"the marker {self.where} is of {_clock(found.modified)}, older than job {at.running.job_id} ({_clock(since)}): "
                "write it again",
            )
        return ConditionResult(True, f"marker {self.where} of {_clock(found.modified)}")

    def describe(self) -> str:
        return f"the marker {self.where} exists{'' if self.of_any_age else ', written since its job began'}"


@dataclass(frozen=True)
class _AtTime(DrainCondition):
    moment: datetime

    def look(self, at: ConditionContext) -> ConditionResult:
        if at.now < self.moment:
            return ConditionResult(False, f"it is not yet {_clock(self.moment)}")
        if at.running.job_started_at >= self.moment:
            return ConditionResult(False, f"{_clock(self.moment)} had passed when job {at.running.job_id} began")
        return ConditionResult(True, f"{_clock(self.moment)} has come")

    def describe(self) -> str:
        return f"{_clock(self.moment)} has come"


@dataclass(frozen=True)
class _When(DrainCondition):
    function: Callable[[ConditionContext], bool | tuple[bool, str]]
    says: str
    needs_confirmation: bool

    def look(self, at: ConditionContext) -> ConditionResult:
        answer = self.function(at)
        holds, text = answer if isinstance(answer, tuple) else (answer, "yes" if answer else "no")
        return ConditionResult(bool(holds), f"{self.says}: {text}", self.needs_confirmation)

    def describe(self) -> str:
        return f"{self.says} holds"


def _several(arguments: tuple[Argument, ...], function: str) -> tuple[Argument, ...]:
    if not arguments:
        raise ValueError(f"expected at least one argument of {function}(), found none: the condition would hold at once")
    return arguments


def _bounded_sources_read(at: ConditionContext, stages: Mapping[str, StageStatus]) -> ConditionResult:
    """Whether all bounded sources have been read to their end: without periodic checkpoints no stage finishes before the job."""
    sources = [stage.name for stage in at.pipeline.stages if stage.kind is StageKind.BOUNDED_SOURCE]
    read = [name for name in sources if name in stages and has_ended(stages[name])]
    found = f"{len(read)} of {len(sources)} bounded sources read to their end; without an interval, stages finish with the job"
    return ConditionResult(len(read) == len(sources), found)


def has_ended(stage: StageStatus, instance: str | None = None) -> bool:
    """Whether a stage, or one of its instances, emits no more rows."""
    chosen = [status for status in stage.instances if instance in (None, status.name)]
    return stage.finished or (bool(chosen) and all(status.end_of_data for status in chosen))


def _stages(at: ConditionContext) -> dict[str, StageStatus] | None:
    status = at.running.status
    return {stage.name: stage for stage in status.stages} if status is not None and status.stages else None


def _behind(name: str, instances: Sequence[str], stage: StageStatus | None) -> list[str]:
    """The instances of a live source that may have unread input."""
    if stage is None:
        return [name]
    if stage.finished:
        return []
    done = {status.name for status in stage.instances if status.end_of_data or status.caught_up}
    label = "{}" if len(instances) == 1 else "{}[{}]"
    return [label.format(name, instance) for instance in instances if instance not in done]


def _clock(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}"
