"""Errors that another attempt would meet again fail the job at once; others use a restart attempt."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest
from pyspark.errors import AnalysisException

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.errors import DagsterCheckpointsError, StorageUnavailable, repeats_by_nature
from dagster_checkpoints.pipeline import Pipeline, Stage, bounded_source, stage, unbounded_source
from dagster_checkpoints.pipeline.errors import UnknownStageError
from dagster_checkpoints.sinks import (
    ParquetSink,
    ReservedSinkColumn,
    SinkError,
    SinkPathInUse,
    SinkTransactionConflict,
    SqlSink,
)
from dagster_checkpoints.spark import errors
from dagster_checkpoints.spark.job.events import JobRestarting
from dagster_checkpoints.state.errors import RestoreError
from dagster_checkpoints.systems.errors import InvalidSinkPath

ROWS = "k string, v long"


class Transient(SinkError):
    repeats = False


class WithCause(Exception):
    """Another error, raised because of an error."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("outside")
        self.__cause__ = cause


@pytest.mark.parametrize(
    ("error", "repeats"),
    [
        (SinkPathInUse("p"), True),
        (SinkTransactionConflict("p"), True),
        (Transient("p"), False),
        (UnknownStageError("p"), True),
        (RestoreError("p"), True),
        (errors.PlanRefusedError("s", "0", "p"), True),
        (errors.StageStreamError("s", "0", "p"), True),
        (errors.StageQueryError("s", "0", "p"), True),
        (errors.SourceActsOnCommitError("s", "0", "p"), True),
        (errors.EndlessSourceError("s", "0", "p"), True),
        (errors.NamedSourceError("s", "0", "p"), True),
        (errors.OffsetCommitError("s", "0", "p"), True),
        (errors.SourceOptionsError("s", "0", "p"), True),
        (errors.RestoredSchemaError("p"), True),
        (errors.StagePlanFailedError("s", "0", "p"), True),
        (errors.SourceRefusedError("s", "0", "p"), True),
        (errors.StageFailedError("s", "0", "p"), False),
        (errors.QueryStoppedError("s", "0", "p"), False),
        (errors.JobFailedError("p"), False),
        (StorageUnavailable("p"), False),
        (DagsterCheckpointsError("p"), False),
        (OSError("p"), False),
        (WithCause(OSError("p")), False),
        (WithCause(SinkPathInUse("p")), True),
        (WithCause(WithCause(SinkPathInUse("p"))), True),
    ],
    ids=lambda value: f"{type(value).__name__}" if isinstance(value, Exception) else str(value),
)
def test_which_errors_repeat_by_nature(error: Exception, repeats: bool) -> None:
    assert repeats_by_nature(error) == repeats


class Wrong(Stage):
    """Selects a column that does not exist, in a batch, so that no plan shows the error before."""

    def transform(self, context: Any, numbers: Any) -> Any:
        return numbers

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        return batch.select("no_such_column")


def wrong_plan(lab: Any) -> Pipeline:
    @bounded_source
    def numbers(context):
        return lab.stream("numbers", ROWS)

    return Pipeline("wrong", [numbers, Wrong("broken", sink=lab.sink("broken"))])


def refused_column(lab: Any) -> Pipeline:
    @bounded_source(sink=lab.sink("refused"))
    def numbers(context):
        return lab.stream("numbers", ROWS).selectExpr("k", "v AS checkpoint")

    return Pipeline("refused", [numbers])


@pytest.mark.parametrize(
    ("pipeline", "error", "text"),
    [(wrong_plan, AnalysisException, "no_such_column"), (refused_column, ReservedSinkColumn, "ParquetSink adds that column")],
)
def test_no_restart_is_spent_on_an_error_that_repeats(lab: Any, pipeline: Any, error: type[Exception], text: str) -> None:
    lab.put("numbers", ROWS, [("a", 1)])
    job = lab.start(pipeline(lab), restart=FixedDelayRestart(3, 0.1))
    failed = job.result()
    assert failed.status == "FAILED" and not job.of(JobRestarting), job.story()
    assert text in str(failed.error) and "would fail in the same way" in str(failed.error)
    cause = failed.error.__cause__
    assert isinstance(cause.__cause__, error), repr(cause)


def test_a_sink_path_that_belongs_to_another_stage_fails_the_resumption_at_once(lab: Any) -> None:
    @unbounded_source
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink())
    def copied(live):
        return live

    lab.put("live", ROWS, [("a", 1)])
    pipeline = Pipeline("owner", [live, copied])
    job = lab.start(pipeline, interval=0.5)
    job.wait_until(lambda: lab.count() == 1)
    job.cancel()
    job.result()
    marker = lab.folder / "out" / ".sink.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "pipeline": "somebody_elses"}))
    job = lab.start(pipeline, restart=FixedDelayRestart(3, 0.1))
    failed = job.result()
    assert failed.status == "FAILED" and not job.of(JobRestarting), job.story()
    assert "pipeline 'somebody_elses' writes there" in str(failed.error)


def test_a_sinks_place_that_cannot_be_written_fails_the_run_at_once(lab: Any) -> None:
    (lab.folder / "a file").write_text("")
    sink = SqlSink(f"sqlite:///{lab.folder}/a file/out/x.db", "numbers")

    @bounded_source(sink=sink)
    def numbers(context):
        return lab.stream("numbers", ROWS)

    lab.put("numbers", ROWS, [("a", 1)])
    job = lab.start(Pipeline("unwritable", [numbers]), restart=FixedDelayRestart(3, 0.1))
    failed = job.result()
    assert failed.status == "FAILED" and not job.of(JobRestarting), job.story()
    text = str(failed.error)
    assert f"the stage that {numbers.location} defines" in text and "pathlib" not in text
    assert f"{sink}: expected to write to sqlite:///{lab.folder}/a file/out/x.db, found: Not a directory " in text
    assert "A part of the path is a file, not a directory: choose another place, or move that file away" in text


def test_a_new_start_meets_an_unwritable_place_before_spark(lab: Any) -> None:
    (lab.folder / "a file").write_text("")

    @bounded_source(sink=lab.sink("a file/out"))
    def numbers(context):
        return lab.stream("numbers", ROWS)

    job = lab.start(Pipeline("unwritable", [numbers]), restart=FixedDelayRestart(3, 0.1))
    with pytest.raises(InvalidSinkPath, match=r"numbers' of pipeline 'unwritable': ParquetSink.*is a file, not a directory"):
        job.result()


def test_a_run_whose_sink_found_no_space_goes_on_when_there_is_some(lab: Any) -> None:
    class Full(ParquetSink):
        def commit(self, transaction: str) -> Any:
            if not (lab.folder / "space").exists():
                (lab.folder / "space").touch()
                raise OSError(errno.ENOSPC, "No space left on device", str(self.path / "part-0"))
            return super().commit(transaction)

    @bounded_source(sink=Full(lab.folder / "out"))
    def numbers(context):
        return lab.stream("numbers", ROWS)

    lab.put("numbers", ROWS, [("a", 1)])
    job = lab.start(Pipeline("full", [numbers]), restart=FixedDelayRestart(3, 0.1))
    assert job.finished().status == "FINISHED"
    (restart,) = job.of(JobRestarting)
    assert "MB are free. Free space there, or enlarge the file system" in str(restart)
    assert lab.count() == 1
