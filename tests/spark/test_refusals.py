"""When each error is known: a new error of the package needs a decision here, as early as it can be known.

The moments: `definition` (when the code is imported), `check` (`dagster-checkpoints check`, and each start), `start` (only a run
knows it: a text says why), `restore` (`verify`, and each start from a checkpoint), `run` (behind the start), `request` (a command
or a sensor), `base` (a class that is raised through its subclasses, or inside the package only).
"""

from __future__ import annotations

import importlib
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import dagster_checkpoints
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline, Quarantine, Stage, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.spark.job.pipeline_checks import check_plans

TESTS = Path(__file__).parents[1]

DEFINITION = """
ComponentAttributeError ConflictingDefinitionsError
ChainLayoutError DuplicateAssetKeyError DuplicatePipelineError DuplicateStageError DuplicateUidError EmptyPipelineError
InstancesMismatchError InvalidBatchLimitError InvalidCheckpointConfig InvalidCommitCheckError InvalidDurationError
InvalidExecutionGraphError InvalidInstancesError InvalidNameError InvalidQuarantineError InvalidSettingError
InvalidSplitSourceError InvalidStageInputError
InvalidStatePartitionsError InvalidStorageUrl InvalidTestRowsError InvalidThresholdError
InvalidWatermarkError MetricsUnavailableError NotAPipelineAssetError NotASourceError NotAStageError
OutputModeError OverlappingSinksError PartitionedStageError
SinkLibraryMissing SourceWithInputsError SparkSettingError StageCycleError StageDependencyError
StageSignatureError StageWithoutInputsError UnboundedSinkError UnboundedStaticInputError UnknownSettingError UnknownStageError
UnusedStageError
"""
# By class: the test that shows the error at `check`; those of SHOWN are shown below.
CHECK = {
    "EventTimeHeldBackError": "spark/test_event_time_held_back.py::test_what_is_said_of_a_source_without_a_watermark",
    "HistoryMismatchError": "spark/test_pipeline_check.py::test_columns_that_are_not_compared",
    "InvalidSinkDatabase": "sinks/test_unwritable_sinks.py::test_a_check_of_a_database_shows_missing_rights",
    "InvalidSinkPath": "sinks/test_unwritable_sinks.py::test_a_directory_without_the_right_to_write_names_the_user",
    "InvalidSinkTopic": "sinks/servers/test_kafka_sink.py::test_wrong_topics_servers_and_credentials_are_refused",
    "InvalidSource": "sources/test_sql_rows.py::test_a_table_that_cannot_be_read_is_refused",
    "JavaNotFound": "spark/pure/test_java.py::test_the_error_without_a_java_names_the_places_and_the_remedy",
    "KeyTypesError": "spark/test_routed_types.py::test_keys_whose_equal_values_would_not_meet_are_refused_by_name",
    "NamedSourceError": "spark/test_source_checks.py::test_a_source_with_a_name_of_sparks_own_is_refused",
    "ReservedSinkColumn": "sinks/test_unwritable_sinks.py::test_a_check_refuses_what_the_first_rows_would_be_refused_for",
    "SinkColumnsMismatch": "sinks/test_unwritable_sinks.py::test_a_check_compares_the_stages_columns_with_those_of_the_table",
    "SinkPathInUse": "sinks/test_unwritable_sinks.py::test_a_check_finds_that_the_place_is_another_stages",
    "SourceLibraryMissing": "sources/test_delta_history.py::test_a_machine_without_the_library",
    "SparkLaunchError": "spark/pure/test_launcher.py::test_a_package_that_is_not_found_and_memory_that_is_none",
    "SparkVersionError": "spark/pure/test_spark_version.py::test_another_version_is_refused_before_java_is_looked_for",
    "StageFindingError": "spark/test_pipeline_check.py::test_findings_that_are_meant_to_be_so",
    "StageSinkError": "cli/long/test_checked_files.py::test_the_sinks_are_checked_and_nothing_stays_behind",
    "WorkDirectoryError": "spark/test_refusals.py::test_a_work_directory_that_a_cluster_needs_is_known_at_check",
}
START = {
    "BucketMissing": "storage is not used by check: continuous integration runs where it cannot be reached",
    "ConditionalWritesUnsupported": "storage is not used by check",
    "CorruptPipelineState": "storage is not used by check; verify and show read it",
    "NoInputAssetError": "only a run has the materializations of Dagster's instance",
    "NoStageSelectedError": "the run selects its stages",
    "NoStorageError": "the environment of a run names the storage, and that of check may not",
    "NothingToRestoreError": "the run configuration names the checkpoint",
    "PipelineNameTaken": "storage says which pipeline uses the name",
    "PipelineOwned": "storage says which run owns the pipeline",
    "SelectionError": "the run selects its stages, and the checkpoint says which have finished",
    "SinkHoldsEarlierRows": "storage says whether the run is a new start",
    "StorageAccessDenied": "storage is not used by check",
    "TraceError": "the trace is written on the machine of the run",
    "PipelineStateMissing": "storage says that its record of the jobs is gone",
    "UnknownPipelineStateVersion": "storage is not used by check; verify and show read it",
    "WorkDirectoryNotSharedError": "the executors of the run have to be there",
}
RESTORE = """
ChainLayoutChanged CorruptMetadata CorruptStateFile InputRowsGone InputsChanged InstancesChanged InvalidMaxParallelism
MaxParallelismChanged MissingCheckpoint MissingSavepoint MissingStateFile NonRestoredState ParallelismTooHigh RestoredSchemaError
SinkAheadOfStorage SinkCannotTakeBack SinkRemoved SinkTransactionConflict SinkTransactionLost SourceColumnsChanged SourcesChanged
SparkVersionChanged StatePartitionsChanged StatefulPlanChanged UnfinishedPredecessor UnknownMetadataVersion UnknownStage
UnreadableSinkTransaction
"""
RUN = """
CheckpointDiscarded CommitCheckFailedError EndlessTimersError FilesReadTwice IncompleteRunError InvalidSplitError JobFailedError
OperatorStateError OwnershipLost PartitionColumnsAppeared PartlyFinishedUnionState QueryStoppedError
FilesOutsidePartitions PlannedFilesGone SegmentRowsError SegmentsLostError SinkFenced
SinkRowsRefused SinkTargetChanged SinkUnavailable SnapshotError SourceColumnsUnreadable SourceFileError SourceRefusedError
SourceRowsChanged SourceRowsLost SourceRowsLostError SourceUnavailable SparkEndedError StagePlanFailedError StateFileChanged
StorageUnavailable TimeLimitExceeded TimerRowsDroppedError UnknownRowsError
"""
REQUEST = """
CodeNotImported CorrectionError CorruptAnswer CorruptHistory CorruptRequest CorruptStatus CorruptTrace ExportRefused ImportRefused
InvalidRequest NoRunningPipeline NothingThere RequestConflict RequestFailed RequestTimedOut SavepointTakenError
SeveralSavepointsError StillNeeded
TraceDiffers UnknownRequest UsageProblem
"""
BASE = """
AlreadyExists CheckpointStillFinalizing ControlError CoordinationError FilesLost InvalidKey LedgerBlocked LostRows
NotFound OutcomeUnknown PipelineCheckError PipelineDefinitionError Precondition RestoreError SinkError SinkNotOpen
SourceError StageError StateError StorageError UnexpectedEvent UnknownChannel UnknownTask WriteConflict
"""

