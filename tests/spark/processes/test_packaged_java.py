"""Spark on the Java that comes as a package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SPARK_JOB = """
import os, sys
from dagster_checkpoints.spark.session.java import configure_java
print("home", configure_java())
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print("java", spark._jvm.java.lang.System.getProperty("java.version"))
print("sum", spark.range(101).groupBy().sum("id").first()[0])
spark.stop()
"""


def test_spark_runs_on_the_packaged_java_of_a_machine_that_has_none(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    # The commands that Spark's launcher script calls, without java.
    for name in ["bash", "sh", "dirname", "basename", "env", "head", "sed", "grep", "ps", "nice"]:
        found = next((p for p in (Path("/bin") / name, Path("/usr/bin") / name) if p.exists()), None)
        if found is not None:
            (programs / name).symlink_to(found)
    environment = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    environment |= {"PATH": str(programs), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    result = subprocess.run(
        [sys.executable, "-c", SPARK_JOB],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert lines["home"].startswith(str(tmp_path / "cache"))
    assert lines["java"].startswith("21.")
    assert lines["sum"] == "5050"
