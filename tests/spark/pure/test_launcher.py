"""A JVM that ends before Spark begins: its reason is in the error, and what it wrote is on the standard error as ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_checkpoints.spark.session.java import cache_directory
from dagster_checkpoints.spark.session.launcher import SparkLaunchError, check_user, launch_problem
from dagster_checkpoints.spark.session.spark_session import SparkSettingError, prepare_session

IVY = """\
:: loading settings :: file = ivysettings.xml
org.example#reader_2.12 added as a dependency
		module not found: org.example#reader_2.12;9.9
		::::::::::::::::::::::::::::::::::::::::::::::
		::          UNRESOLVED DEPENDENCIES         ::
		::::::::::::::::::::::::::::::::::::::::::::::
		:: org.example#reader_2.12;9.9: not found
		:: org.other#writer;1: configuration not found in org.other#writer;1: 'master'
		::::::::::::::::::::::::::::::::::::::::::::::
Exception in thread "main" java.lang.RuntimeException: [unresolved dependency: org.example#reader_2.12;9.9: not found]
	at org.apache.spark.util.MavenUtils$.resolveMavenCoordinates(MavenUtils.scala:539)
"""


@pytest.mark.parametrize(
    ("output", "texts"),
    [
        (IVY, ["org.example:reader_2.12:9.9 (not found)", "org.other:writer:1 (configuration not found", "_2.13", "spark.jars"]),
        (
            "Invalid maximum heap size: -Xmx9z\nError: Could not create the Java Virtual Machine.\n",
            ["-Xmx9z", "spark.driver.memory"],
        ),
        (
            "WARNING: Using incubator modules: jdk.incubator.vector\nUnrecognized VM option 'Nix'\n",
            ["output: Unrecognized VM option"],
        ),
        ("", ["it has written nothing", "JAVA_HOME"]),
    ],
)
def test_what_the_launchers_output_says(output: str, texts: list[str]) -> None:
    problem = launch_problem(output, {"spark.jars.packages": "org.example:reader_2.12:9.9,org.other:writer:1"})
    for text in texts:
        assert text in problem
    assert "\tat " not in problem and "::" not in problem


LAUNCHES = """
from dagster_checkpoints.spark.session.launcher import SparkLaunchError
from dagster_checkpoints.spark.session.spark_session import build_session

settings = {"spark.master": "local[1]", "spark.jars.ivySettings": "settings.xml"}
for more in ({"spark.driver.memory": "9q"}, {"spark.jars.packages": "org.example:reader_2.12:9.9"}):
    try:
        build_session({**settings, **more})
    except SparkLaunchError as error:
        print("refused:", error)
"""


def test_a_package_that_is_not_found_and_memory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "settings.xml").write_text(
        f'<ivysettings><settings defaultResolver="here"/><caches defaultCacheDir="{tmp_path}/cache"/><resolvers>'
        f'<filesystem name="here"><artifact pattern="{tmp_path}/[artifact].[ext]"/></filesystem></resolvers></ivysettings>'
    )
    ran = subprocess.run([sys.executable, "-c", LAUNCHES], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    memory, package = [line for line in ran.stdout.splitlines() if line.startswith("refused: ")]
    assert "9q" in memory and "spark.driver.memory" in memory
    assert "found no org.example:reader_2.12:9.9 (not found)" in package
    assert "UNRESOLVED DEPENDENCIES" in ran.stderr  # passed on


FILES = """
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_checkpoints.spark.session.spark_session import build_session

Path("in").mkdir()
for number, name in enumerate(["a", "ä", "日本"]):
    pq.write_table(pa.table({"n": [number]}), f"in/{name}.parquet")
spark = build_session({"spark.master": "local[1]"})
print("read:", sorted(row.n for row in spark.read.parquet(os.path.abspath("in")).collect()), os.environ["LC_ALL"])
"""


def test_files_of_every_name_are_read_in_any_locale(tmp_path: Path) -> None:
    folder = tmp_path / "ö"
    folder.mkdir()
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "1", "SPARK_API_MODE": "connect"}  # the session is a classic one
    command = [sys.executable, "-c", FILES]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.stdout.splitlines() == ["read: [0, 1, 2] C"], ran.stderr


def test_a_session_that_does_not_know_all_file_names_is_refused() -> None:
    """One that other code has made, or on a machine without the locale."""
    spark: Any = SimpleNamespace(_jvm=SimpleNamespace(System=SimpleNamespace(getProperty=lambda name: "ISO-8859-1")))
    with pytest.raises(SparkSettingError, match=r"ISO-8859-1: expected UTF-8\..*leaves out a file.*Set LC_ALL"):
        prepare_session(spark)


def test_a_user_without_an_entry_in_etc_passwd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers have them: Spark would end with "basedir must be absolute" or "invalid null input: name"."""
    check_user()
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SparkLaunchError, match=r"user of this process, 54321, has a name, found no entry for it"):
        check_user()
    assert cache_directory() == Path("/.cache/dagster-checkpoints")
