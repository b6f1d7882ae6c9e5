"""A second pipeline starts from a savepoint of a running one, beside it, and is killed: both are exact, each in its own sinks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from dagster_checkpoints.sinks import SinkPathInUse
from dagster_checkpoints.spark.job.events import JobStarted
from tests.spark.processes.fork_runner import ROWS, in_hours, pipeline

RUNNER = Path(__file__).with_name("fork_runner.py")
PER_FILE = 40


def test_a_second_pipeline_runs_beside_the_first_from_its_savepoint(lab: Any) -> None:
    files = 0

    def more() -> None:
        nonlocal files
        minutes = range(files * PER_FILE, (files + 1) * PER_FILE)
        lab.put("live", ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in minutes])
        files += 1

    blue = lab.start(pipeline("blue", lab.folder, "blue"), interval=None)
    more()
    blue.wait_until(lambda: blue.execution.rows().get("rows") == PER_FILE)
    blue.done("checkpoint")
    more()
    savepoint = blue.done("savepoint", name="for-green").url

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYSPARK_PYTHON": sys.executable}
    with (lab.folder / "green.log").open("w") as log:
        command = [sys.executable, str(RUNNER), str(lab.folder), savepoint]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        blue.wait_until(lambda: lab.count("green/rows") > 0 or process.poll() is not None)
        before = lab.count("green/rows")
        for _ in range(4):
            more()
        blue.wait_until(lambda: lab.count("green/rows") > before or process.poll() is not None)
    finally:
        died = process.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    assert not died, (lab.folder / "green.log").read_text()[-3000:]
    blue.wait_until(lambda: blue.execution.rows().get("rows") == files * PER_FILE)
    assert len(blue.of(JobStarted)) == 1
    blue.drain()
    blue.finished()

    more()
    green = lab.start(pipeline("green", lab.folder, "green"), checkpoints={"mode": "at_least_once"}, lease_seconds=6.0)
    restored = green.wait_for(JobStarted).restored_location
    assert restored is not None and restored.startswith("checkpoints/"), "its own, not the savepoint of the first pipeline"
    green.wait_until(lambda: green.execution.rows().get("rows") == files * PER_FILE)
    green.drain()
    green.finished()
    rows = lab.table("live", ROWS)
    of_blue = rows.where(f"v < {(files - 1) * PER_FILE}")
    lab.check(of_blue, "blue/rows")
    lab.check(in_hours(of_blue), "blue/hours")
    lab.check(rows.where(f"v >= {PER_FILE}"), "green/rows")  # what the first had not committed at its savepoint, and all after it
    lab.check(in_hours(rows), "green/hours")

    same = lab.start(pipeline("teal", lab.folder, "blue"), restore_from=savepoint).result().error
    assert isinstance(same.__cause__.__cause__, SinkPathInUse) and "pipeline 'blue' writes there" in str(same)
