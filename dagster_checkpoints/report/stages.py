"""The graph of the report and the curves of its stages, from a status and from the samples of the history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dagster_checkpoints.control.history import HistorySample
from dagster_checkpoints.control.status import PipelineStatus, StageStatus
from dagster_checkpoints.report.values import EdgeRow, StageRow, StageSeries

_POINTS = 240
"""Number of points of a curve: more than a screen shows are not written."""


def edges(status: PipelineStatus) -> tuple[EdgeRow, ...]:
    """The edges between the stages; of a status of an earlier release only those within chains."""
    known = [
        EdgeRow(source=source, target=stage.name, how=how)
        for stage in status.stages
        for source, how in (stage.inputs or {}).items()
    ]
    if known:
        return tuple(known)
    return tuple(EdgeRow(source=a, target=b, how="pointwise") for chain in status.chains for a, b in pairwise(chain))


def stages(status: PipelineStatus, samples: Sequence[HistorySample], *, running: bool) -> tuple[StageRow, ...]:
    """The stages, in topological order, with their places in a drawing from left to right.

    Args:
        status: the status of the latest run.
        samples: the samples of the history.
        running: whether that run still owns the pipeline.
    """
    places = _places(status)
    rates = _rates_now(status, samples) if running else {}
    chains = {name: number for number, chain in enumerate(status.chains) for name in chain}
    roots = {root.partition("[")[0] for root in status.roots}
    now = status.updated_at.timestamp()
    found = []
    for number, stage in enumerate(status.stages):
        watermark = _watermark(stage)
        behind = [each.rows_behind for each in stage.instances if each.rows_behind is not None]
        column, line = places[stage.name]
        found.append(
            StageRow(
                name=stage.name,
                state=_state(stage, running=running),
                instances=max(len(stage.instances), 1),
                rows=stage.rows,
                rows_per_second=rates.get(stage.name) if not stage.finished else None,
                rows_behind=sum(behind) if behind else None,
                late_rows=stage.late_rows,
                watermark=watermark,
                watermark_delay=now - watermark if watermark is not None and running and not stage.finished else None,
                column=column,
                line=line,
                root=stage.name in roots,
                chain=chains.get(stage.name, -1 - number),
            )
        )
    return tuple(found)


def series(samples: Sequence[HistorySample]) -> tuple[StageSeries, ...]:
    """The curves of all stages, in the order of their first samples."""
    step = max(1, -(-len(samples) // _POINTS))
    picked = _with_breaks(list(samples[::-step])[::-1])
    names = dict.fromkeys(name for sample in picked for name in sample.stages)
    return tuple(_series(name, picked) for name in names)


def _with_breaks(samples: Sequence[HistorySample]) -> list[HistorySample]:
    """The samples, with an empty one between those of two runs: the curves are interrupted there."""
    found: list[HistorySample] = []
    for sample in samples:
        if found and found[-1].epoch != sample.epoch:
            found.append(HistorySample(sample.at, sample.epoch, {}))
        found.append(sample)
    return found


def _series(name: str, samples: Sequence[HistorySample]) -> StageSeries:
    rates: list[float | None] = [None]
    rates += [_rate(before, after, name) for before, after in pairwise(samples)]
    of_stage = [sample.stages.get(name) for sample in samples]
    return StageSeries(
        name=name,
        times=tuple(sample.at.timestamp() for sample in samples),
        rows_per_second=tuple(rates),
        rows_behind=tuple(stage.rows_behind if stage is not None else None for stage in of_stage),
        watermark_delay=tuple(
            sample.at.timestamp() - stage.watermark_ms / 1000 if stage is not None and stage.watermark_ms is not None else None
            for sample, stage in zip(samples, of_stage, strict=True)
        ),
    )


def _rate(before: HistorySample, after: HistorySample, name: str) -> float | None:
    """Rows per second between two samples; None across runs, and if a restart has taken rows back."""
    old, new = before.stages.get(name), after.stages.get(name)
    seconds = (after.at - before.at).total_seconds()
    if before.epoch != after.epoch or old is None or new is None or old.rows is None or new.rows is None or seconds <= 0:
        return None
    return (new.rows - old.rows) / seconds if new.rows >= old.rows else None


def _rates_now(status: PipelineStatus, samples: Sequence[HistorySample]) -> dict[str, float]:
    own = [sample for sample in samples if sample.epoch == status.epoch][-2:]
    if len(own) < 2:
        return {}
    found = {stage.name: _rate(own[0], own[1], stage.name) for stage in status.stages}
    return {name: rate for name, rate in found.items() if rate is not None}


def _watermark(stage: StageStatus) -> float | None:
    """The lowest watermark of the instances that still emit rows, seconds since 1970; None if one of them has none."""
    running = [each for each in stage.instances if not each.end_of_data]
    known = [each.watermark_ms for each in running if each.watermark_ms is not None]
    return min(known) / 1000 if known and len(known) == len(running) else None


def _state(stage: StageStatus, *, running: bool) -> str:
    if stage.finished:
        return "finished"
    if not running:
        return "not running"
    if any(each.silence is not None for each in stage.instances):
        return "no answer"
    if any(each.state == "FINISHED" for each in stage.instances):
        return "partly finished"
    if stage.instances and all(each.end_of_data for each in stage.instances):
        return "at end of data"
    sources = [each.caught_up for each in stage.instances if each.caught_up is not None and not stage.inputs]
    return ("caught up" if all(sources) else "behind") if sources else "running"


def _places(status: PipelineStatus) -> dict[str, tuple[int, int]]:
    """By stage its column, one behind the last of its inputs, and its line within the column.

    A stage takes the line of its first input if that is free: chains become straight lines.
    """
    inputs: dict[str, list[str]] = {stage.name: [] for stage in status.stages}
    for edge in edges(status):
        if edge.source in inputs and edge.target in inputs:
            inputs[edge.target].append(edge.source)
    places: dict[str, tuple[int, int]] = {}
    taken: set[tuple[int, int]] = set()
    for stage in status.stages:
        before = [places[name] for name in inputs[stage.name] if name in places]
        column = max((place[0] + 1 for place in before), default=0)
        line = min((place[1] for place in before), default=0)
        while (column, line) in taken:
            line += 1
        places[stage.name] = (column, line)
        taken.add((column, line))
    return places
