"""A Spark home without the archive that makes Python workers slow: when it is used, and when not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dagster_checkpoints.spark.session.spark_home import lean_spark_home

LOCAL = {"spark.master": "local[2]"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)


def test_the_home_has_everything_but_the_archive_and_only_while_the_jvm_is_launched() -> None:
    homes = []
    for _ in range(2):
        with lean_spark_home(LOCAL):
            homes.append(Path(os.environ["SPARK_HOME"]))
        assert "SPARK_HOME" not in os.environ
    assert homes[0] == homes[1], "created once"
    assert (homes[0] / "bin" / "spark-submit").is_file() and (homes[0] / "jars").is_dir()
    assert not (homes[0] / "python").exists()


@pytest.mark.parametrize(
    ("settings", "variable", "value"),
    [
        ({"spark.master": "spark://127.0.0.1:7077"}, "", ""),
        ({**LOCAL, "spark.pyspark.python": "/bin/sh"}, "", ""),
        (LOCAL, "PYSPARK_PYTHON", "/bin/sh"),
        (LOCAL, "PYSPARK_PYTHON", "/no/such/python"),
        (LOCAL, "SPARK_HOME", "/opt/spark"),
    ],
)
def test_a_users_choice_of_spark_or_python_is_not_changed(
    settings: dict[str, str], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, value)
    before = os.environ.get("SPARK_HOME")
    with lean_spark_home(settings):
        assert os.environ.get("SPARK_HOME") == before
    assert os.environ.get("SPARK_HOME") == before


def test_this_python_by_another_of_its_names_is_still_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", str(Path(sys.executable).parent / "python"))
    with lean_spark_home(LOCAL):
        assert "SPARK_HOME" in os.environ


def test_a_cache_that_cannot_be_written_only_costs_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with lean_spark_home(LOCAL):
        assert "SPARK_HOME" not in os.environ
