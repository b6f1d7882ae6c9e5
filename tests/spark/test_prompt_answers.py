"""The sockets to Java acknowledge at once, on each thread and in a batch's callback, also after an answer that came in pieces."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from dagster_checkpoints.spark.session.launcher import PromptSocket

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has TCP_QUICKACK")
PIECES = 40_000
"""Bytes of an answer that py4j's server writes in five blocks."""


def prompt(spark: SparkSession) -> bool:
    """Whether the socket of this thread acknowledges at once after a long answer."""
    java: Any = spark._jvm
    assert len(java.org.apache.commons.lang3.StringUtils.repeat("x", PIECES)) == PIECES
    used = spark.sparkContext._gateway._gateway_client.get_thread_connection().socket  # type: ignore[union-attr]
    return isinstance(used, PromptSocket) and used.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1


def test_threads_of_this_process(spark: SparkSession) -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(prompt(spark)))
    thread.start()
    thread.join()
    assert found == [True]


def test_the_callback_of_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.txt").write_text("one\n", encoding="utf-8")
    found: list[bool] = []

    def batch(frame: DataFrame, batch_id: int) -> None:
        found.append(prompt(spark))

    writer = spark.readStream.text(str(tmp_path / "in")).writeStream.foreachBatch(batch)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start().awaitTermination()
    assert found == [True]
