"""The progress of a pipeline, from `status.json` and `state.json`: as JSON and as tables."""

from __future__ import annotations

from datetime import UTC, datetime
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
    watermark_in_words,
)
from dagster_checkpoints.control.last_sign import LastSign, last_sign
from dagster_checkpoints.control.status import CompletedCheckpointStatus, InstanceStatus, PipelineStatus, StageStatus
from dagster_checkpoints.execution.pipeline_state import PipelineState, describe_end
from dagster_checkpoints.execution.source_answers import Silence, silence_in_short, silence_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

_BAR = 24


def current(state: PipelineState, status: PipelineStatus | None) -> PipelineStatus | None:
    """The status, if the run that owns the pipeline wrote it; None for the status of an earlier run."""
    if status is None or state.lease is None or status.epoch != state.epoch:
        return None
    return status


def next_start(state: PipelineState | None) -> str | None:
    """The location that the next run restores by default; None if the next run is a new start."""
    if state is None or state.newest is None:
        return None
    ended = state.job.status in ("FINISHED", "NONE") and state.job.ended_by != "suspend"
    return None if ended else state.newest.location


def status_as_json(state: PipelineState, status: PipelineStatus | None) -> dict[str, Any]:
    """The content of both files, as one document, with the age of the run's last sign."""
    own = current(state, status)
    sign = last_sign(state, own, datetime.now(UTC))
    return {
        "pipeline": state.pipeline,
        "running": sign is not None and not sign.dead,
        "owner": state.lease.owner if state.lease else None,
        "epoch": state.epoch,
        "job": state.job,
        "newest": state.newest,
        "next_start": next_start(state),
        "last_sign": sign,
        "status": own,
    }


def status_as_text(
    state: PipelineState, status: PipelineStatus | None, rates: Mapping[str, float] | None = None
) -> list[RenderableType]:
    """A few lines and a table of stages.

    Args:
        state: content of `state.json`.
        status: content of `status.json`; None if no run has written it.
        rates: rows per second, by stage; None leaves out that column.
    """
    from rich.text import Text

    status = current(state, status)
    title = Text.assemble((state.pipeline, "bold"), "  ", _phase(state, status))
    if state.lease is None:
        start = next_start(state)
        fields = facts(("latest job", describe_end(state)), ("next run", f"begins from {start}" if start else "is a new start"))
        return [title, fields]
    owner = state.lease.owner
    run = f"{owner.run_id} on {owner.host} (process {owner.pid}) since {moment_in_words(state.lease.acquired_at)} UTC"
    if status is None:
        fields = facts(("run", run), ("newest", state.newest.location if state.newest else "no checkpoint yet"))
        return [title, fields, Text("The run has not written its status yet.")]
    fields = facts(
        ("run", run),
        ("job", f"{status.job_id}" + (f", attempt {status.attempt}" if status.attempt > 1 else "")),
        ("roots", ", ".join(status.roots)),
        ("newest", _newest(state, status.last_checkpoint)),
        *_slowest(status.last_checkpoint),
        *_counts(status),
    )
    return [title, fields, *_silences(status), *_under_way(status), Text(""), _stages(status, rates)]


def _phase(state: PipelineState, status: PipelineStatus | None) -> tuple[str, str]:
    if state.lease is None:
        return ("not running", "yellow")
    phase, sign = status.phase if status is not None else "starting", last_sign(state, status, datetime.now(UTC))
    if sign is not None and sign.dead:
        return (sign_in_words(sign), "red")
    if sign is not None and sign.overdue:
        return (f"{phase}, {sign_in_words(sign)}", "yellow")
    return (phase, "green" if phase == "running" else "yellow")


def death_in_short(sign: LastSign) -> str:
    """What is said of a dead run in place of its phase."""
    return "died" if sign.gone else f"lease ended {seconds_in_words(sign.lease_ended or 0.0)} ago"


def sign_in_words(sign: LastSign) -> str:
    """What an overdue sign says of the run."""
    last = f"last sign {seconds_in_words(sign.seconds)} ago"
    if sign.dead:
        why = "the run's process has ended" if sign.gone else "the run has died, or does not reach the storage"
        return f"{death_in_short(sign)}, {last}: {why}, so another run may take the pipeline over"
    assert sign.status_seconds is not None
    if sign.seconds < sign.status_seconds:
        return f"last status {seconds_in_words(sign.status_seconds)} ago: the run is busy, or its main thread has stopped"
    return f"{last}: the run is busy or dead"


def _silences(status: PipelineStatus) -> list[RenderableType]:
    """The sources that do not answer: a line for those of one query, with the longest silence of its instances."""
    from rich.text import Text

    found: dict[tuple[str, ...], tuple[list[str], Silence]] = {}
    for chain in status.chains:
        for stage in (stage for stage in status.stages if stage.name in chain):
            for silence in (instance.silence for instance in stage.instances if instance.silence is not None):
                names, longest = found.setdefault(chain, ([], Silence(0.0, "other", "")))
                seconds = max(longest.seconds, silence.seconds)
                if stage.name not in names:
                    names.append(stage.name)
                found[chain] = names, Silence(seconds, silence.doing, silence.words, silence.local)
    return [Text(silence_text(names, silence), style="yellow") for names, silence in found.values()]


