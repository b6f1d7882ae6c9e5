"""Writes versions of a state store in which nothing has changed, as Spark writes them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.spark.files.work_path import url
from dagster_checkpoints.spark.jvm import jvm_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_END_OF_DELTA = -1
"""The length of a key that ends a `.delta` file."""


def write_empty_versions(spark: SparkSession, files: Sequence[Path], codec: str) -> None:
    """Write files without a change, of RocksDB (`.changelog`) or of Spark's other provider (`.delta`).

    Args:
        spark: The session.
        files: The files of one query, on this machine; their directories may not exist yet.
        codec: The name of the compression of the query's state files.

    Source: Spark's `StateStoreChangelogWriterV1`; each changelog is read in the form in which it was written. And
    `HDFSBackedStateStoreProvider.finalizeDeltaFile`.
    """
    first, *others = files
    jvm = jvm_of(spark)
    first.parent.mkdir(parents=True, exist_ok=True)
    compression = jvm.org.apache.spark.io.CompressionCodec.createCodec(spark.sparkContext._jsc.sc().conf(), codec)
    if first.suffix == ".delta":
        compressed = compression.compressedOutputStream(jvm.java.io.FileOutputStream(str(first)))
        delta = jvm.java.io.DataOutputStream(compressed)
        delta.writeInt(_END_OF_DELTA)
        delta.close()
    else:
        _write_changelog(spark, first, compression)
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(first, file)


def _write_changelog(spark: SparkSession, file: Path, compression: Any) -> None:
    jvm = jvm_of(spark)
    streaming = jvm.org.apache.spark.sql.execution.streaming
    path = jvm.org.apache.hadoop.fs.Path(url(file))
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    manager = streaming.checkpointing.CheckpointFileManager.create(path.getParent(), hadoop)
    streaming.state.StateStoreChangelogWriterV1(manager, path, compression).commit()
