"""When a pipeline is to be drained: small values that say whether they hold, and what they saw.

They are put together with ``&`` and ``|``. It must not know what is done when they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import dagster as dg

from dagster_checkpoints.control import StageStatus
from dagster_checkpoints.pipeline import Pipeline, StageKind
from dagster_checkpoints.plugin.sensors.pipeline_sensor import RunningPipeline
from dagster_checkpoints.storage import ObjectInfo

Given = TypeVar("Given")


@dataclass(frozen=True)
class ConditionContext:
    """What a condition may look at.

    Attributes:
        pipeline: The pipeline.
        running: Its run and its latest status.
        instance: Dagster's.
        now: Wall clock.
        head: An object by its key below the pipeline's directory in storage, or by URL or absolute path; None if there is none.
    """

    pipeline: Pipeline
    running: RunningPipeline
    instance: dg.DagsterInstance
    now: datetime
    head: Callable[[str], ObjectInfo | None]


@dataclass(frozen=True)
class ConditionResult:
    """What a condition saw.

    Attributes:
        holds: Whether it holds.
        text: What it saw, for people.
        needs_confirmation: The condition may end at any moment, so the sensor confirms it at the next tick.
        key: Which of several alternatives holds.
    """

    holds: bool
    text: str
    needs_confirmation: bool = False
    key: str = ""


class DrainCondition:
    """The base of all conditions. A condition of one's own is most easily made with :func:`when`."""

    def look(self, at: ConditionContext) -> ConditionResult:
        """Whether it holds now. Called once per tick; must not wait."""
        raise NotImplementedError

    def describe(self) -> str:
        """What the sensor's page says of it: a clause that follows "when". By default the name of the class."""
        return type(self).__name__

    def __and__(self, other: DrainCondition) -> DrainCondition:
        return all_of(self, other)

    def __or__(self, other: DrainCondition) -> DrainCondition:
        return any_of(self, other)


def all_of(*conditions: DrainCondition) -> DrainCondition:
    """Holds while all of them hold."""
    return _AllOf(_several(conditions, "all_of"))


def any_of(*conditions: DrainCondition) -> DrainCondition:
    """Holds while at least one of them holds."""
    return _AnyOf(_several(conditions, "any_of"))


def assets_materialized(*assets: dg.AssetKey | str | Sequence[str]) -> DrainCondition:
    """All these assets have been materialized since the pipeline's job began.

    The job's beginning, not the run's: a run after a crash or a suspend goes on with the same job.

    Args:
        assets: Their keys.
    """
    return _AssetsMaterialized(tuple(dg.AssetKey.from_coercible(asset) for asset in _several(assets, "assets_materialized")))


def bounded_stages_finished() -> DrainCondition:
    """All stages that end by themselves have ended, and everything they wrote is committed."""
    return _BoundedStagesFinished()


def live_lag_zero() -> DrainCondition:
    """All sources that do not end by themselves have read everything that is there.

    This may change at any moment, so the drain sensor confirms it: it must hold, together with all conditions that it is combined
    with, in two reports of the pipeline some seconds apart. What arrives while the pipeline drains is not read.
    """
    return _LiveLagZero()


def marker_object(where: str, *, of_any_age: bool = False) -> DrainCondition:
    """There is an object, whatever is in it, written since the pipeline's job began.

    Args:
        where: Its key below the pipeline's directory in storage, such as `drain-now`; or a URL or an absolute path.
        of_any_age: An older one counts as well. It must be removed before a new job starts, or the new job is drained too.
    """
    return _MarkerObject(where, of_any_age)


def at_time(moment: datetime) -> DrainCondition:
    """This moment has come, in the life of a job that began before it.

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
        function: Gets the :class:`ConditionContext`; returns whether the condition holds, or that and a text of what it found. It
            runs within the sensor's tick and must not wait. What it raises fails the tick.
        says: Name of the condition in the tick's log; by default the function's name.
        needs_confirmation: It may change at any moment: the sensor confirms it at the next tick.
    """
    return _When(function, says or str(getattr(function, "__name__", function)), needs_confirmation)


@dataclass(frozen=True)
class _AllOf(DrainCondition):
    conditions: tuple[DrainCondition, ...]

    def look(self, at: ConditionContext) -> ConditionResult:
        seen = [condition.look(at) for condition in self.conditions]
        return ConditionResult(
            all(one.holds for one in seen),
            "; ".join(one.text for one in seen),
            any(one.needs_confirmation for one in seen),
            "&".join(one.key for one in seen),
        )

    def describe(self) -> str:
        parts = ((condition.describe(), isinstance(condition, _AnyOf)) for condition in self.conditions)
        return " and ".join(f"({text})" if alternatives else text for text, alternatives in parts)


@dataclass(frozen=True)
class _AnyOf(DrainCondition):
    conditions: tuple[DrainCondition, ...]

    def look(self, at: ConditionContext) -> ConditionResult:
        seen = [condition.look(at) for condition in self.conditions]
        holding = [(number, one) for number, one in enumerate(seen) if one.holds]
        text = " or: ".join(one.text for one in seen)
        if not holding:
            return ConditionResult(False, text)
        # One that lasts needs no second look, whatever else holds for a moment.
        number, one = min(holding, key=lambda numbered: numbered[1].needs_confirmation)
        return ConditionResult(True, text, one.needs_confirmation, f"({number}{one.key})")

    def describe(self) -> str:
        return " or ".join(condition.describe() for condition in self.conditions)


@dataclass(frozen=True)
class _AssetsMaterialized(DrainCondition):
    assets: tuple[dg.AssetKey, ...]

    def look(self, at: ConditionContext) -> ConditionResult:
        since = at.running.job_started_at
        missing = []
        for asset in self.assets:
            newest = at.instance.fetch_materializations(asset, limit=1).records
            if not newest or newest[0].timestamp < since.timestamp():
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
        bounded = [stage.name for stage in at.pipeline.stages if at.pipeline.is_bounded(stage.name)]
        stages = _stages(at)
        if stages is None:
            return ConditionResult(False, "the pipeline has not yet reported the state of its stages")
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
        return "all live sources have read everything, in two ticks in a row"


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
        return f"the marker {self.where} is there{'' if self.of_any_age else ', written since its job began'}"


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


def _several(given: tuple[Given, ...], what: str) -> tuple[Given, ...]:
    if not given:
        raise ValueError(f"expected at least one argument of {what}(), found none: it would hold at once")
    return given


def _stages(at: ConditionContext) -> dict[str, StageStatus] | None:
    status = at.running.status
    return {stage.name: stage for stage in status.stages} if status is not None and status.stages else None


def _behind(name: str, instances: Sequence[str], stage: StageStatus | None) -> list[str]:
    """The instances of a live source that may still have something to read."""
    if stage is None:
        return [name]
    if stage.finished:
        return []
    done = {one.name for one in stage.instances if one.end_of_data or one.caught_up}
    label = "{}" if len(instances) == 1 else "{}[{}]"
    return [label.format(name, instance) for instance in instances if instance not in done]


def _clock(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}"
