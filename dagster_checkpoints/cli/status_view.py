"""How a pipeline runs, from `status.json` and `state.json`: as JSON and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster_checkpoints.cli.output import (
    NOTHING,
    age_in_words,
    bytes_in_words,
    facts,
    moment_in_words,
    row,
    seconds_in_words,
    table,
)
from dagster_checkpoints.control import CompletedCheckpointStatus, InstanceStatus, PipelineStatus, StageStatus
from dagster_checkpoints.storage import PipelineState, describe_end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

_BAR = 24


def current(state: PipelineState, status: PipelineStatus | None) -> PipelineStatus | None:
    """The status, if it is that of the run that owns the pipeline, and not one that an earlier run has left behind."""
    if status is None or state.lease is None or status.epoch != state.epoch:
        return None
    return status


def next_start(state: PipelineState | None) -> str | None:
    """The location that the next run begins from by default; None if it is a new start."""
    if state is None or state.newest is None:
        return None
    over = state.job.status in ("FINISHED", "NONE") and state.job.ended_by != "suspend"
    return None if over else state.newest.location


def status_as_json(state: PipelineState, status: PipelineStatus | None) -> dict[str, Any]:
    """Everything that is known."""
    return {
        "pipeline": state.pipeline,
        "running": state.lease is not None,
        "owner": state.lease.owner if state.lease else None,
        "epoch": state.epoch,
        "job": state.job,
        "newest": state.newest,
        "next_start": next_start(state),
        "status": current(state, status),
    }


def status_as_text(
    state: PipelineState, status: PipelineStatus | None, rates: Mapping[str, float] | None = None
) -> list[RenderableType]:
    """A few lines and a table of stages.

    Args:
        rates: rows a second, by stage; the table has a column of them if there are any.
    """
    from rich.text import Text

    told = current(state, status)
    title = Text.assemble((state.pipeline, "bold"), "  ", _phase(state, told))
    if state.lease is None:
        start = next_start(state)
        more = facts(("latest job", describe_end(state)), ("next run", f"begins from {start}" if start else "is a new start"))
        return [title, more]
    owner = state.lease.owner
    run = f"{owner.run_id} on {owner.host} (process {owner.pid}) since {moment_in_words(state.lease.acquired_at)} UTC"
    if told is None:
        more = facts(("run", run), ("newest", state.newest.location if state.newest else "no checkpoint yet"))
        return [title, more, Text("The run has not said yet how it goes.")]
    about = facts(
        ("run", run),
        ("job", f"{told.job_id}" + (f", attempt {told.attempt}" if told.attempt > 1 else "")),
        ("roots", ", ".join(told.roots)),
        ("newest", _last(told.last_checkpoint) if told.last_checkpoint else "no checkpoint in this run yet"),
        *_slowest(told.last_checkpoint),
        *_counts(told),
    )
    return [title, about, *_under_way(told), Text(""), _stages(told, rates)]


def _phase(state: PipelineState, told: PipelineStatus | None) -> tuple[str, str]:
    if state.lease is None:
        return ("not running", "yellow")
    if told is None:
        return ("starting", "yellow")
    return (told.phase, "green" if told.phase == "running" else "yellow")


def _last(last: CompletedCheckpointStatus) -> str:
    size = f", {bytes_in_words(last.total_bytes)}, {bytes_in_words(last.new_bytes)} of it new" if last.total_bytes else ""
    return (
        f"{last.kind} {last.checkpoint_id}, {age_in_words(last.completed_at)} ago, took {seconds_in_words(last.duration)}{size}"
    )


def _slowest(last: CompletedCheckpointStatus | None) -> list[tuple[str, str]]:
    """What the newest checkpoint waited for, where there is a choice."""
    if last is None or len(last.parts) < 2:
        return []
    part = max(last.parts, key=lambda part: part.acknowledged_after)
    times = ((part.alignment_seconds, "alignment"), (part.sync_seconds, "sync"), (part.async_seconds, "async"))
    taken = ", ".join(f"{what} {seconds_in_words(seconds)}" for seconds, what in times)
    return [("slowest", f"{' + '.join(part.stages)}, acknowledged after {seconds_in_words(part.acknowledged_after)} ({taken})")]


def _counts(told: PipelineStatus) -> list[tuple[str, str]]:
    made, failure = told.checkpoints, told.last_failure
    if made is None:
        return []
    savepoints = f" ({made.savepoints} of them savepoints)" if made.savepoints else ""
    said = f"{made.completed} completed{savepoints}, {made.failed} failed"
    if made.completed:
        took = ((made.duration_p50, "p50"), (made.duration_p99, "p99"), (made.duration_max, "at most"))
        said += "; " + ", ".join(f"{seconds_in_words(seconds)} {what}" for seconds, what in took)
    lines = [("in this run", said)]
    if failure is not None:
        ago = age_in_words(failure.failed_at)
        lines.append(("latest failure", f"{failure.checkpoint_id}, {ago} ago: {failure.message} ({failure.reason})"))
    return lines


def _under_way(told: PipelineStatus) -> list[RenderableType]:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    lines: list[RenderableType] = []
    if told.stop is not None:
        how = "drain" if told.stop.drain else "suspend"
        state = told.stop.state.lower().replace("_", " ")
        lines.append(Text(f"Stopping ({how}): {state}; request {told.stop.request_id}", style="yellow"))
    if told.pending:
        made = Table.grid(padding=(0, 2))
        for pending in told.pending:
            made.add_row(
                Text(f"{pending.kind} {pending.checkpoint_id}"),
                ProgressBar(total=max(pending.expected, 1), completed=pending.acknowledged, width=_BAR),
                Text(f"{pending.acknowledged} of {pending.expected} tasks, {seconds_in_words(pending.seconds)}"),
            )
        lines.append(made)
    return lines


def _stages(told: PipelineStatus, rates: Mapping[str, float] | None) -> RenderableType:
    late = any(stage.late_rows for stage in told.stages)
    more = (("rows/s",) if rates is not None else ()) + (("late rows",) if late else ())
    right = ("rows", "rows/s", "late rows")
    made = table("stage", "instance", "state", "rows", *more, "watermark (UTC)", right=right, keep=("stage", "instance"))
    inside = {stage for chain in told.chains for stage in chain[:-1]}  # nobody counts rows, or watermarks, within a query
    for stage in told.stages:
        count = [f"{stage.rows:,}" if stage.name not in inside else NOTHING]
        if rates is not None:
            count.append(_rate(rates, stage) if stage.name not in inside else NOTHING)
        if late:
            count.append(f"{stage.late_rows:,}")
        if stage.finished or not stage.instances:
            made.add_row(*row(stage.name, _names(stage), "finished", *count, "", style="dim"))
            continue
        for number, instance in enumerate(stage.instances):
            name, numbers = ("", [""] * len(count)) if number else (stage.name, count)
            watermark = _watermark(instance) if stage.name not in inside else NOTHING
            made.add_row(*row(name, instance.name, _state(instance), *numbers, watermark))
    return made


def _rate(rates: Mapping[str, float], stage: StageStatus) -> str:
    return f"{rates[stage.name]:,.0f}" if rates.get(stage.name) else ""


def _names(stage: StageStatus) -> str:
    if not stage.instances:
        return ""
    return stage.instances[0].name if len(stage.instances) == 1 else f"all {len(stage.instances)}"


def _state(instance: InstanceStatus) -> str:
    state = instance.state.lower()
    if instance.state == "RUNNING" and instance.end_of_data:
        return "at end of data"
    if instance.state == "RUNNING" and instance.caught_up is not None:
        return "caught up" if instance.caught_up else "behind"
    return state


def _watermark(instance: InstanceStatus) -> str:
    return moment_in_words(instance.watermark_ms / 1000) if instance.watermark_ms is not None else NOTHING
