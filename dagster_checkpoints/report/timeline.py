"""The runs of a pipeline and the events on the time line, from the entries of its history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from dagster_checkpoints.control.history import CheckpointEntry, Entries, EventEntry
from dagster_checkpoints.report.values import RunRow, TimelineRow

_ENDED_BY = {"end_of_data": "end of the data", "drain": "drained", "suspend": "suspended"}


def runs(entries: Entries, running_epoch: int | None) -> tuple[RunRow, ...]:
    """The runs, newest first.

    Args:
        entries: the history.
        running_epoch: epoch of the run that owns the pipeline now; None without one.
    """
    last_signs: dict[int, float] = {}
    for epoch, at in (
        *((entry.epoch, entry.ended_at.timestamp()) for entry in entries.checkpoints),
        *((sample.epoch, sample.at.timestamp()) for sample in entries.samples),
        *((event.epoch, event.at.timestamp()) for event in entries.events),
    ):
        last_signs[epoch] = max(at, last_signs.get(epoch, at))
    found = []
    for epoch, group in groupby(entries.events, key=lambda event: event.epoch):
        found.append(_run(epoch, tuple(group), last_signs[epoch], epoch == running_epoch))
    return tuple(reversed(found))


def _run(epoch: int, events: tuple[EventEntry, ...], last_sign: float, running: bool) -> RunRow:
    started = next((event for event in events if event.kind == "run_started"), None)
    ended = next((event for event in events if event.kind == "run_ended"), None)
    attempts = [event for event in events if event.kind == "job_started"]
    end, failed = ("", False) if running else ("no end recorded", True)
    if ended is not None:
        end, failed = _end(ended), ended.status in ("", "FAILED")
    return RunRow(
        epoch=epoch,
        run_id=started.run_id if started is not None else "",
        job_id=attempts[0].job_id if attempts else 0,
        started_at=events[0].at.timestamp(),
        ended_at=ended.at.timestamp() if ended is not None else None,
        last_sign_at=last_sign,
        restored=attempts[0].checkpoint_id if attempts else None,
        attempts=max((event.attempt for event in attempts), default=0),
        end=end,
        failed=failed,
    )


def _end(event: EventEntry) -> str:
    if not event.status:
        return "stopped before its job ended"
    return _ENDED_BY.get(event.ended_by, event.status.lower())


def timeline(entries: Entries, rows: Sequence[RunRow]) -> tuple[TimelineRow, ...]:
    """The events, newest first: those of the runs, savepoints, rescales, and runs without a recorded end.

    Args:
        entries: the history.
        rows: its runs.
    """
    found = [row for event in entries.events if (row := _of_event(event)) is not None]
    found += [_of_savepoint(entry) for entry in entries.checkpoints if entry.kind == "savepoint"]
    found += _rescales(entries.events)
    for run in rows:
        if run.ended_at is None and run.failed:
            title = f"run {run.run_id or run.epoch}: no end recorded"
            text = "Its process was killed, or did not reach the storage any more. The time is that of its last entry."
            found.append(TimelineRow(at=run.last_sign_at, epoch=run.epoch, kind="end", title=title, text=text, failed=True))
    return tuple(sorted(found, key=lambda row: (row.epoch, row.at), reverse=True))


def _of_event(event: EventEntry) -> TimelineRow | None:
    at, stages = event.at.timestamp(), ", ".join(event.stages)
    match event.kind:
        case "run_started":
            return TimelineRow(at=at, epoch=event.epoch, kind="run", title=f"run {event.run_id} began")
        case "job_started":
            start = "new start" if event.checkpoint_id is None else f"restored from {event.checkpoint_id}"
            attempt = f", attempt {event.attempt}" if event.attempt > 1 else ""
            title = f"job {event.job_id}{attempt}: {start}" + (f", stages {stages}" if stages else "")
            return TimelineRow(at=at, epoch=event.epoch, kind="start", title=title, text=event.location)
        case "restarting":
            title = f"restart of {stages or 'all unfinished stages'}"
            return TimelineRow(at=at, epoch=event.epoch, kind="restart", title=title, text=event.text, failed=True)
        case "stage_finished":
            return TimelineRow(at=at, epoch=event.epoch, kind="finish", title=f"stage {stages} finished")
        case "stopping":
            return TimelineRow(at=at, epoch=event.epoch, kind="stop", title=f"stop requested: {event.text}")
        case "run_ended":
            failed = event.status in ("", "FAILED")
            title = f"run ended: {_end(event)}"
            return TimelineRow(at=at, epoch=event.epoch, kind="end", title=title, text=event.text, failed=failed)


def _of_savepoint(entry: CheckpointEntry) -> TimelineRow:
    failed = entry.status == "failed"
    title = f"savepoint {entry.checkpoint_id}" + (" failed" if failed else " of a stop" if entry.stops_job else "")
    text = entry.message if failed else entry.location
    return TimelineRow(at=entry.ended_at.timestamp(), epoch=entry.epoch, kind="savepoint", title=title, text=text, failed=failed)


def _rescales(events: Sequence[EventEntry]) -> list[TimelineRow]:
    """The starts of runs that continued a job with other numbers of instances than the run before them."""
    found: list[TimelineRow] = []
    before: EventEntry | None = None
    job = 0
    for epoch, group in groupby(events, key=lambda event: event.epoch):
        run = tuple(group)
        started = next((event for event in run if event.kind == "run_started"), None)
        first = next((event for event in run if event.kind == "job_started"), None)
        if started is None or first is None:
            continue
        if before is not None and first.job_id == job and first.checkpoint_id is not None:
            changed = [
                f"{stage} {before.instances[stage]} to {number}"
                for stage, number in started.instances.items()
                if before.instances.get(stage, number) != number
            ]
            if changed:
                title = f"rescaled: {', '.join(changed)}"
                found.append(TimelineRow(at=first.at.timestamp(), epoch=epoch, kind="rescale", title=title))
        before, job = started, first.job_id
    return found
