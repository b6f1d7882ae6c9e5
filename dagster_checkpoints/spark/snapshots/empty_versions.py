"""Writes versions of a RocksDB state store in which nothing has changed, as Spark writes them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.files.work_path import url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def write_empty_versions(spark: SparkSession, files: Sequence[Path], codec: str) -> None:
    """Write changelog files without a change.

    Args:
        spark: The session.
        files: The files, on this machine; their directories may not exist yet.
        codec: The name of the compression of the query's state files.

    Source: Spark's `StateStoreChangelogWriterV1`; each changelog is read in the form in which it was written.
    """
    first, *others = files
    jvm: Any = spark._jvm
    streaming = jvm.org.apache.spark.sql.execution.streaming
    path = jvm.org.apache.hadoop.fs.Path(url(first))
    first.parent.mkdir(parents=True, exist_ok=True)
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    manager = streaming.checkpointing.CheckpointFileManager.create(path.getParent(), hadoop)
    compression = jvm.org.apache.spark.io.CompressionCodec.createCodec(spark.sparkContext._jsc.sc().conf(), codec)
    streaming.state.StateStoreChangelogWriterV1(manager, path, compression).commit()
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(first, file)
