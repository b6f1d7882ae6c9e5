"""A request that a sensor sends to each owner of a pipeline, and sends again in a later tick if it fails.

An owner is a run; where Dagster runs the op again in the same run (a retry policy of ops), it is another owner, which knows
nothing of requests to the first. One tick sends the request or polls its answer; it never waits for the pipeline. This module
must not know what is requested, nor when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import dagster as dg
import msgspec

from dagster_checkpoints.control.pipeline_control import NoRunningPipeline, PipelineControl
from dagster_checkpoints.control.requests import Answer
from dagster_checkpoints.errors import UnknownRequest
from dagster_checkpoints.plugin.sensors.pipeline_sensor import Cursor, RunningPipeline, SensorTick, read_cursor, request_id, skip

ATTEMPTS = 3
"""The maximum number of failing requests to a run."""


class RequestCursor(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    run: id of the run that the other fields concern.
    epoch: its epoch as the owner of the pipeline.
    asked: id of the newest request; "" if its failure was processed.
    attempt: number of requests that have failed.
    """

    run: str = ""
    epoch: int = 0
    asked: str = ""
    attempt: int = 0


AnyRequestCursor = TypeVar("AnyRequestCursor", bound=RequestCursor)


@dataclass(frozen=True)
class Progress(Generic[AnyRequestCursor]):
    """The progress of the request to a run.

    Attributes:
        cursor: the sensor's memory of this run; after a failure its number of attempts is one higher.
        answer: the newest answer; None if there is none, or if the request has failed.
        failed: text about a failure that was read in this tick; "" if there was none.
    """

    cursor: AnyRequestCursor
    answer: Answer | None = None
    failed: str = ""

    @property
    def under_way(self) -> bool:
        """Whether a request was sent that has not failed."""
        return bool(self.cursor.asked)


@dataclass(frozen=True)
class RepeatedRequest(Generic[AnyRequestCursor]):
    """The request that a sensor sends to each run.

    Attributes:
        sensor: the name of the sensor; part of the requests' ids.
        kind: the type of the sensor's cursor.
        given_up: text of the requested action, with "{run}" for the run's id, such as "drain run {run}".
        send: sends the request with the given id.
    """

    sensor: str
    kind: type[AnyRequestCursor]
    given_up: str
    send: Callable[[PipelineControl, str], object]

    def read(self, tick: SensorTick, running: RunningPipeline) -> AnyRequestCursor:
        """The sensor's memory of this owner; an empty one if it concerns another owner."""
        before, owner = read_cursor(tick.dagster.cursor, self.kind), (running.run_id, running.state.epoch)
        return before if (before.run, before.epoch) == owner else self.kind(run=running.run_id, epoch=running.state.epoch)

    def poll(self, tick: SensorTick, before: AnyRequestCursor) -> Progress[AnyRequestCursor]:
        """Read the answer to the request that an earlier tick has sent, if there is one."""
        if not before.asked:
            return Progress(before)
        try:
            answer = tick.control.do(lambda control: control.handle(before.asked).poll())
        except UnknownRequest:  # the run still owns the pipeline: its answer was no success that this sensor could miss
            failed = f"Request {before.asked} was answered while the sensor did not run, and its files have been deleted since. "
        else:
            if answer is None or answer.status != "failed":
                return Progress(before, answer)
            failed = f"Request {before.asked} failed, {answer.reason}: {answer.message}. "
        return Progress(msgspec.structs.replace(before, asked="", attempt=before.attempt + 1), None, failed)

    def give_up(self, progress: Progress[AnyRequestCursor]) -> dg.SensorResult | None:
        """The end of the tick if too many requests have failed, else None."""
        before = progress.cursor
        if before.attempt < ATTEMPTS:
            return None
        undone = self.given_up.replace("{run}", before.run)
        return skip(f"{progress.failed}Given up after {before.attempt} attempts to {undone}.", before)

    def send_next(
        self, tick: SensorTick, progress: Progress[AnyRequestCursor], describe: Callable[[str], str]
    ) -> dg.SensorResult:
        """Send the next request.

        Args:
            tick: the sensor's tick.
            progress: the progress of earlier requests.
            describe: returns the tick's text for the request's id.
        """
        before = progress.cursor
        request = request_id(self.sensor, before.run, f"e{before.epoch}", before.attempt + 1)
        try:
            tick.control.do(lambda control: self.send(control, request))
        except NoRunningPipeline as error:
            return skip(f"{progress.failed}{error}", self.kind())
        after = self.kind(run=before.run, epoch=before.epoch, asked=request, attempt=before.attempt)
        return skip(f"{progress.failed}{describe(request)}", after)
