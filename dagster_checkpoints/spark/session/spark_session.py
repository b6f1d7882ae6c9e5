"""The Spark session of a run, with the settings on which the checkpoint protocol relies.

A session must be created on a worker thread, never on the main thread of a Dagster run: Dagster may interrupt the main thread
at any moment, and an interrupted py4j call hangs or swaps answers between calls.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.spark.query.query_sessions import POLLING_DELAY, USUAL_POLLING_DELAY
from dagster_checkpoints.spark.query.stage_calls import guard_queries
from dagster_checkpoints.spark.row_settings import row_settings, set_back
from dagster_checkpoints.spark.session import executor_probe
from dagster_checkpoints.spark.session.class_archive import ClassArchive
from dagster_checkpoints.spark.session.hadoop import UNCHECKED, WITHOUT_CHECKSUMS, forget_files_of_defaults, use_local_files
from dagster_checkpoints.spark.session.java import configure_java
from dagster_checkpoints.spark.session.launcher import launch
from dagster_checkpoints.spark.session.spark_home import lean_spark_home
from dagster_checkpoints.spark.session.spark_version import check_supported, installed_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkSettingError(DagsterCheckpointsError):
    """A Spark setting with which checkpoints do not work."""


ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

_QUERY_LOGS = (
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
    "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "org.apache.spark.broadcast.TorrentBroadcast",
)
_ERROR_LOGS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_OFF = logging.CRITICAL + 1
"""`logging.config` enables a disabled logger again, as Dagster does when it sets up its own. PySpark's call then raises a
TypeError in place of the error, because the logger was not made by PySpark."""

RETAINED_BATCHES = "spark.sql.streaming.minBatchesToRetain"
LEAST_RETAINED_BATCHES = 2
"""A snapshot as of batch b holds Spark's files of batch b - 1 as well. Spark may have planned batch b + 1 by then; it has
deleted the files of batches that are more than this number of batches before b + 1."""

# Settings that the protocol requires; another value for one of these would break it.
REQUIRED: Mapping[str, str] = {
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "1",  # snapshots are pruned by this version's file names
    "spark.sql.streaming.offsetLog.formatVersion": "1",  # batches are planned in this version
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "false",  # offsets are known by the number of their source
    "spark.sql.streaming.multipleWatermarkPolicy": "min",
    "spark.sql.streaming.noDataMicroBatches.enabled": "true",
    "spark.sql.exchange.reuse": "false",  # an operator behind reused exchanges has no watermark, and emits nothing
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # readers cannot read the year 9999 from INT96
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",  # with LEGACY sinks take days before 1582-10-15 for others
    "spark.sql.streaming.stopTimeout": "60s",
    "spark.api.mode": "classic",  # no Spark Connect, whatever SPARK_API_MODE or an installed pyspark-client says
    "spark.scheduler.mode": "FAIR",  # otherwise a backfill's long batch delays the live stages and their barriers
    # What is said of rows that stay in state at the end of data is the number that RocksDB counts.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "true",
    # Spark's checks of what would lose, mix up or leave out rows of an operator with state.
    "spark.sql.streaming.unsupportedOperationCheck": "true",
    "spark.sql.streaming.statefulOperator.checkCorrectness.enabled": "true",
    "spark.sql.streaming.stateStore.stateSchemaCheck": "true",
    "spark.sql.streaming.stateStore.formatValidation.enabled": "true",
    "spark.sql.streaming.stateStore.commitValidation.enabled": "true",
    # Other operators than those of which the end of data, late rows and restored state are known; or Spark's former mistakes.
    "spark.sql.streaming.statefulOperator.allowMultiple": "true",  # with false all operators have one watermark
    "spark.sql.streaming.useStreamlineAggregator": "false",
    "spark.sql.streaming.stateStore.skipNullsForStreamStreamJoins.enabled": "false",
    "spark.sql.optimizer.pruneFiltersCanPruneStreamingSubplan": "false",
    "spark.sql.streaming.optimizeOneRowPlan.enabled": "false",
    "spark.sql.legacy.sessionInitWithConfigDefaults": "false",  # a query would lose its number of state partitions
}
# Settings that hold a number, with the least one, and what needs it. Without the setting Spark's default counts.
LEAST: Mapping[str, tuple[int, str]] = {
    RETAINED_BATCHES: (
        LEAST_RETAINED_BATCHES,
        "A checkpoint as of micro-batch b holds Spark's files of batch b - 1 as well, and Spark deletes them sooner.",
    ),
    "spark.sql.streaming.numRecentProgressUpdates": (
        2,
        "Spark keeps one less, and the backlog of a Kafka source and the answers of silent sources are read from the last one.",
    ),
}
# Settings that must not be there, with what they would change.
UNSET: Mapping[str, str] = {
    "spark.sql.streaming.internal.stateStore.partitions": (
        "It would replace the number of state partitions that a stage has (state_partitions, spark.sql.shuffle.partitions)."
    ),
    "spark.sql.streaming.disabledV2MicroBatchReaders": (
        "The backlog and the limits of Kafka sources are known of Spark's newer source only."
    ),
}
# Recommended settings; a user's own value replaces them.
DEFAULTS: Mapping[str, str] = {
    "spark.master": "local[*]",
    "spark.app.name": "dagster-checkpoints",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
    POLLING_DELAY: USUAL_POLLING_DELAY,
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
    "spark.sql.streaming.stateStore.maintenanceInterval": "30s",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Spark's files of queries without Hadoop's checksum files beside them. A checkpoint has its own checksums.
    f"spark.hadoop.{UNCHECKED}": WITHOUT_CHECKSUMS,
}


def session_config(config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The complete configuration of a session: the defaults, then the user's settings, then those that the protocol requires.

    Raises:
        SparkSettingError: The user's configuration contradicts what the protocol requires.
    """
    chosen = {key: _text(value) for key, value in (config or {}).items()}
    known = {key.lower(): key for key in REQUIRED}
    for key, found in chosen.items():
        required = REQUIRED.get(known.get(key.lower(), ""))  # RocksDB's settings count in any spelling: "rocksDB", "rocksdb"
        if required is not None and found.lower() != required.lower():
            raise SparkSettingError(
                f"Spark configuration {key}={found}: checkpoints need {known[key.lower()]}={required}. Remove the setting from "
                "the resource's spark_config."
            )
    _check_others(chosen.get, "the resource's spark_config")
    if "spark.remote" in chosen:
        raise SparkSettingError(
            f"Spark configuration spark.remote={chosen['spark.remote']}: expected a classic session, whose driver is the process "
            "of the run; Spark Connect is not supported. Remove the setting from the resource's spark_config, and name the "
            "cluster's spark.master."
        )
    others = {key: value for key, value in chosen.items() if key.lower() not in known}
    return {**DEFAULTS, **others, **REQUIRED}


