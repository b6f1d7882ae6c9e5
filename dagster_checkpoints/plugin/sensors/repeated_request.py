"""A request that a sensor sends to each run of a pipeline, and sends again in a later tick if it fails.

One tick sends the request or polls its answer; it never waits for the pipeline. It must not know what is requested, nor when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import dagster as dg
import msgspec

from dagster_checkpoints.control import Answer, NoRunningPipeline, PipelineControl
from dagster_checkpoints.plugin.sensors.cursors import Cursor, read_cursor
from dagster_checkpoints.plugin.sensors.pipeline_sensor import RunningPipeline, SensorTick, request_id, skip

ATTEMPTS = 3
"""How many requests that fail a run gets at most."""


class RequestCursor(Cursor, frozen=True, kw_only=True, omit_defaults=True):
    """Args:
    run: id of the run that the rest is about.
    asked: id of the newest request; "" if its failure was seen.
    attempt: number of requests that have failed.
    """

    run: str = ""
    asked: str = ""
    attempt: int = 0


AnyRequestCursor = TypeVar("AnyRequestCursor", bound=RequestCursor)


@dataclass(frozen=True)
class Progress(Generic[AnyRequestCursor]):
    """How far the request to a run is.

    Attributes:
        cursor: the sensor's memory, about this run; after a failure it counts one more.
        answer: the newest answer, unless the request has failed.
        failed: text about a failure that was seen in this tick; "" if there was none.
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
    """What is requested of each run.

    Attributes:
        sensor: name of the sensor; part of the requests' ids.
        kind: type of the sensor's cursor.
        given_up: what could not be done, with "{run}" for the run's id, such as "drain run {run}".
        send: sends the request with the given id.
    """

    sensor: str
    kind: type[AnyRequestCursor]
    given_up: str
    send: Callable[[PipelineControl, str], object]

    def read(self, tick: SensorTick, running: RunningPipeline) -> AnyRequestCursor:
        """What the sensor remembers of this run."""
        before = read_cursor(tick.dagster.cursor, self.kind)
        return before if before.run == running.run_id else self.kind(run=running.run_id)

    def poll(self, tick: SensorTick, before: AnyRequestCursor) -> Progress[AnyRequestCursor]:
        """Look for the answer to the request that was sent in an earlier tick, if one was."""
        if not before.asked:
            return Progress(before)
        answer = tick.control.poll(before.asked)
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

    def ask(self, tick: SensorTick, progress: Progress[AnyRequestCursor], told: Callable[[str], str]) -> dg.SensorResult:
        """Send the next request.

        Args:
            told: makes the tick's text of the request's id.
        """
        before = progress.cursor
        asked = request_id(self.sensor, before.run, before.attempt + 1)
        try:
            tick.control.do(lambda control: self.send(control, asked))
        except NoRunningPipeline as error:
            return skip(f"{progress.failed}{error}", self.kind())
        after = self.kind(run=before.run, asked=asked, attempt=before.attempt)
        return skip(f"{progress.failed}{told(asked)}", after)
