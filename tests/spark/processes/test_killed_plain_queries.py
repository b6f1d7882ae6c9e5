"""Plain queries that were killed in the middle of a micro-batch, with Spark's default settings, are taken over by pipelines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from dagster_checkpoints.spark.stored_state import import_checkpoint
from tests.spark.plain_programs import PROGRAMS, ROWS, rows_of

ROOT = Path(__file__).parents[3]
RUNNER = Path(__file__).with_name("plain_runner.py")
DEADLINE = 240.0
FILES = 8


def test_killed_queries_go_on_as_pipelines(lab: Any) -> None:
    """A join that keeps rows without a match and windows; `long/test_killed_plain_programs.py` has the other programs."""
    check_killed_queries(lab, ["windows", "unmatched"])


def check_killed_queries(lab: Any, names: list[str]) -> None:
    run_until_killed(lab, names)
    check_taken(lab, names)


def check_taken(lab: Any, names: list[str], spark_version: str = "") -> None:
    """Check that pipelines go on exactly where queries were killed.

    Args:
        lab: The environment, in whose folder they ran.
        names: The names of their programs.
        spark_version: The version of Spark that ran them; "" for the installed one.
    """
    in_the_middle = 0
    for name in names:
        program = PROGRAMS[name]
        checkpoint, output = lab.folder / name / "checkpoint", lab.folder / name / "plain"
        pipeline = program.pipeline(lambda stream: lab.stream(stream, ROWS), lab.sink(f"{name}/out"), bounded=True)
        target = str(lab.folder / "savepoints")
        taken = import_checkpoint(
            lab.spark, pipeline, checkpoint, stage=name, target=target, output=output, spark_version=spark_version
        )
        in_the_middle += not (checkpoint / f"commits/{newest(checkpoint / 'offsets')}").exists()
        lab.start(pipeline, interval=0.5, restore_from=taken.url).finished()
        found = Counter(lab.committed(f"{name}/out"))
        found.update(lab.rows(lab.spark.read.parquet(str(output))))
        wanted = Counter(lab.rows(program.expected(*(lab.table(stream, ROWS) for stream in program.streams))))
        assert found == wanted, (name, taken, list((wanted - found).elements())[:5], list((found - wanted).elements())[:5])
    assert in_the_middle, "no query was in the middle of a micro-batch"


def newest(log: Path) -> int:
    return max(int(each.name) for each in log.iterdir() if each.name.isdecimal())


def run_until_killed(lab: Any, names: list[str], python: str = sys.executable) -> None:
    """Run the plain queries of programs, under a Python's version of Spark, until they are killed."""
    for file in range(FILES):
        for stream in ("left", "right"):
            lab.put(stream, ROWS, rows_of(stream, file, lab.at))
    folder: Path = lab.folder
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": python}
    with (folder / "plain.log").open("w") as log:
        process = subprocess.Popen(
            [python, str(RUNNER), str(folder), *names],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    until = time.monotonic() + DEADLINE
    try:
        while not (folder / "going").exists():
            assert process.poll() is None and time.monotonic() < until, (folder / "plain.log").read_text()[-3000:]
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
