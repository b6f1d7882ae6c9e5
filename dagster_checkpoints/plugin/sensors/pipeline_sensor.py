"""One tick of a sensor: its access to the pipeline's storage, within a time limit, and its memory between ticks.

A tick writes a request or reads an answer; it never waits for the pipeline. It must not know the purpose of any sensor.

The memory is JSON with a version. A cursor may be lost, cut, of another release, or edited by hand in the UI. Then the sensor
starts with an empty one, which is harmless: the ids of its requests make a repetition harmless.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg
import msgspec

from dagster_checkpoints.control.pipeline_control import PipelineControl, newest_status
from dagster_checkpoints.control.requests import Answer
from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.errors import OutcomeUnknown, StorageUnavailable, UnknownRequest, WriteConflict
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_end
from dagster_checkpoints.files.store import ObjectInfo
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.setting_values import check_seconds, is_count
from dagster_checkpoints.plugin.time_limits import TimeLimit, TimeLimitExceeded

if TYPE_CHECKING:
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource


_log = logging.getLogger(__name__)


class Cursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of all cursors; every field has a default.

    Args:
        version: version of the cursor's format; a cursor of another version is not read.
    """

    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ValueError(f"expected version 1, found {self.version}")


AnyCursor = TypeVar("AnyCursor", bound=Cursor)


def read_cursor(text: str | None, kind: type[AnyCursor]) -> AnyCursor:
    """The cursor of the sensor's last tick; an empty one if it cannot be read.

    Args:
        text: the stored cursor; None if there is none.
        kind: the type of the sensor's cursor.
    """
    if not text:
        return kind()
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:
        _log.warning("The sensor starts with an empty cursor, because its cursor cannot be read (%s): %.200r", error, text)
        return kind()


def write_cursor(cursor: Cursor) -> str:
    """The cursor as text, with its version."""
    return msgspec.json.encode({"version": cursor.version, **msgspec.to_builtins(cursor)}).decode()


STORAGE_SECONDS = 15.0
"""The time limit for all storage calls of a tick; Dagster ends a tick after 60 s."""
TRANSIENT = (StorageUnavailable, OutcomeUnknown, WriteConflict, TimeLimitExceeded)
_NOT_IN_AN_ID = re.compile(r"^[_.\-]+|[^A-Za-z0-9_.\-]+")

Result = TypeVar("Result")


class TimedControl:
    """A :class:`PipelineControl` for one tick: all its calls together have a time limit.

    Args:
        control: creates the control; called at the first use.
        seconds: the limit for all calls together.
    """

    def __init__(self, control: Callable[[], PipelineControl], seconds: float) -> None:
        self._make = control
        self._control: PipelineControl | None = None
        self._limit = TimeLimit(seconds, "storage")

    def do(self, call: Callable[[PipelineControl], Result]) -> Result:
        """Call the pipeline's control; the call must be repeatable.

        Raises:
            TimeLimitExceeded: the time limit is exceeded.
        """

        def work() -> Result:
            self._control = self._control or self._make()
            return call(self._control)

        return self._limit.do(work)

    def find_run(self) -> RunningPipeline | NotRunning:
        """The run that owns the pipeline, or the end of the latest run."""
        state = self.do(PipelineControl.state)
        if state is None or state.lease is None:
            return NotRunning(f"The pipeline is not running. {describe_end(state)}", state)
        status = self.do(newest_status)
        return RunningPipeline(state, status if status is not None and status.epoch == state.epoch else None)

    def poll(self, request_id: str) -> Answer | None:
        """The newest answer to a request; None if there is none, or if the request's files have been deleted."""
        try:
            return self.do(lambda control: control.handle(request_id).poll())
        except UnknownRequest:
            return None


@dataclass(frozen=True)
class NotRunning:
    """A pipeline without an owner.

    Attributes:
        text: description of the latest run's end.
        state: The pipeline's state; None if it has never run.
    """

    text: str
    state: PipelineState | None


@dataclass(frozen=True)
class RunningPipeline:
    """A pipeline that a run owns.

    Attributes:
        state: The pipeline's state, with its owner.
        status: The newest status that this owner has written; None before the first.
    """

    state: PipelineState
    status: PipelineStatus | None

    @property
    def run_id(self) -> str:
        """Id of the owner's Dagster run."""
        assert self.state.lease is not None
        return self.state.lease.owner.run_id

    @property
    def job_id(self) -> int:
        """Id of the job, which can last for several runs: a run after a crash or a suspend continues it."""
        return self.state.job.job_id

    @property
    def job_started_at(self) -> datetime:
        """The time when the job began, by the clock of its first owner."""
        assert self.state.lease is not None
        return self.state.job.started_at or self.state.lease.acquired_at


