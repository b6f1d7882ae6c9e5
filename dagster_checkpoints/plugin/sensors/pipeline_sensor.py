"""One tick of a sensor: how it reaches a pipeline's storage, within seconds, and what it finds there.

A tick writes a request or looks at an answer; it never waits for the pipeline. It must not know what any one sensor is for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg

from dagster_checkpoints.control import Answer, PipelineControl, PipelineStatus
from dagster_checkpoints.execution.pipeline_state import describe_end
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.sensors.cursors import Cursor, write_cursor
from dagster_checkpoints.plugin.time_limits import TimeLimit, TimeLimitExceeded
from dagster_checkpoints.storage import (
    CorruptStatus,
    ObjectInfo,
    OutcomeUnknown,
    PipelineState,
    StorageUnavailable,
    UnknownRequest,
    WriteConflict,
)

if TYPE_CHECKING:
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource

STORAGE_SECONDS = 15.0
"""What a tick grants to storage altogether; Dagster ends a tick after 60 s."""
TRANSIENT = (StorageUnavailable, OutcomeUnknown, WriteConflict, TimeLimitExceeded)
_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9_.\-]+")

Answered = TypeVar("Answered")


class TimedControl:
    """A :class:`PipelineControl` for the length of a tick: all that is done with it takes a limited time altogether.

    Args:
        control: makes it; called when it is first needed.
        seconds: for everything together.
    """

    def __init__(self, control: Callable[[], PipelineControl], seconds: float) -> None:
        self._make = control
        self._control: PipelineControl | None = None
        self._limit = TimeLimit(seconds, "storage")

    def do(self, what: Callable[[PipelineControl], Answered]) -> Answered:
        """Do something with the pipeline's control that may be done again.

        Raises:
            TimeLimitExceeded: the time is up.
        """

        def work() -> Answered:
            self._control = self._control or self._make()
            return what(self._control)

        return self._limit.do(work)

    def look(self) -> RunningPipeline | NotRunning:
        """The run that owns the pipeline, or how the latest one ended."""
        state = self.do(PipelineControl.state)
        if state is None or state.lease is None:
            return NotRunning(f"The pipeline is not running. {describe_end(state)}")
        try:
            status = self.do(PipelineControl.status)
        except CorruptStatus:  # it is for display; the owner writes it again
            status = None
        return RunningPipeline(state, status if status is not None and status.epoch == state.epoch else None)

    def poll(self, request_id: str) -> Answer | None:
        """The newest answer to a request; None if there is none, or nobody knows the request any more."""
        try:
            return self.do(lambda control: control.handle(request_id).poll())
        except UnknownRequest:
            return None


@dataclass(frozen=True)
class NotRunning:
    """A pipeline without an owner.

    Attributes:
        text: how its latest run ended, for people.
    """

    text: str


@dataclass(frozen=True)
class RunningPipeline:
    """A pipeline that somebody owns.

    Attributes:
        state: Who owns it.
        status: What that very owner last said of itself; None if it has not said anything yet.
    """

    state: PipelineState
    status: PipelineStatus | None

    @property
    def run_id(self) -> str:
        """Of the owner: the Dagster run."""
        assert self.state.lease is not None
        return self.state.lease.owner.run_id

    @property
    def job_id(self) -> int:
        """Of the job, which outlives runs: a run after a crash or a suspend goes on with it."""
        return self.state.job.job_id

    @property
    def job_started_at(self) -> datetime:
        """When the job was begun, by the clock of its first owner."""
        assert self.state.lease is not None
        return self.state.job.started_at or self.state.lease.acquired_at


@dataclass(frozen=True)
class SensorTick:
    """What a sensor has at hand.

    Attributes:
        dagster: Dagster's context.
        control: The pipeline's control, for the length of the tick.
        head: An object in storage: by its key below the pipeline's directory, or by URL or absolute path.
        now: Wall clock.
    """

    dagster: dg.SensorEvaluationContext
    control: TimedControl
    head: Callable[[str], ObjectInfo | None]
    now: datetime


Evaluate = Callable[[SensorTick], dg.SensorResult]


def pipeline_sensor(
    evaluate: Evaluate,
    *,
    pipeline: Pipeline,
    name: str,
    description: str,
    minimum_interval_seconds: int,
    default_status: dg.DefaultSensorStatus,
    resource_key: str,
    jobs: Sequence[Any] | None = None,
    storage_seconds: float = STORAGE_SECONDS,
) -> dg.SensorDefinition:
    """A sensor that controls a pipeline. While storage is out of reach it skips its ticks, and keeps its cursor."""

    @dg.sensor(
        name=name,
        description=description,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        required_resource_keys={resource_key},
        jobs=jobs,
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        coordinator: CheckpointCoordinatorResource = getattr(context.resources, resource_key)
        instance = context.instance

        def make_control() -> PipelineControl:
            return coordinator.control(pipeline, instance=instance, asked_by=f"sensor {name}")

        def head(where: str) -> ObjectInfo | None:
            folder, _, name = where.rpartition("/")
            if "://" in where or where.startswith("/"):
                return control.do(lambda _: coordinator.open_store(folder).head(name))
            storage = coordinator.checkpoint_storage(pipeline, instance=instance)
            return control.do(lambda _: storage.store.head(f"{pipeline.name}/{where}"))

        control = TimedControl(make_control, storage_seconds)
        try:
            result = evaluate(SensorTick(context, control, head, datetime.now(UTC)))
        except TRANSIENT as error:
            result = dg.SensorResult(skip_reason=f"{error} The next tick tries again.", cursor=context.cursor)
        context.log.info(_outcome(result))
        return result

    return tick


def _outcome(result: dg.SensorResult) -> str:
    """What a tick has done, for its log."""
    if result.skip_reason is not None:
        return result.skip_reason.skip_message or ""
    requests = result.run_requests or []
    return "; ".join(f"Requested a run of {request.job_name} (run key {request.run_key})" for request in requests) + "."


def skip(reason: str, cursor: Cursor, asset_events: Sequence[dg.AssetObservation] = ()) -> dg.SensorResult:
    """Nothing to launch: what was seen instead, and what to remember."""
    return dg.SensorResult(skip_reason=reason, cursor=write_cursor(cursor), asset_events=list(asset_events))


def request_id(*parts: object) -> str:
    """An id for a request: the same parts give the same one, on every machine, at any time.

    Parts with characters that an id cannot have are shortened and told apart by a hash.
    """
    plain = "-".join(str(part) for part in parts)
    if not _NOT_IN_AN_ID.search(plain) and len(plain) <= 120:
        return plain
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:12]
    return f"{_NOT_IN_AN_ID.sub('_', plain)[:100]}-{digest}"