def _newest(state: PipelineState, last: CompletedCheckpointStatus | None) -> str:
    """The newest checkpoint of the run: the state names it when it is complete, the status some seconds later."""
    named = state.newest
    if named is not None and named.epoch == state.epoch and (last is None or named.checkpoint_id > last.checkpoint_id):
        return f"{named.kind} {named.checkpoint_id}, {age_in_words(named.completed_at)} ago"
    return _checkpoint_summary(last) if last is not None else "no checkpoint in this run yet"


def _checkpoint_summary(last: CompletedCheckpointStatus) -> str:
    size = f", {bytes_in_words(last.total_bytes)}, {bytes_in_words(last.new_bytes)} of it new" if last.total_bytes else ""
    return (
        f"{last.kind} {last.checkpoint_id}, {age_in_words(last.completed_at)} ago, took {seconds_in_words(last.duration)}{size}"
    )


def _slowest(last: CompletedCheckpointStatus | None) -> list[tuple[str, str]]:
    """The vertex that acknowledged the newest checkpoint last, if there are several."""
    if last is None or len(last.parts) < 2:
        return []
    part = max(last.parts, key=lambda part: part.acknowledged_after)
    times = ((part.alignment_seconds, "alignment"), (part.sync_seconds, "sync"), (part.async_seconds, "async"))
    taken = ", ".join(f"{name} {seconds_in_words(seconds)}" for seconds, name in times)
    return [("slowest", f"{' + '.join(part.stages)}, acknowledged after {seconds_in_words(part.acknowledged_after)} ({taken})")]


def _counts(status: PipelineStatus) -> list[tuple[str, str]]:
    counts, failure = status.checkpoints, status.last_failure
    if counts is None:
        return []
    savepoints = f" ({counts.savepoints} of them savepoints)" if counts.savepoints else ""
    summary = f"{counts.completed} completed{savepoints}, {counts.failed} failed"
    if counts.completed:
        durations = ((counts.duration_p50, "p50"), (counts.duration_p99, "p99"), (counts.duration_max, "at most"))
        summary += "; " + ", ".join(f"{seconds_in_words(seconds)} {name}" for seconds, name in durations)
    lines = [("in this run", summary)]
    if failure is not None:
        ago = age_in_words(failure.failed_at)
        lines.append(("latest failure", f"{failure.checkpoint_id}, {ago} ago: {failure.message} ({failure.reason})"))
    return lines


def _under_way(status: PipelineStatus) -> list[RenderableType]:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    lines: list[RenderableType] = []
    if status.stop is not None:
        kind = "drain" if status.stop.drain else "suspend"
        lines.append(Text(f"Stopping ({kind}): {status.stop.text}; request {status.stop.request_id}", style="yellow"))
    if status.pending:
        grid = Table.grid(padding=(0, 2))
        for pending in status.pending:
            grid.add_row(
                Text(f"{pending.kind} {pending.checkpoint_id}"),
                ProgressBar(total=max(pending.expected, 1), completed=pending.acknowledged, width=_BAR),
                Text(f"{seconds_in_words(pending.seconds)}: {pending.text}"),
            )
        lines.append(grid)
    return lines


def _stages(status: PipelineStatus, rates: Mapping[str, float] | None) -> RenderableType:
    late = any(stage.late_rows for stage in status.stages)
    split = any(stage.splits is not None for stage in status.stages)
    optional_columns = (
        (("rows/s",) if rates is not None else ()) + (("late rows",) if late else ()) + (("splits",) if split else ())
    )
    right = ("rows", "rows/s", "late rows", "splits")
    stage_table = table(
        "stage", "instance", "state", "rows", *optional_columns, "watermark (UTC)", right=right, keep=("stage", "instance")
    )
    fused = {stage.name for stage in status.stages if stage.fused}
    inside = {stage for chain in status.chains for stage in chain[:-1]} - fused  # watermarks are not known within a query
    for stage in status.stages:
        count = [f"{stage.rows:,}" if stage.rows is not None else NOTHING]
        if rates is not None:
            count.append(_rate(rates, stage))
        if late:
            count.append(f"{stage.late_rows:,}")
        if split:
            count.append(_splits(stage))
        if stage.finished or not stage.instances:
            stage_table.add_row(*row(stage.name, _names(stage), "finished", *count, "", style="dim"))
            continue
        for number, instance in enumerate(stage.instances):
            name, numbers = ("", [""] * len(count)) if number else (stage.name, count)
            watermark = watermark_in_words(instance.watermark_ms) if stage.name not in inside else NOTHING
            stage_table.add_row(*row(name, instance.name, _state(instance), *numbers, watermark))
    return stage_table


def _rate(rates: Mapping[str, float], stage: StageStatus) -> str:
    return f"{rates[stage.name]:,.0f}" if rates.get(stage.name) else ""


def _splits(stage: StageStatus) -> str:
    """The splits that are read, of those discovered so far."""
    if stage.splits is None:
        return ""
    return f"{stage.splits.finished:,} of {stage.splits.discovered:,}{'' if stage.splits.complete else ' so far'}"


def _names(stage: StageStatus) -> str:
    if not stage.instances:
        return ""
    return stage.instances[0].name if len(stage.instances) == 1 else f"all {len(stage.instances)}"


def _state(instance: InstanceStatus) -> str:
    state = instance.state.lower()
    if instance.silence is not None:
        return silence_in_short(instance.silence.doing)
    if instance.state == "RUNNING" and instance.end_of_data:
        return "at end of data"
    if instance.state == "RUNNING" and instance.caught_up is not None:
        if instance.caught_up:
            return "caught up"
        return f"behind by {instance.rows_behind:,} rows" if instance.rows_behind else "behind"
    return state
