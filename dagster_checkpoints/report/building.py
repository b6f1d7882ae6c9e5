"""Builds the report of a pipeline from its history, its status and its state: as values, and as one HTML file.

The file holds the data as JSON, drawn by the script in it; it loads nothing. The data may hold any text (names of stages,
messages of errors): it is escaped so that it cannot end its element, and the script writes it as text only.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from math import ceil
from typing import Any

import msgspec

from dagster_checkpoints.control.history import CheckpointEntry, Entries, Measured
from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.report.stages import edges, series, stages
from dagster_checkpoints.report.timeline import runs, timeline
from dagster_checkpoints.report.values import CheckpointDetail, CheckpointRow, Counts, PendingRow, PipelineReport, SummaryRow

_PARTS = {"/*STYLE*/": "style.css", "/*SCRIPT*/": "script.js"}
# In a JSON text these characters occur within strings only.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(report: PipelineReport) -> bytes:
    """The page, as UTF-8."""
    begin, end = _template()
    title = html.escape(f"{report.pipeline} · checkpoints")
    data = msgspec.json.encode(_compact(report)).decode()
    for character, escape in _ESCAPES.items():
        data = data.replace(character, escape)
    return f"{begin.replace('<!--TITLE-->', title)}{data}{end}".encode()


def as_json(report: PipelineReport) -> dict[str, Any]:
    """The report for programs: as in the page, and each value with its name."""

    def measures(measured: Measured | None) -> dict[str, float] | None:
        return msgspec.structs.asdict(measured) if measured is not None else None

    details = [
        {
            "checkpoint_id": detail.checkpoint_id,
            "epoch": detail.epoch,
            "vertices": [
                {
                    "stages": vertex.stages,
                    "measured": measures(vertex.measured),
                    "instances": [
                        {"name": each.name, "measured": measures(each.measured), "finished": each.finished}
                        for each in vertex.instances
                    ],
                }
                for vertex in detail.vertices
            ],
        }
        for detail in report.details
    ]
    return {**msgspec.structs.asdict(report), "details": details}


def _compact(report: PipelineReport) -> dict[str, Any]:
    """The report with a list for each checkpoint, in the order of `columns`: the names of fields are written once."""
    rows = [msgspec.structs.astuple(row) for row in report.checkpoints]
    return {**msgspec.structs.asdict(report), "columns": CheckpointRow.__struct_fields__, "checkpoints": rows}


@cache
def _template() -> tuple[str, str]:
    """The page before and behind its data."""
    folder = files(__package__).joinpath("parts")
    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    for mark, name in _PARTS.items():
        text = text.replace(mark, folder.joinpath(name).read_text(encoding="utf-8"))
    begin, end = text.split("/*DATA*/")
    return begin, end


DETAILED = 200
"""Number of the newest checkpoints of which the report shows each instance."""
_DETAILED_INSTANCES = 10_000
"""Number of instances in all these checkpoints together from which on fewer of them are shown."""
_LONGEST_MESSAGE = 300
_QUANTITIES: tuple[tuple[str, str, Callable[[Measured], float]], ...] = (
    ("start delay", "s", lambda measured: measured.start_delay),
    ("alignment", "s", lambda measured: measured.alignment_seconds),
    ("sync", "s", lambda measured: measured.sync_seconds),
    ("async", "s", lambda measured: measured.async_seconds),
    ("new bytes", "B", lambda measured: measured.new_bytes),
    ("total bytes", "B", lambda measured: measured.total_bytes),
    ("in-flight bytes", "B", lambda measured: measured.in_flight_bytes),
)


def build_report(
    *,
    pipeline: str,
    url: str,
    entries: Entries,
    status: PipelineStatus | None,
    state: str,
    running_epoch: int | None,
    now: datetime,
    refresh_seconds: float | None = None,
    problems: Sequence[str] = (),
) -> PipelineReport:
    """The report of a pipeline.

    Args:
        pipeline: name of the pipeline.
        url: URL of its directory.
        entries: its history, each kind in order.
        status: content of `status.json`; None if there is none.
        state: what the pipeline does, in words.
        running_epoch: epoch of the run that owns the pipeline; None without one.
        now: wall clock.
        refresh_seconds: seconds after which the page is written again; None if it is not.
        problems: a text for each file that could not be read.
    """
    newest_first = sorted(entries.checkpoints, key=lambda entry: (entry.epoch, entry.checkpoint_id), reverse=True)
    completed = [entry for entry in newest_first if entry.status == "completed"]
    running = status is not None and status.epoch == running_epoch
    started = [event for event in entries.events if event.kind == "run_started"]
    found = runs(entries, running_epoch)
    return PipelineReport(
        pipeline=pipeline,
        storage=url,
        written_at=now.timestamp(),
        running=running_epoch is not None,
        state=state,
        refresh_seconds=refresh_seconds,
        counts=Counts(
            completed=len(completed),
            failed=len(newest_first) - len(completed),
            savepoints=sum(entry.kind == "savepoint" for entry in completed),
        ),
        pending=_pending(status) if status is not None and running else (),
        checkpoints=tuple(_row(entry) for entry in newest_first),
        details=tuple(_details(newest_first)),
        summary=tuple(_summary(completed)),
        stages=stages(status, entries.samples, running=running) if status is not None else (),
        edges=edges(status) if status is not None else (),
        series=series(entries.samples),
        runs=found,
        timeline=timeline(entries, found),
        settings=started[-1].settings if started else {},
        problems=tuple(problems),
    )


def _pending(status: PipelineStatus) -> tuple[PendingRow, ...]:
    return tuple(
        PendingRow(
            checkpoint_id=each.checkpoint_id,
            kind=each.kind,
            acknowledged=each.acknowledged,
            expected=each.expected,
            seconds=each.seconds,
        )
        for each in status.pending
    )


def _row(entry: CheckpointEntry) -> CheckpointRow:
    measured, message = entry.measured, entry.message
    return CheckpointRow(
        checkpoint_id=entry.checkpoint_id,
        epoch=entry.epoch,
        kind=entry.kind,
        status=entry.status,
        triggered_at=round(entry.triggered_at.timestamp(), 3),
        duration=round(entry.duration, 4),
        acknowledged=entry.acknowledged,
        expected=entry.expected,
        start_delay=round(measured.start_delay, 4),
        alignment_seconds=round(measured.alignment_seconds, 4),
        sync_seconds=round(measured.sync_seconds, 4),
        async_seconds=round(measured.async_seconds, 4),
        new_bytes=measured.new_bytes,
        total_bytes=measured.total_bytes,
        in_flight_bytes=measured.in_flight_bytes,
        trigger="stop" if entry.stops_job else "interval" if entry.periodic else "request or end of data",
        unaligned=entry.unaligned,
        reason=entry.reason,
        message=message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…",
        location=entry.location,
    )


def _details(newest_first: Sequence[CheckpointEntry]) -> Iterable[CheckpointDetail]:
    left = _DETAILED_INSTANCES
    for entry in newest_first[:DETAILED]:
        left -= sum(len(vertex.instances) for vertex in entry.vertices)
        if left < 0:
            return
        yield CheckpointDetail(checkpoint_id=entry.checkpoint_id, epoch=entry.epoch, vertices=entry.vertices)


def _summary(completed: Sequence[CheckpointEntry]) -> Iterable[SummaryRow]:
    if not completed:
        return
    yield _distribution((), "duration", "s", [entry.duration for entry in completed])
    for name, unit, value in _QUANTITIES:
        yield _distribution((), name, unit, [value(entry.measured) for entry in completed])
    vertices: dict[tuple[str, ...], list[Measured]] = {}
    for entry in completed:
        for vertex in entry.vertices:
            if vertex.measured is not None:
                vertices.setdefault(vertex.stages, []).append(vertex.measured)
    for chain, measures in vertices.items():
        yield _distribution(chain, "acknowledged after", "s", [measured.acknowledged_after for measured in measures])
        for name, unit, value in _QUANTITIES:
            yield _distribution(chain, name, unit, [value(measured) for measured in measures])


def _distribution(chain: tuple[str, ...], quantity: str, unit: str, values: Iterable[float]) -> SummaryRow:
    ordered = sorted(values)

    def percentile(percent: int) -> float:
        return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)]

    return SummaryRow(
        stages=chain,
        quantity=quantity,
        unit=unit,
        count=len(ordered),
        minimum=ordered[0],
        average=sum(ordered) / len(ordered),
        p50=percentile(50),
        p90=percentile(90),
        p99=percentile(99),
        maximum=ordered[-1],
    )
