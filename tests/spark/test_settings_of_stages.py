"""Settings that a stage's function changes, in the job's session or in another one: refused by `check` and at the start."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints import ParquetSink, Pipeline, stage, unbounded_source
from dagster_checkpoints.cli import check
from dagster_checkpoints.spark.job.pipeline_checks import check_plans
from dagster_checkpoints.spark.session import spark_session
from dagster_checkpoints.spark.session.spark_session import SparkSettingError

POLICY = "spark.sql.streaming.multipleWatermarkPolicy"


def pipeline(folder: Any, session: Any) -> Pipeline:
    """A pipeline whose query runs in the session that a function gives."""

    @unbounded_source
    def rows(context: Any) -> Any:
        return session(context.spark).readStream.schema("v long").parquet(str(folder))

    @stage(sink=ParquetSink(folder / "out"))
    def out(rows: Any) -> Any:
        return rows

    return Pipeline("p", [rows, out])


def test_the_query_of_a_session_with_another_setting_is_refused(spark: Any, tmp_path: Any) -> None:
    """A query runs in the session of its plan: with the policy `max` it drops rows of the source that is behind as late."""

    def changed(of: Any) -> Any:
        session = of.newSession()
        session.conf.set(POLICY, "max")
        return session

    with pytest.raises(SparkSettingError, match=rf"{POLICY}=max in the session of .*spark\.newSession"):
        check_plans(pipeline(tmp_path, changed), spark)
    assert check_plans(pipeline(tmp_path, lambda of: of.newSession()), spark).ok


def test_check_refuses_a_setting_that_a_run_would_refuse(spark: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(of: Any) -> Any:
        of.conf.set(POLICY, "max")
        return of

    code = type("Code", (), {"check_settings": lambda self: None, "spark_settings": lambda self: {}})()
    monkeypatch.setattr(spark_session, "build_session", lambda settings: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)
    try:
        with pytest.raises(SparkSettingError, match=f"{POLICY}=max"):
            check._reports(code, [pipeline(tmp_path, changed)], sinks=False)
    finally:
        spark.conf.set(POLICY, "min")
    assert [report.ok for report in check._reports(code, [pipeline(tmp_path, lambda of: of)], sinks=False)] == [True]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", r"\(not set\)"),
        ("spark.sql.parquet.outputTimestampType", "INT96"),
    ],
)
def test_a_setting_that_is_unset_counts_as_sparks_default(spark: Any, tmp_path: Any, name: str, found: str) -> None:
    def changed(of: Any) -> Any:
        session = of.newSession()
        session.conf.unset(name)
        return session

    with pytest.raises(SparkSettingError, match=f"{name}={found} in the session .*unset"):
        check_plans(pipeline(tmp_path, changed), spark)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.sql.session.timeZone", "America/New_York"),
        ("spark.sql.ansi.enabled", "false"),
        ("spark.sql.caseSensitive", "true"),
        ("spark.sql.legacy.timeParserPolicy", "LEGACY"),
    ],
)
def test_a_setting_that_decides_rows_is_refused_and_set_back(spark: Any, tmp_path: Any, name: str, value: str) -> None:
    def changed(of: Any) -> Any:
        of.conf.set(name, value)
        return of

    before = spark.conf.get(name)
    report = check_plans(pipeline(tmp_path, changed), spark)
    shown = str(report.failed["rows"])
    assert all(part in shown for part in ("'rows'", __file__, f"{name}={value}", "spark_config")), shown
    assert spark.conf.get(name) == before != value
    # Others, such as the number of partitions, change no row, and a session of one's own is no other stage's.
    for allowed in (lambda of: of, lambda of: of.conf.set("spark.sql.shuffle.partitions", "2") or of):
        assert check_plans(pipeline(tmp_path, allowed), spark).ok

    def in_its_own(of: Any) -> Any:
        session = of.newSession()
        session.conf.set(name, value)
        return session

    assert check_plans(pipeline(tmp_path, in_its_own), spark).ok


@pytest.fixture
def own_settings(spark: Any) -> Any:
    """Sets the settings of the session that all tests share back."""
    before = dict(spark.conf.getAll)
    yield {name: value for name, value in before.items() if not name.startswith(("spark.app.", "spark.driver.port"))}
    for name in dict(spark.conf.getAll).keys() - before.keys():
        spark.conf.unset(name)
    for name, value in before.items():
        if spark.conf.get(name, None) != value:
            spark.conf.set(name, value)


@pytest.mark.parametrize("name", ["spark.sql.ansi.enabled", "spark.sql.caseSensitive", "spark.sql.legacy.sizeOfNull"])
def test_a_pipeline_does_not_get_the_settings_of_what_ran_before_it_in_the_process(
    spark: Any, own_settings: dict[str, str], name: str
) -> None:
    usual = spark.conf.get(name)
    other = "false" if usual == "true" else "true"
    assert name not in own_settings
    for before in ("another pipeline", "other code"):
        if before == "another pipeline":
            assert spark_session.build_session({**own_settings, name: other}).conf.get(name) == other
        else:
            spark.conf.set(name, other)
        assert spark_session.build_session(own_settings).conf.get(name) == usual, before


def test_a_session_that_other_code_has_made_is_refused_with_settings_that_decide_rows(
    spark: Any, own_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_session, "_OF_A_FRESH_SESSION", {})
    spark.conf.set("spark.sql.ansi.enabled", "false")
    with pytest.raises(SparkSettingError, match=r"spark\.sql\.ansi\.enabled=false.*other code.*spark_config.*process of its own"):
        spark_session.build_session(own_settings)
    named = {**own_settings, "spark.sql.ansi.enabled": "false"}
    assert spark_session.build_session(named).conf.get("spark.sql.ansi.enabled") == "false"
    assert spark_session.build_session(own_settings).conf.get("spark.sql.ansi.enabled") == "true", "that of another pipeline"
