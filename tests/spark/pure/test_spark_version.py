"""A version of Spark that the plugin does not run on is refused by name, before its JVM starts; without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from dagster_checkpoints.spark.session import spark_session
from dagster_checkpoints.spark.session.spark_version import SparkVersionError, check_supported, installed_version


def test_the_installed_version_is_that_of_pyspark_and_supported() -> None:
    assert installed_version() == pyspark.__version__
    check_supported(installed_version())


@pytest.mark.parametrize("version", ["3.5.9", "4.0.5", "4.4.0", "5.0.0"])
def test_another_version_is_refused_before_java_is_looked_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    def java() -> None:
        raise AssertionError("Java was looked for")

    monkeypatch.setattr(spark_session, "configure_java", java)
    monkeypatch.setattr(spark_session, "installed_version", lambda: version)
    with pytest.raises(SparkVersionError, match=rf"expected Spark 4.1, 4.2 or 4.3, found Spark {version}\..*pip install"):
        spark_session.build_session()


def test_a_session_of_another_version_than_pyspark_is_refused() -> None:
    session: Any = SimpleNamespace(version="3.5.9")
    with pytest.raises(SparkVersionError, match=r"found Spark 3\.5\.9\..*SPARK_HOME"):
        spark_session.check_session(session)