ROWS = "k string, ts timestamp, v long"


def rows(spark: SparkSession) -> Any:
    return spark.readStream.schema(ROWS).parquet(str(Path(__file__).parent))


def behind(function: Callable[[Any], Any], **options: Any) -> Callable[[SparkSession], Pipeline]:
    """A source with a watermark, the function as a stage `broken`, and a last stage."""

    def made(spark: SparkSession) -> Pipeline:
        @bounded_source(watermark=("ts", "1 minute"))
        def flights(context):
            return rows(context.spark)

        @stage(sink=ParquetSink("/nowhere"))
        def last(broken):
            return broken

        return Pipeline("p", [flights, stage(name="broken", **options)(lambda flights: function(flights)), last])

    return made


def source(function: Callable[[Any], Any], declare: Any = bounded_source) -> Callable[[SparkSession], Pipeline]:
    return lambda spark: Pipeline("p", [declare(name="broken", sink=ParquetSink("/nowhere"))(lambda context: function(context))])


def in_another_time_zone(flights: Any) -> Any:
    flights.sparkSession.conf.set("spark.sql.session.timeZone", "America/New_York")
    return flights.withColumn("day", F.to_date("ts"))


def other_stream(flights: Any) -> Any:
    return flights.unionByName(rows(flights.sparkSession))


def directory_like_a_pattern() -> str:
    directory = Path(tempfile.mkdtemp(), "raw [2026]")
    directory.mkdir()
    return str(directory)


class OpensBadly(Stage):
    def open(self, context: Any) -> None:
        raise OSError("no model file")

    def transform(self, context: Any, flights: Any) -> Any:
        return flights