def check_session(spark: SparkSession) -> None:
    """Check a session that may not come from :func:`build_session`, or whose settings a stage's function may have changed.

    Raises:
        SparkSettingError: The session has a setting with which checkpoints do not work.
        SparkVersionError: The plugin does not run on the session's version of Spark.
    """
    check_supported(spark.version)
    for key, required in REQUIRED.items():
        found = _value_or_default(spark, key)
        if found is not None and found.lower() != required.lower():
            raise SparkSettingError(
                f"Spark configuration {key}={found} in the session of the pipeline's queries: checkpoints need {key}={required}. "
                "A stage's function, or other code in the process of the run, has set it (spark.conf.set or unset, also in a "
                "session of its own, spark.newSession). Remove that call; nothing was started with the setting."
            )
    where = "a stage's function (spark.conf.set), the resource's spark_config or spark-defaults.conf, whichever sets it"
    _check_others(lambda key: spark.conf.get(key, None), where)


def _value_or_default(spark: SparkSession, key: str) -> str | None:
    """A setting's value, or Spark's default where it is not set; "(not set)" if only Spark's state stores know the default."""
    found = spark.conf.get(key, None)
    if found is not None:
        return found
    from pyspark.errors import SparkNoSuchElementException

    try:
        return spark.conf.get(key)
    except SparkNoSuchElementException:
        return "(not set)" if key.startswith("spark.sql.") else None  # others are those of the application


def _check_others(setting: Callable[[str], str | None], where: str) -> None:
    """Check the settings that must not be there, and those that have a least value.

    Args:
        setting: Gives a setting's value; None if it is not set.
        where: Where a setting may come from, for the text of errors.
    """
    for key, why in UNSET.items():
        if found := setting(key):
            raise SparkSettingError(
                f"Spark configuration {key}={found}: expected that it is not set. {why} Remove it from {where}."
            )
    for key, (least, why) in LEAST.items():
        found = setting(key)
        if found is not None and (not found.strip().isdecimal() or int(found) < least):
            raise SparkSettingError(
                f"Spark configuration {key}={found}: expected at least {least}. {why} Remove the setting from {where}."
            )


