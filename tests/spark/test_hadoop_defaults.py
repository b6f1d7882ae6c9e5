"""Hadoop's settings go to tasks without the names of the files that their defaults are from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dagster_checkpoints.spark.session.hadoop import forget_files_of_defaults
from dagster_checkpoints.spark.session.spark_session import prepare_session

GZIP = b"\x1f\x8b\x08"
"""How each stream of gzip begins."""
DEFAULT = "io.seqfile.compress.blocksize"


@pytest.fixture
def jvm(spark: SparkSession) -> Any:
    return spark._jvm


@pytest.fixture
def hadoop(spark: SparkSession) -> Iterator[Any]:
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    yield settings
    forget_files_of_defaults(spark)


def sent(spark: SparkSession) -> Any:
    """What a query sends to its tasks."""
    return spark._jsparkSession.sessionState().newHadoopConf()


def written(jvm: Any, settings: Any) -> bytes:
    data = jvm.java.io.ByteArrayOutputStream()
    settings.write(jvm.java.io.DataOutputStream(data))
    return bytes(data.toByteArray())


def test_the_settings_of_a_session_forget_the_files_and_keep_all_values(spark: SparkSession, jvm: Any, hadoop: Any) -> None:
    hadoop.reloadConfiguration()  # as a session that was not prepared
    assert list(sent(spark).getPropertySources(DEFAULT)) == ["core-default.xml"]
    values = sent(spark).getValByRegex(".*")
    assert written(jvm, sent(spark)).count(GZIP) > 1000
    assert forget_files_of_defaults(spark)
    assert sent(spark).getPropertySources(DEFAULT) is None
    assert sent(spark).getValByRegex(".*").equals(values)
    assert written(jvm, sent(spark)).count(GZIP) < 200  # the settings of the session itself
    read = jvm.org.apache.hadoop.conf.Configuration(False)
    read.readFields(jvm.java.io.DataInputStream(jvm.java.io.ByteArrayInputStream(written(jvm, sent(spark)))))
    assert read.getValByRegex(".*").equals(values)


def test_each_session_is_prepared_so(spark: SparkSession, hadoop: Any) -> None:
    hadoop.reloadConfiguration()
    assert sent(spark).getPropertySources(DEFAULT) is not None
    prepare_session(spark)
    assert sent(spark).getPropertySources(DEFAULT) is None


def test_what_a_program_has_set_keeps_its_origin(spark: SparkSession, hadoop: Any) -> None:
    own, default = "my.own.setting", "io.map.index.interval"  # not DEFAULT: its origin would stay for the other tests
    before = hadoop.get(default)
    try:
        hadoop.set(own, "1")
        hadoop.set(default, "8192")
        assert forget_files_of_defaults(spark)
        assert [list(sent(spark).getPropertySources(name)) for name in (own, default)] == [["programmatically"]] * 2
        assert (sent(spark).get(own), sent(spark).get(default)) == ("1", "8192")
    finally:
        hadoop.unset(own)
        hadoop.set(default, before)


@pytest.mark.parametrize("source", ["parquet", "orc", "json", "csv", "text"])
def test_no_format_of_files_brings_the_files_back(spark: SparkSession, hadoop: Any, tmp_path: Path, source: str) -> None:
    """Classes of Hadoop have defaults of their own, which it reads with those of all others when such a class is loaded."""
    spark.range(3).selectExpr("CAST(id AS STRING) AS id").write.format(source).save(str(tmp_path / source))
    assert spark.read.format(source).load(str(tmp_path / source)).count() == 3
    assert sent(spark).getPropertySources("mapreduce.job.maps") is None


def test_a_session_of_another_hadoop_is_used_as_it_is(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(jvm: Any, name: str) -> Any:
        raise RuntimeError(f"no field {name}")

    monkeypatch.setattr("dagster_checkpoints.spark.session.hadoop._field", fails)
    assert not forget_files_of_defaults(spark)
