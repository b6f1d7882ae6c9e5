"""Plain queries of each kind, taken over and given back: sources, operators, outputs, providers of state and file systems.

Each row is a query. `test_plain_queries.py` and `long/test_plain_programs.py` have the other operators over files, and
`test_plain_kafka_queries.py` topics with several partitions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kafka_broker import KafkaBroker, add_connector
from dagster_checkpoints.spark.session.java import find_java_home
from resources.embedded_s3 import EmbeddedS3
from tests.spark.plain_programs import PROGRAMS
from tests.spark.servers import hdfs as servers
from tests.spark.servers import jars
from tests.spark.takeovers import (
    HEAP,
    DeltaRows,
    FileOutput,
    Files,
    FunctionOutput,
    IcebergRows,
    Input,
    Output,
    RemoteFiles,
    Takeover,
    Topic,
    TopicOutput,
    check_there_and_back,
)

ROOT = Path(__file__).parents[3]
RUNNER = ROOT / "tests/spark/takeover_runner.py"
DEADLINE = 1800.0
ROCKSDB = ""
"""The provider of the session of the tests."""

WITH_TOPICS = [  # sources, program, output, provider, how it has ended
    (("topic",), "filtered", "topic", ROCKSDB, "stopped"),
    (("topic",), "timers", "files", ROCKSDB, "not in the output"),
    (("topic", "files"), "unmatched", "function", HEAP, "in the output"),
    (("delta", "topic"), "pairs", "files", ROCKSDB, "in the output"),
    (("iceberg",), "windows", "topic", HEAP, "stopped"),
    (("files",), "first", "topic", ROCKSDB, "stopped"),
]
WITH_TABLES = [
    (("delta",), "first", "files", HEAP, "in the output"),
    (("delta",), "timers", "function", ROCKSDB, "not in the output"),
    (("iceberg",), "distinct", "files", ROCKSDB, "not in the output"),
    (("files",), "filtered", "function", HEAP, "not in the output"),
]
ON_HDFS = [("timers", ROCKSDB, "in the output"), ("unmatched", HEAP, "not in the output")]


@pytest.fixture
def check(lab: Any) -> Callable[..., None]:
    """Checks a row of a table there and back. Topics are named after it."""

    def there_and_back(sources: tuple[str, ...], name: str, output: str, provider: str, how: str, kafka: Any = None) -> None:
        def read(kind: str, stream: str) -> Input:
            if kind == "topic":
                return Topic(lab, kafka, f"in-{name}-{stream}")
            return {"files": Files, "delta": DeltaRows, "iceberg": IcebergRows}[kind](lab, stream)

        def written() -> Output:
            if output == "topic":
                return TopicOutput(lab, kafka, f"out-{name}")
            return {"files": FileOutput, "function": FunctionOutput}[output](lab, str(lab.folder / "plain"))

        program = PROGRAMS[name]
        inputs = {stream: read(kind, stream) for kind, stream in zip(sources, program.streams, strict=True)}
        check_there_and_back(Takeover(lab, program, inputs, provider), how, written())

    return there_and_back


def _title(row: tuple[Any, ...]) -> str:
    return "-".join((*row[0], *row[1:3]))


@pytest.mark.parametrize("row", WITH_TABLES, ids=_title)
def test_queries_over_tables_and_files(check: Any, row: tuple[Any, ...]) -> None:
    check(*row)


@pytest.mark.parametrize("row", WITH_TOPICS, ids=_title)
def test_queries_with_topics(lab: Any, check: Any, kafka: KafkaBroker, kafka_jars: list[Path], row: tuple[Any, ...]) -> None:
    add_connector(lab.spark, kafka_jars)
    check(*row, kafka=kafka)


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    java = f"{find_java_home()}/bin/java"
    with servers.running_hdfs(tmp_path_factory.mktemp("hdfs"), java, jars.fetched(jars.HDFS, java)) as running:
        yield running


@pytest.mark.parametrize("name, provider, how", ON_HDFS)
def test_queries_on_hdfs(lab: Any, hdfs: Any, name: str, provider: str, how: str) -> None:
    """Input, output and checkpoint directory are on another file system, whose client writes their URLs in another way."""
    program, root = PROGRAMS[name], f"{hdfs.url}//{name}"
    inputs = {stream: RemoteFiles(lab, stream, f"{root}/{stream}") for stream in program.streams}
    there = Takeover(lab, program, inputs, provider)
    check_there_and_back(there, how, FileOutput(lab, f"{root}/plain"), f"{root}/checkpoint")


def run(folder: Path, **settings: Any) -> None:
    """Run a takeover in a process of its own, which has to succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(RUNNER), str(folder / "taken"), json.dumps(settings)]
        ran = subprocess.run(command, env=environment, cwd=ROOT, stdout=log, stderr=log, timeout=DEADLINE)
    assert ran.returncode == 0, (folder / "log").read_text()[-6000:]


def test_a_query_on_s3a(tmp_path: Path) -> None:
    """Its state of `transformWithState` names a place in the bucket."""
    needed = jars.fetched(jars.S3A, f"{find_java_home()}/bin/java")
    with EmbeddedS3() as s3, pytest.MonkeyPatch.context() as environment:
        for name, value in s3.environment.items():
            environment.setenv(name, value)
        spark = {
            "spark.jars": ",".join(map(str, needed)),
            "spark.hadoop.fs.s3a.endpoint": s3.endpoint_url,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": True,
            # Its uploader of whole files waits for an answer that the embedded server does not give.
            "spark.hadoop.fs.s3a.optimized.copy.from.local.enabled": False,
            "spark.hadoop.fs.s3a.connection.ssl.enabled": False,
            "spark.hadoop.fs.s3a.access.key": s3.credentials["aws_access_key_id"],
            "spark.hadoop.fs.s3a.secret.key": s3.credentials["aws_secret_access_key"],
        }
        root = f"s3a://{s3.bucket}/plain"
        run(tmp_path, spark=spark, program="timers", how="not in the output", root=root)
