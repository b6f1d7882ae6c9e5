"""The start of Spark for a job: creates the session, and checks that all of Spark's executors share the work directory.

It must not know stages, checkpoints, nor a job's start point.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.spark.files.server_copies import try_server_copies
from dagster_checkpoints.spark.job import events
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.spark.job.runtime import Runtime
from dagster_checkpoints.spark.session.work_directory import check_work_directory_named, is_local
from dagster_checkpoints.spark.session.work_directory_check import ExecutorCheck, check_remote_directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start_spark(session: Callable[[], SparkSession], on_event: Callable[[JobEvent], None]) -> SparkSession:
    """Create or join the session, and report it.

    Args:
        session: Creates or joins the session.
        on_event: Receives an event before and after.
    """
    began = time.monotonic()
    on_event(events.SparkStarting())
    spark = session()
    context = spark.sparkContext
    on_event(
        events.SparkStarted(
            version=spark.version,
            master=context.master or "",
            application=context.applicationId or "",
            web_ui=context.uiWebUrl or None,
            seconds=time.monotonic() - began,
        )
    )
    return spark


def prove_work_directory(spark: SparkSession, runtime: Runtime) -> None:
    """Refuse to start if executors would write to another directory than the driver reads.

    Args:
        spark: The session of the job.
        runtime: The values of the run. Its storage's server may copy files from and to a work directory on the same server.

    Raises:
        WorkDirectoryError: The user has to name the directory, or Spark cannot use it.
        WorkDirectoryNotSharedError: An executor sees another directory; names its host.
        DeploymentCanceled: The job was cancelled during the wait for executors.
    """
    work, log = runtime.work, runtime.log
    master = str(spark.sparkContext.master)  # an existing session may have another master than the settings say
    check_work_directory_named(master, named=runtime.options.work_directory_named)
    began = time.monotonic()
    if work.is_remote:
        remote = work.proof(runtime.ownership.epoch)
        check_remote_directory(spark, remote)
        log.info("Spark reads and writes the work directory %s (%.1f s).", work, time.monotonic() - began)
        refusal = try_server_copies(remote, runtime.storage.store)
        way = f"pass through this machine: {refusal}" if refusal else "are copied by the S3 server that holds both"
        log.info("Large files between the work directory and the storage %s.", way)
    elif not is_local(master):
        folder = work.proof(runtime.ownership.epoch)
        assert isinstance(folder, Path)
        executors = ExecutorCheck(spark.sparkContext, folder, runtime.check_canceled, log).run()
        log.info("%d executor(s) share the work directory (%.1f s).", executors, time.monotonic() - began)
