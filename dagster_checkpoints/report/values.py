"""What the report shows, as values: the command's JSON, and the data in the page.

Times are seconds since 1970, durations seconds, sizes bytes. None: not known.
"""

from __future__ import annotations

import msgspec

from dagster_checkpoints.control.history import Setting, VertexParts

VERSION = 1


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the pipeline.

    Attributes:
        epoch: its epoch.
        run_id: its id; "" if the history does not have its start any more.
        job_id: the job that it ran; 0 if it began none.
        started_at: its start, or the first sign of it that the history has.
        ended_at: its end; None while it runs, and if it was killed.
        last_sign_at: the last entry of it in the history.
        restored: the checkpoint or savepoint that it began from; None for a new start.
        attempts: number of attempts.
        end: how it ended, in words; "" while it runs.
        failed: whether its end was a failure, or it was killed.
    """

    epoch: int
    run_id: str
    job_id: int
    started_at: float
    ended_at: float | None
    last_sign_at: float
    restored: int | None
    attempts: int
    end: str
    failed: bool


class TimelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event on the time line.

    Attributes:
        at: its time.
        epoch: epoch of the run.
        kind: run, start, restart, rescale, savepoint, stop, finish or end.
        title: the event in a few words.
        text: details; "" without any.
        failed: whether it is a failure.
    """

    at: float
    epoch: int
    kind: str
    title: str
    text: str = ""
    failed: bool = False


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint or savepoint that has ended."""

    checkpoint_id: int
    epoch: int
    kind: str
    status: str
    triggered_at: float
    duration: float
    acknowledged: int
    expected: int
    start_delay: float
    alignment_seconds: float
    sync_seconds: float
    async_seconds: float
    new_bytes: int
    total_bytes: int
    in_flight_bytes: int
    trigger: str
    unaligned: bool
    reason: str
    message: str
    location: str


class CheckpointDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of all instances in one of the newest checkpoints."""

    checkpoint_id: int
    epoch: int
    vertices: tuple[VertexParts, ...]


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantity is distributed over the completed checkpoints and savepoints of the report.

    Attributes:
        stages: the stages of the vertex; empty for whole checkpoints.
        quantity: name of the quantity.
        unit: "s" or "B".
        count: number of values.
        minimum, average, p50, p90, p99, maximum: of the values.
    """

    stages: tuple[str, ...] = ()
    quantity: str
    unit: str
    count: int
    minimum: float
    average: float
    p50: float
    p90: float
    p99: float
    maximum: float


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A stage in the graph.

    Attributes:
        state: in words.
        instances: number of instances.
        rows: number of rows emitted since the job began.
        rows_per_second: between the latest two samples of the run; None if it does not run.
        rows_behind: number of unread messages.
        late_rows: number of rows dropped as late.
        watermark: the lowest watermark of its instances.
        watermark_delay: seconds of the watermark behind the clock when the status was written; None if the run has ended.
        column, line: place in the drawing, from 0.
        root: whether the next checkpoint starts here.
        chain: number of its chain: stages of one chain share a query.
    """

    name: str
    state: str
    instances: int
    rows: int | None
    rows_per_second: float | None
    rows_behind: int | None
    late_rows: int
    watermark: float | None
    watermark_delay: float | None
    column: int
    line: int
    root: bool
    chain: int


class EdgeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A stage reads another one: "pointwise", "all to all" or "table"; "" if it is not known."""

    source: str
    target: str
    how: str


class StageSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's curves: each list has a value for each of `times`; None breaks the curve."""

    name: str
    times: tuple[float, ...]
    rows_per_second: tuple[float | None, ...]
    rows_behind: tuple[int | None, ...]
    watermark_delay: tuple[float | None, ...]


class PendingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint or savepoint under way; `seconds` since its trigger."""

    checkpoint_id: int
    kind: str
    acknowledged: int
    expected: int
    seconds: float


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of checkpoints in the report: savepoints are among the completed ones."""

    completed: int
    failed: int
    savepoints: int


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report.

    Attributes:
        pipeline: name of the pipeline.
        storage: URL of its directory.
        written_at: time of the report.
        running: whether a run owns the pipeline.
        state: what the pipeline does, in words.
        refresh_seconds: seconds after which a run writes the page again; None if no run does.
        counts: numbers of checkpoints.
        pending: the checkpoints under way.
        checkpoints: all checkpoints, newest first.
        details: the parts of all instances in the newest ones.
        summary: distributions over whole checkpoints, then by vertex.
        stages, edges: the graph, as the latest run had it.
        series: curves of the stages.
        runs: the runs, newest first.
        timeline: the events, newest first.
        settings: the settings of the latest run.
        problems: a text for each file that could not be read.
    """

    pipeline: str
    storage: str
    written_at: float
    running: bool
    state: str
    refresh_seconds: float | None
    counts: Counts
    pending: tuple[PendingRow, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()
    details: tuple[CheckpointDetail, ...] = ()
    summary: tuple[SummaryRow, ...] = ()
    stages: tuple[StageRow, ...] = ()
    edges: tuple[EdgeRow, ...] = ()
    series: tuple[StageSeries, ...] = ()
    runs: tuple[RunRow, ...] = ()
    timeline: tuple[TimelineRow, ...] = ()
    settings: dict[str, Setting] = {}
    problems: tuple[str, ...] = ()
    version: int = VERSION
