"""The report of a long history: its time and size. Also the made-up history itself, for tests."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bench.environment import Environment
from bench.measures import Measure, below
from dagster_checkpoints.control.history import (
    CheckpointEntry,
    Entries,
    EventEntry,
    HistorySample,
    HistorySegments,
    InstancePart,
    Measured,
    Setting,
    StageSample,
    VertexParts,
    read_history,
)
from dagster_checkpoints.control.status import CheckpointCountsStatus, InstanceStatus, PendingStatus, PipelineStatus, StageStatus
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.report.building import build_report, page
from dagster_checkpoints.report.values import PipelineReport
from dagster_checkpoints.storage import CheckpointStorage, open_store

BEGIN = datetime(2026, 1, 31, 6, 0, tzinfo=UTC)
_CHAINS = (
    (("history",), ("0",)),
    (("live",), ("EWR", "JFK", "LGA")),
    (("airlines",), ("0",)),
    (("departures", "delays"), ("0", "1", "2", "3")),
    (("alerts",), ("0",)),
)
_INPUTS = {
    "departures": {"history": "all to all", "live": "all to all", "airlines": "table"},
    "delays": {"departures": "pointwise"},
    "alerts": {"delays": "pointwise"},
}
_RUN_ENDS = (("FINISHED", "suspend", ""), ("FAILED", "", "Stage 'delays' failed 3 times in a row: connection refused"))


def history_of(checkpoints: int, seed: int = 7) -> Entries:
    """A history of three runs with this many checkpoints, one a minute: failures, restarts, savepoints, a rescale, a kill."""
    chance = random.Random(seed)
    entries = [_checkpoint(number, 1 + number * 3 // (checkpoints + 1), chance) for number in range(1, checkpoints + 1)]
    events: list[EventEntry] = []
    for epoch in (1, 2, 3):
        own = [entry for entry in entries if entry.epoch == epoch]
        if own:
            events += _events(epoch, own, chance)
    return Entries(tuple(entries), tuple(sorted(events, key=lambda event: event.at)), _samples(entries, chance))


def _checkpoint(number: int, epoch: int, chance: random.Random) -> CheckpointEntry:
    at = BEGIN + timedelta(minutes=number) + timedelta(hours=epoch)
    fails, savepoint = chance.random() < 0.02, number % 60 == 0
    vertices = []
    for stages, names in _CHAINS:
        instances = []
        for name in names:
            finished, silent = stages[0] in ("history", "airlines"), fails and name in ("2", "3")
            measured = None if finished or silent else _measured(number, stages, chance)
            instances.append(InstancePart(name, measured, finished))
        known = [part.measured for part in instances if part.measured is not None]
        vertices.append(VertexParts(stages, Measured.of_all(known) if known else None, tuple(instances)))
    measured = Measured.of_all(vertex.measured for vertex in vertices if vertex.measured is not None)
    seconds = 45.0 if fails else measured.acknowledged_after + chance.uniform(0.05, 0.2)
    return CheckpointEntry(
        checkpoint_id=number,
        epoch=epoch,
        kind="savepoint" if savepoint else "checkpoint",
        status="failed" if fails else "completed",
        triggered_at=at,
        ended_at=at + timedelta(seconds=seconds),
        acknowledged=sum(part.measured is not None for vertex in vertices for part in vertex.instances),
        expected=sum(not part.finished for vertex in vertices for part in vertex.instances),
        periodic=not savepoint,
        location="" if fails else f"{'savepoints/savepoint' if savepoint else 'checkpoints/chk'}-{number}-{epoch}",
        reason="CHECKPOINT_EXPIRED" if fails else "",
        message="not complete within 45 s: departures[2], departures[3] have not acknowledged" if fails else "",
        measured=measured,
        vertices=tuple(vertices),
    )


def _measured(number: int, stages: tuple[str, ...], chance: random.Random) -> Measured:
    heavy = 3.0 if stages[0] == "departures" else 0.3
    times = (
        chance.uniform(0.02, 0.3),
        chance.uniform(0, 0.4) * heavy * (3 if number % 97 < 6 else 1),
        chance.uniform(0.01, 0.06),
        chance.uniform(0.05, 0.25) * heavy,
    )
    delay, alignment, sync, stored = (round(seconds, 4) for seconds in times)
    total = int(heavy * (4e6 + 6e3 * (number % 3000) + chance.uniform(0, 4e5)))
    in_flight = int(chance.uniform(0, 3e5)) if number % 97 < 6 else 0
    new = int(total * chance.uniform(0.02, 0.12))
    return Measured(round(delay + alignment + sync + stored, 4), delay, alignment, sync, stored, new, total, in_flight)


def _events(epoch: int, own: list[CheckpointEntry], chance: random.Random) -> list[EventEntry]:
    first, last = own[0].triggered_at, own[-1].ended_at
    begin = first - timedelta(seconds=50)
    instances = {stage: len(names) for stages, names in _CHAINS for stage in stages}
    instances |= {"departures": 2, "delays": 2} if epoch == 1 else {}
    settings: dict[str, Setting] = {
        "interval": 60.0,
        "timeout": 45.0,
        "max_concurrent": 1,
        "retained": 3,
        "mode": "exactly_once",
        "unaligned": False,
        "aligned_checkpoint_timeout": None,
        "failover": "region",
        "until": "end",
    }
    restored = own[0].checkpoint_id - 1 or None
    found = [
        EventEntry(at=begin, epoch=epoch, kind="run_started", run_id=f"{'3fa90c'[epoch:]}{epoch}1d7", instances=instances,
                   settings=settings),
        EventEntry(at=begin + timedelta(seconds=20), epoch=epoch, kind="job_started", job_id=4, attempt=1, checkpoint_id=restored,
                   location=f"checkpoints/chk-{restored}-{epoch - 1}" if restored else ""),
    ]  # fmt: skip
    for attempt, entry in enumerate(chance.sample(own, min(2, len(own))), 2):
        at, before = entry.triggered_at, entry.checkpoint_id - 1
        cause = "ConnectionResetError: [Errno 104] Connection reset by peer\n  in stage 'live', instance 'JFK'"
        stages = ("live", "departures", "delays")
        found += [
            EventEntry(at=at, epoch=epoch, kind="restarting", text=cause, attempt=attempt, stages=stages),
            EventEntry(at=at + timedelta(seconds=9), epoch=epoch, kind="job_started", job_id=4, attempt=attempt,
                       checkpoint_id=before, location=f"checkpoints/chk-{before}-{epoch}"),
        ]  # fmt: skip
    if epoch == 1:
        found.append(EventEntry(at=first + timedelta(seconds=40), epoch=epoch, kind="stage_finished", stages=("history",)))
        found.append(EventEntry(at=last, epoch=epoch, kind="stopping", text="suspend"))
        found.append(
            EventEntry(at=last + timedelta(seconds=3), epoch=epoch, kind="run_ended", status="FINISHED", ended_by="suspend")
        )
    return found


def _samples(entries: list[CheckpointEntry], chance: random.Random) -> tuple[HistorySample, ...]:
    found, rows, behind = [], 0.0, 4000.0
    for entry in entries:
        rows += max(0.0, chance.gauss(21_000, 5_000))
        behind = max(0.0, behind + chance.gauss(0, 400) - 20)
        late = chance.uniform(8, 30)
        seen = (("history", 300_000, None, None), ("live", rows, behind, late), ("departures", rows * 0.93, None, late + 60),
                ("delays", rows * 0.11, None, late + 65), ("alerts", rows * 0.004, None, late + 66))  # fmt: skip
        at = entry.triggered_at
        stages = {
            name: StageSample(
                int(emitted),
                int(lag) if lag is not None else None,
                int((at.timestamp() - delay) * 1000) if delay is not None else None,
            )
            for name, emitted, lag, delay in seen
        }
        found.append(HistorySample(at, entry.epoch, stages))
    return tuple(found)


def status_of(entries: Entries, epoch: int) -> PipelineStatus:
    """The status of the run that writes this history, while it runs."""
    last = entries.samples[-1]
    found = []
    for stages, names in _CHAINS:
        for stage in stages:
            finished, sample = stage in ("history", "airlines"), last.stages.get(stage, StageSample(16))
            instances = tuple(
                InstanceStatus(
                    name=name,
                    state="FINISHED" if finished else "RUNNING",
                    end_of_data=finished,
                    caught_up=stage != "live" or name != "JFK",
                    watermark_ms=None if finished else sample.watermark_ms,
                    rows_behind=sample.rows_behind if name == "JFK" else 0 if stage == "live" else None,
                )
                for name in names
            )
            found.append(
                StageStatus(name=stage, finished=finished, rows=sample.rows, instances=instances, inputs=_INPUTS.get(stage, {}))
            )
    pending = PendingStatus(
        checkpoint_id=entries.checkpoints[-1].checkpoint_id + 1, kind="checkpoint", acknowledged=5, expected=8, seconds=1.4
    )
    return PipelineStatus(
        pipeline="flights",
        run_id="0c31d7",
        epoch=epoch,
        phase="running",
        sequence=1,
        updated_at=last.at + timedelta(seconds=12),
        started_at=BEGIN,
        job_id=4,
        roots=("live[EWR]", "live[JFK]", "live[LGA]"),
        chains=tuple(stages for stages, _ in _CHAINS),
        stages=tuple(found),
        pending=(pending,),
        checkpoints=CheckpointCountsStatus(),
        checkpoint_interval=60.0,
    )


def report_of(entries: Entries, **fields: Any) -> PipelineReport:
    """The report of this history, while its last run lives."""
    status = status_of(entries, entries.checkpoints[-1].epoch)
    values: dict[str, Any] = {
        "pipeline": "flights",
        "url": "s3://example-bucket/checkpoints/flights",
        "entries": entries,
        "status": status,
        "state": "running",
        "running_epoch": status.epoch,
        "now": status.updated_at,
    }
    return build_report(**{**values, **fields})


def measure(environment: Environment) -> Iterator[Measure]:
    """The report of 10,000 checkpoints of 10 instances, as `dagster-checkpoints report` makes it of a local storage."""
    made = history_of(10_000)
    with tempfile.TemporaryDirectory() as folder, CheckpointStorage(open_store(folder), "flights") as storage:
        storage.acquire(Owner(run_id="bench", host="bench", pid=1))
        segments = HistorySegments(storage, 3)
        seconds = []
        for begin in range(0, 10_000, 50):
            started = time.perf_counter()
            segments.append(Entries(made.checkpoints[begin : begin + 50], (), made.samples[begin : begin + 50]))
            seconds.append(time.perf_counter() - started)
        segments.append(Entries((), made.events, ()))
        started = time.perf_counter()
        entries, problems = read_history(storage)
        read = time.perf_counter() - started
        report = report_of(entries, problems=problems)
        content = page(report)
        took = time.perf_counter() - started
        stored = sum(file.stat().st_size for file in Path(folder).rglob("history/*"))
        started = time.perf_counter()
        latest = segments.latest()
        page(report_of(latest))
        live = time.perf_counter() - started
    checkpoints = len(report.checkpoints)
    yield below(
        "report", f"the page of {checkpoints:,} checkpoints, read and written", took, "s", 2.0, f"{read:.2f} s of it reading"
    )
    yield below("report", "its size", len(content) / 1e6, "MB", 5.0)
    yield Measure("report", f"the page that a run writes, of {len(latest.checkpoints):,} checkpoints", live, "s")
    yield Measure("report", "the longest write of a segment", max(seconds), "s")
    yield Measure("report", "the stored history", stored / 1e6, "MB")