def build_session(config: Mapping[str, Any] | None = None, *, share_classes: bool = False) -> SparkSession:
    """Start the Spark session of this process, or use the existing one, and prepare it.

    Args:
        config: Spark settings, flat (`{"spark.master": "local[2]"}`); see :func:`session_config`.
        share_classes: Whether the JVM uses the archive of Java classes, which is made later if there is none.

    Raises:
        JavaNotFound: There is no Java that this Spark can run on.
        SparkLaunchError: Java has ended before Spark began, for example because of a package that cannot be found.
        SparkSettingError: See :func:`session_config` and :func:`prepare_session`.
        SparkVersionError: The plugin does not run on the installed version of Spark.
    """
    check_supported(installed_version())
    settings = session_config(config)
    for variable in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        if variable in os.environ:
            raise SparkSettingError(
                f"The environment variable {variable} is set: expected a classic session, whose driver is the process of the "
                "run; Spark Connect is not supported. Unset it for the processes of runs, in which no other code may use Spark "
                "Connect, and name the cluster's spark.master in the resource's spark_config."
            )
    java_home = configure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1" if settings["spark.master"].startswith("local") else "")
    if not os.environ["SPARK_LOCAL_IP"]:
        del os.environ["SPARK_LOCAL_IP"]
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    joins = SparkContext._active_spark_context is not None
    with lean_spark_home(settings):
        if share_classes:
            archive = ClassArchive(java_home, settings)
            with archive.offered():
                launch(settings)
                spark = builder.getOrCreate()
            archive.make_later(str(spark._jvm.System.getProperty("java.class.path")))  # type: ignore[union-attr]
        else:
            launch(settings)
            spark = builder.getOrCreate()
    _forget_settings_of_others(spark, settings, joins=joins)
    return prepare_session(spark)


_OF_A_FRESH_SESSION: dict[str, dict[str, str]] = {}
"""By Spark application, the settings that decide rows and that no pipeline has set: those of `spark-defaults.conf`."""


def _forget_settings_of_others(spark: SparkSession, settings: Mapping[str, str], *, joins: bool) -> None:
    """Let a pipeline have the settings that decide its rows as in a process of its own.

    Args:
        spark: The session, with this pipeline's settings.
        settings: These.
        joins: Whether the session was there before: another pipeline of the run has used it, or other code has made it.

    Raises:
        SparkSettingError: Other code has made the session with a setting that decides rows, which this pipeline does not name.
    """
    application, found = spark.sparkContext.applicationId, row_settings(spark)
    others = {name: value for name, value in found.items() if name not in settings}
    if not joins:
        _OF_A_FRESH_SESSION.clear()
    if application not in _OF_A_FRESH_SESSION:
        if joins and others:
            name, value = min(others.items())
            raise SparkSettingError(
                f"Spark configuration {name}={value}: expected that only the resource's spark_config and spark-defaults.conf say "
                "what rows the pipeline computes, found that other code has made this process's Spark session with it. Without "
                "that code the rows would be others. Name the setting in the resource's spark_config, with the value that you "
                "want; or run the pipeline in a process of its own."
            )
        _OF_A_FRESH_SESSION[application] = others
    fresh = _OF_A_FRESH_SESSION[application]
    for name in (fresh.keys() | others.keys()) - settings.keys():
        if found.get(name) != fresh.get(name):
            set_back(spark, name, fresh.get(name))


def prepare_session(spark: SparkSession) -> SparkSession:
    """Prepare a session: functions that its workers run are sent by value, and only tasks start queries.

    Spark's logs of a query that ends with an error are switched off, and those of the steps of a batch that it raises the error
    of as well: for Spark, a stop looks like an error; a real error is reported by its task, with the stage's name. So are
    PySpark's logs of errors that it raises as well: each is a line of JSON that holds the whole plan.

    Raises:
        SparkSettingError: Java does not know all file names.
    """
    from pyspark import cloudpickle

    encoding = str(spark._jvm.System.getProperty("sun.jnu.encoding"))  # type: ignore[union-attr]
    if encoding.upper() != "UTF-8":
        raise SparkSettingError(
            f"Java's encoding of file names (sun.jnu.encoding) is {encoding}: expected UTF-8. Spark leaves out a file whose name "
            "it cannot read, without an error. Set LC_ALL to a UTF-8 locale that this machine has (C.UTF-8, or another one of "
            "`locale -a`), and start the process again."
        )
    cloudpickle.register_pickle_by_value(executor_probe)
    guard_queries()
    for name in _ERROR_LOGS:
        logging.getLogger(name).setLevel(_OFF)
    log4j = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    for name in _QUERY_LOGS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    use_local_files(spark)
    forget_files_of_defaults(spark)
    return spark


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
