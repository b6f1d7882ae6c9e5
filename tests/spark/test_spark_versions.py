"""A savepoint, or a plain query's directory, of one version of Spark, with which another one goes on: exactly, or refused.

The other version is that of the Python that `OTHER_SPARK_PYTHON` names; `make test-spark` sets it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.processes.test_killed_plain_queries import run_until_killed

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("version_runner.py")
DEADLINE = 600.0
THIS = sys.executable
OTHER = os.environ.get("OTHER_SPARK_PYTHON", "")

pytestmark = pytest.mark.skipif(not OTHER, reason="needs two versions of Spark: make test-spark VERSION=4.1")


def _runner() -> Any:
    spec = importlib.util.spec_from_file_location("version_runner_for_reference", RUNNER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version_of(python: str) -> tuple[int, ...]:
    """Major and minor number of a Python's PySpark."""
    found = subprocess.check_output([python, "-c", "import pyspark; print(pyspark.__version__)"], text=True, timeout=DEADLINE)
    return tuple(int(part) for part in found.split(".")[:2])


def run(python: str, lab: Any, stop: str, **rows: int) -> str:
    """Run the pipeline up to a stop in a process of its own. Returns what it prints: its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": python}
    command = [python, str(RUNNER), str(lab.folder), stop, json.dumps(rows)]
    with (lab.folder / "log").open("w") as log:
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, timeout=DEADLINE)
    return done.stdout or (lab.folder / "log").read_text()[-6000:]


@pytest.mark.parametrize(("first", "second"), [(THIS, OTHER), (OTHER, THIS)], ids=["to_the_other", "from_the_other"])
def test_a_savepoint_of_another_version_is_restored_exactly_or_refused(lab: Any, first: str, second: str) -> None:
    runner = _runner()
    written, restored = version_of(first), version_of(second)
    assert written != restored
    lab.put("names", runner.NAMES, [("a", "Anna"), ("b", "Bob")])
    clicks = sum(runner.put(lab, begin) for begin in (0, 240, 480))
    output = run(first, lab, "suspend", kept=clicks, twice=2)
    assert f"Stopped under Spark {written[0]}.{written[1]}." in output, output
    assert lab.count("lists") == 0, "the test needs state in the savepoint"

    clicks += sum(runner.put(lab, begin) for begin in (600, 720)) + runner.put_last(lab, 1700)
    output = run(
        second, lab, "drain", kept=clicks, buys=15, in_one_query=6
    )  # the windows before the last click, which has been read
    if restored < (4, 2) <= written:
        assert f"Spark {written[0]}.{written[1]}." in output and "Restore it with Spark 4.2 or newer" in output, output
        return
    assert f"Stopped under Spark {restored[0]}.{restored[1]}." in output, output
    runner.check(lab)


@pytest.mark.parametrize(("first", "second"), [(THIS, OTHER), (OTHER, THIS)], ids=["to_the_other", "from_the_other"])
def test_a_plain_query_of_another_version_is_taken_over_exactly_or_refused(lab: Any, first: str, second: str) -> None:
    names = ["windows", "unmatched", "timers", "first"]
    written, taken = version_of(first), version_of(second)
    run_until_killed(lab, names, first)
    settings = json.dumps({"killed": names, "spark_version": ".".join(map(str, written))})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": second}
    command = [second, str(RUNNER.with_name("takeover_runner.py")), str(lab.folder), settings]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    if taken < (4, 2) <= written:
        assert done.returncode and "Restore it with Spark 4.2 or newer" in done.stderr, done.stderr[-6000:]
    else:
        assert done.returncode == 0, done.stderr[-6000:]
