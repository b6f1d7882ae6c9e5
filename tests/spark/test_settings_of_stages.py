"""Settings that a stage's function changes, in the job's session or in another one: refused by `check` and at the start."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints import ParquetSink, Pipeline, stage, unbounded_source
from dagster_checkpoints.cli import check
from dagster_checkpoints.spark.job.plan_check import check_plans
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
