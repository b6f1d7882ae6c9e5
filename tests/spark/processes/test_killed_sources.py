"""A run that reads a table of a database and a Delta table on S3 is killed in the middle: no finished part is read again."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_checkpoints.spark.session.java import find_java_home
from resources.embedded_s3 import EmbeddedS3
from tests.spark.servers import jars

pytestmark = pytest.mark.skipif(pyspark.__version__ < "4.2", reason="read_sql_table needs Spark 4.2")
ROOT = Path(__file__).parents[3]
RUNNER = Path(__file__).with_name("sources_runner.py")
DEADLINE = 240.0
ROWS = 3000
SPLITS = 15
COMMITS = 15
DAYS = 40


class Lake:
    """A Delta table that is written in a directory. Readers see a copy on S3; without the jars for that, the directory."""

    def __init__(self, directory: Path, s3: EmbeddedS3 | None, jars: list[Path]) -> None:
        self._directory = directory
        self._s3 = s3
        self.settings: dict[str, Any] = {"lake": str(directory), "storage_options": {}, "spark": {"spark.master": "local[2]"}}
        if s3 is not None:
            key, secret = s3.credentials["aws_access_key_id"], s3.credentials["aws_secret_access_key"]
            self.settings["lake"] = f"s3://{s3.bucket}/lake"
            self.settings["storage_options"] = {
                "AWS_ENDPOINT_URL": s3.endpoint_url,
                "AWS_ACCESS_KEY_ID": key,
                "AWS_SECRET_ACCESS_KEY": secret,
                "AWS_REGION": "us-east-1",
                "AWS_ALLOW_HTTP": "true",
            }
            self.settings["spark"] |= {
                "spark.jars": ",".join(map(str, jars)),
                "spark.hadoop.fs.s3a.endpoint": s3.endpoint_url,
                "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
                "spark.hadoop.fs.s3a.path.style.access": True,
                "spark.hadoop.fs.s3a.connection.ssl.enabled": False,
                "spark.hadoop.fs.s3a.access.key": key,
                "spark.hadoop.fs.s3a.secret.key": secret,
            }
        self._sent: set[Path] = set()

    def append(self, number: int) -> None:
        rows = pa.table({"n": list(range(100 * number, 100 * number + 100)), "part": [f"p {number % 2}"] * 100})
        write_deltalake(self._directory, rows, mode="append", partition_by=["part"])

    def compact(self) -> None:
        DeltaTable(self._directory).optimize.compact()

    def send(self) -> None:
        """Copy new files, data before the log."""
        if self._s3 is None:
            return
        new = sorted(
            {file for file in self._directory.rglob("*") if file.is_file()} - self._sent, key=lambda f: "_delta_log" in f.parts
        )
        for file in new:
            self._s3.client().upload_file(str(file), self._s3.bucket, f"lake/{file.relative_to(self._directory).as_posix()}")
        self._sent.update(new)


@contextmanager
def run(folder: Path, name: str, settings: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """A run of the pipeline in a process group of its own, which does not outlive the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    with (folder / f"{name}.log").open("w") as log:
        command = [sys.executable, str(RUNNER), str(folder), name, json.dumps(settings)]
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def visible(table: Path) -> list[dict[str, Any]]:
    files = [file for file in table.glob("checkpoint=*/*.parquet") if pq.read_metadata(file).num_rows]
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def test_a_killed_run_continues_with_the_next_split(tmp_path: Path) -> None:
    with ExitStack() as servers:
        try:
            needed = jars.fetched(jars.S3A, f"{find_java_home()}/bin/java")
            lake = Lake(tmp_path / "lake", servers.enter_context(EmbeddedS3()), needed)
        except pytest.skip.Exception:
            lake = Lake(tmp_path / "lake", None, [])
        connection = servers.enter_context(closing(sqlite3.connect(tmp_path / "shop.db")))
        connection.execute("CREATE TABLE orders (id integer PRIMARY KEY, customer text, at timestamp)")
        rows = [(n, f"c{n % 7}", f"2026-01-01 {n // 3600:02d}:{n // 60 % 60:02d}:{n % 60:02d}.000000") for n in range(ROWS)]
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?)", rows)
        connection.commit()
        for number in range(COMMITS):
            lake.append(number)
        lake.send()
        with run(tmp_path, "first", lake.settings) as process:
            until = time.monotonic() + DEADLINE
            while not (visible(tmp_path / "orders") and visible(tmp_path / "rows") and visible(tmp_path / "days")):
                assert process.poll() is None and time.monotonic() < until, (tmp_path / "first.log").read_text()[-3000:]
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
        before = {row["n"] for row in visible(tmp_path / "days")}
        assert 0 < len(before) < 100 * DAYS
        committed = {row["id"] for row in visible(tmp_path / "orders")}
        assert 0 < len(committed) < ROWS
        assert 0 < len(visible(tmp_path / "rows")) < 100 * COMMITS
        # A second read of a finished split would show this; and the division must not be made again for the larger range.
        connection.execute(f"UPDATE orders SET customer = 'read twice' WHERE id <= {max(committed)}")
        connection.execute(f"INSERT INTO orders VALUES ({100 * ROWS}, 'late', '2026-02-01 00:00:00.000000')")
        connection.commit()
        lake.compact()
        lake.append(COMMITS)
        lake.send()
        with run(tmp_path, "second", lake.settings) as process:
            process.wait(DEADLINE)
    ended = (tmp_path / "second.json").read_text() if (tmp_path / "second.json").exists() else None
    assert ended == json.dumps({"status": "FINISHED", "error": None}), (tmp_path / "second.log").read_text()[-3000:]
    days = {row["n"]: row["run"] for row in visible(tmp_path / "days")}
    assert sorted(row["n"] for row in visible(tmp_path / "days")) == list(range(100 * DAYS))
    assert {days[n] for n in before} == {"first"} and "second" in days.values()
    found = visible(tmp_path / "orders")
    assert sorted(row["id"] for row in found) == [*range(ROWS), 100 * ROWS]
    read = {row["id"]: row["customer"] for row in found}
    assert {read[n] for n in committed} <= {f"c{n}" for n in range(7)}
    batches = sorted((row["batch"], row["id"]) for row in found)
    assert [n for _, n in batches] == [*range(ROWS), 100 * ROWS]  # in the order of the splits
    assert len({batch for batch, _ in batches}) == SPLITS
    rows_of_lake = sorted((row["n"], row["part"]) for row in visible(tmp_path / "rows"))
    assert rows_of_lake == [(n, f"p {n // 100 % 2}") for n in range(100 * (COMMITS + 1))]