@dataclass(frozen=True)
class SensorTick:
    """The context of one tick.

    Attributes:
        dagster: Dagster's context.
        control: The pipeline's control, for this tick.
        head: Returns the description of an object in storage, by its key below the pipeline's directory, or by URL or absolute
            path; None if there is no such object.
        now: The time of the tick, by the wall clock.
    """

    dagster: dg.SensorEvaluationContext
    control: TimedControl
    head: Callable[[str], ObjectInfo | None]
    now: datetime


def find_run_for_schedule(
    context: dg.ScheduleEvaluationContext, pipeline: Pipeline, name: str, resource_key: str
) -> RunningPipeline | NotRunning:
    """The run that owns the pipeline, or the end of the latest run, for a schedule's tick.

    Args:
        context: Dagster's context of the tick.
        pipeline: The pipeline.
        name: The schedule's name.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        StorageUnavailable, OutcomeUnknown, WriteConflict, TimeLimitExceeded: Storage does not answer; see `TRANSIENT`.
    """
    coordinator: CheckpointCoordinatorResource = getattr(context.resources, resource_key)

    def control() -> PipelineControl:
        return coordinator.control(pipeline, instance=context.instance, asked_by=f"schedule {name}")

    return TimedControl(control, STORAGE_SECONDS).find_run()


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
    """A sensor that controls a pipeline. While storage cannot be reached, the sensor skips its ticks and keeps its cursor.

    Args:
        evaluate: Evaluates one tick.
        pipeline: The pipeline.
        name: The sensor's name.
        description: The text on the sensor's page.
        minimum_interval_seconds: Least seconds between two ticks.
        default_status: Whether the sensor runs without being switched on.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.
        jobs: The jobs that the sensor may launch; None if it launches none.
        storage_seconds: The time limit for all storage calls of a tick.

    Raises:
        InvalidDurationError: `minimum_interval_seconds` is not a number.
        ValueError: It is not a whole number of at least 1.
    """
    check_seconds(name, minimum_interval_seconds=minimum_interval_seconds)
    if not is_count(minimum_interval_seconds, least=1):
        raise ValueError(
            f"sensor {name!r}: expected minimum_interval_seconds to be a whole number of at least 1, found "
            f"{minimum_interval_seconds!r}"
        )

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
            result = dg.SensorResult(skip_reason=not_reached(error, "The next tick tries again."), cursor=context.cursor)
        context.log.info(_outcome(result))
        return result

    return tick


def _outcome(result: dg.SensorResult) -> str:
    """The result of a tick, for its log."""
    if result.skip_reason is not None:
        return result.skip_reason.skip_message or ""
    requests = result.run_requests or []
    return "; ".join(f"Requested a run of {request.job_name} (run key {request.run_key})" for request in requests) + "."


def not_reached(error: Exception, then: str) -> str:
    """The skip reason of a tick for which storage did not answer.

    Args:
        error: the error, one of `TRANSIENT`; its text may have no full stop.
        then: what follows, as a sentence.
    """
    return f"{str(error).rstrip('.')}. {then}"


def skip(reason: str, cursor: Cursor, asset_events: Sequence[dg.AssetObservation] = ()) -> dg.SensorResult:
    """The result of a tick that launches nothing.

    Args:
        reason: the tick's skip reason.
        cursor: the sensor's memory for the next tick.
        asset_events: the observations that the tick reports.
    """
    return dg.SensorResult(skip_reason=reason, cursor=write_cursor(cursor), asset_events=list(asset_events))


def request_id(*parts: object) -> str:
    """An id for a request: the same parts give the same id, on every machine, at any time.

    If the parts contain characters that an id cannot have, or are too long, the id is shortened, and a hash distinguishes it.
    """
    plain = "-".join(str(part) for part in parts)
    if not _NOT_IN_AN_ID.search(plain) and len(plain) <= 120:
        return plain
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:12]
    return f"id{_NOT_IN_AN_ID.sub('_', plain)[:100]}-{digest}"