SHOWN: dict[str, Callable[[SparkSession], Pipeline]] = {
    "EndlessSourceError": source(lambda context: context.spark.readStream.format("rate").load()),
    "EventTimeError": behind(lambda flights: flights.drop("ts")),
    "OffsetCommitError": source(
        lambda context: context.spark.readStream.format("rate").option("commit.offsets.on.checkpoint", "true").load(),
        unbounded_source,
    ),
    "PlanRefusedError": behind(lambda flights: flights.groupBy("k").count().withColumn("ts", F.lit(None).cast("timestamp"))),
    "SourceActsOnCommitError": source(
        lambda context: context.spark.readStream.format("socket").options(host="localhost", port=1).load(), unbounded_source
    ),
    "SourceOptionsError": source(
        lambda context: context.spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 0).parquet(directory_like_a_pattern())
    ),
    "SourcePathError": source(lambda context: context.spark.readStream.schema(ROWS).parquet(directory_like_a_pattern())),
    "StageFailedError": behind(lambda flights: flights.select("nothing")),
    "StageQuarantineError": behind(
        lambda flights: flights,
        sink=ParquetSink("/nothing"),
        quarantine=Quarantine({"known": "nothing > 0"}, ParquetSink("/none")),
    ),
    "StageQueryError": behind(lambda flights: flights.writeStream.format("noop").start()),
    "StageResultError": behind(lambda flights: None),
    "StageSettingError": behind(in_another_time_zone),
    "StageStreamError": behind(other_stream),
    "StatePartitionsError": behind(
        lambda flights: flights.dropDuplicates(["v"]),
        inputs={"flights": StageInput(key="k")},
        instances=["a", "b"],
        state_partitions=4,
    ),
    "StageWatermarkError": behind(lambda flights: flights.withWatermark("ts", "1 hour")),
}


def errors(of: type[DagsterCheckpointsError] = DagsterCheckpointsError) -> Iterator[type[DagsterCheckpointsError]]:
    for kind in of.__subclasses__():
        if kind.__module__.startswith("dagster_checkpoints."):
            yield kind
        yield from errors(kind)


def test_it_is_decided_for_each_error_when_it_is_known() -> None:
    for module in pkgutil.walk_packages(dagster_checkpoints.__path__, "dagster_checkpoints."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    moments = [DEFINITION.split(), CHECK, SHOWN, START, RESTORE.split(), RUN.split(), REQUEST.split(), BASE.split()]
    decided = [name for moment in moments for name in moment]
    assert len(decided) == len(set(decided)), sorted(name for name in decided if decided.count(name) > 1)
    assert sorted({kind.__name__ for kind in errors()}) == sorted(decided)
    for shown in CHECK.values():
        file, _, test = shown.partition("::")
        assert f"def {test}" in (TESTS / file).read_text(), shown


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_start_refuses_of_a_plan_is_known_at_check(spark: SparkSession, name: str) -> None:
    report = check_plans(SHOWN[name](spark), spark)
    (error,) = report.failed.values()
    assert type(error).__name__ == name and isinstance(error, StageError) and error.stage == "broken"


def test_what_open_raises_is_known_at_check(spark: SparkSession) -> None:
    @bounded_source
    def flights(context):
        return rows(spark)

    report = check_plans(Pipeline("p", [flights, OpensBadly("broken", sink=ParquetSink("/nowhere"))]), spark)
    assert "open() failed at " in str(report.failed["broken"]) and "no model file" in str(report.failed["broken"])


def test_a_work_directory_that_a_cluster_needs_is_known_at_check(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from dagster_checkpoints.cli.app import app

    (tmp_path / "location.py").write_text(
        "import dagster as dg\n"
        "from dagster_checkpoints import CheckpointCoordinatorResource, ParquetSink, Pipeline, bounded_source\n\n"
        "@bounded_source(sink=ParquetSink('out'))\n"
        "def numbers(context):\n"
        "    return context.spark.range(3)\n\n"
        "one = Pipeline('one', [numbers])\n"
        "coordinator = CheckpointCoordinatorResource(storage='x', spark_config={'spark.master': 'spark://host:7077'})\n"
        "defs = dg.Definitions(resources={'checkpoint_coordinator': coordinator})\n"
    )
    ran = CliRunner().invoke(app, ["check", "-f", str(tmp_path / "location.py"), "-a", "one"])
    assert ran.exit_code != 0 and "work_directory" in ran.output and "spark://host:7077" in ran.output
