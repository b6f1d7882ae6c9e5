"""A second pipeline starts from a savepoint of a running one, beside it, and is killed: both are exact, each in its own sinks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dagster_checkpoints.sinks import SinkPathInUse
from tests.spark.fork_runner import ROWS, in_hours, pipeline

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

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    with (lab.folder / "green.log").open("w") as log:
        command = [sys.executable, str(RUNNER), str(lab.folder), savepoint]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        blue.wait_until(lambda: lab.count("green/rows") > 0 or process.poll() is not None)
        more()
        blue.wait_until(lambda: lab.control("green").status().rows("rows") or process.poll() is not None)
    finally:
        killed = process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    assert killed, (lab.folder / "green.log").read_text()[-3000:]
    blue.wait_until(lambda: blue.execution.rows().get("rows") == files * PER_FILE)
    blue.done("checkpoint")
    blue.wait_until(lambda: lab.count("green/rows") == (files - 1) * PER_FILE or green.poll() is not None)
    (lab.folder / "drain").touch()
    assert green.wait(150) == 0, (lab.folder / "green.log").read_text()[-3000:]
    assert not blue.over
    blue.drain()
    blue.finished()
    rows = lab.table("live", ROWS)
    lab.check(rows, "blue/rows")
    lab.check(in_hours(rows), "blue/hours")
    lab.check(rows.where(f"v >= {PER_FILE}"), "green/rows")  # what the first had not committed at its savepoint, and all after it
    lab.check(in_hours(rows), "green/hours")

    same = lab.start(pipeline("teal", lab.folder, "blue"), restore_from=savepoint).result().error
    assert isinstance(same.__cause__.__cause__, SinkPathInUse) and "pipeline 'blue' writes there" in str(same)
