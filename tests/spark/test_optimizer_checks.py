"""Plans of which Spark's optimizer makes others: which are refused at `check`, and which are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.errors import PlanRefusedError
from dagster_checkpoints.spark.job.pipeline_checks import check_plans

NEAR = "k = rk AND rts BETWEEN ts AND ts + INTERVAL 5 MINUTES"


def joined(how: str) -> Callable[[DataFrame, DataFrame], DataFrame]:
    return lambda a, b: a.join(b, F.expr(NEAR), how)


def most(frame: DataFrame, time: str, key: str) -> DataFrame:
    return frame.groupBy(F.window(time, "10 minutes"), key).agg(F.max("v" if key == "k" else "w").alias("most"))


STREAMS: dict[str, tuple[Callable[[DataFrame, DataFrame], DataFrame], bool]] = {
    "groups of the left side of a left join": (lambda a, b: most(joined("left")(a, b), "ts", "k"), True),
    "groups of the right side of a right join": (lambda a, b: most(joined("right")(a, b), "rts", "rk"), True),
    "SELECT DISTINCT of the left side": (
        lambda a, b: a.sparkSession.sql(f"SELECT DISTINCT k, ts FROM {{a}} LEFT JOIN {{b}} ON {NEAR}", a=a, b=b),
        True,
    ),
    "distinct rows of the left side": (lambda a, b: joined("left")(a, b).select("k", "ts").distinct(), False),
    "groups beside a branch without rows": (
        lambda a, b: most(a.unionByName(b.where("false").toDF("k", "ts", "v")), "ts", "k"),
        False,
    ),
    "groups of both sides": (
        lambda a, b: joined("left")(a, b).groupBy(F.window("ts", "10 minutes"), "k").agg(F.max("v"), F.max("w")).drop("window"),
        False,
    ),
    "distinct rows of both sides": (lambda a, b: joined("left")(a, b).select("k", "ts", "w").distinct(), False),
    "groups of an inner join": (lambda a, b: most(joined("inner")(a, b), "ts", "k"), False),
    "a left join alone": (lambda a, b: joined("left")(a, b).select("k", "ts", "v"), False),
    "a union": (lambda a, b: most(a.unionByName(b.toDF("k", "ts", "v")), "ts", "k"), False),
}  # fmt: skip


@pytest.mark.parametrize("what", STREAMS)
def test_a_stream_that_the_optimizer_leaves_out_holds_no_event_time_back(spark: SparkSession, tmp_path: Path, what: str) -> None:
    make, refused = STREAMS[what]

    @bounded_source(watermark=("ts", "1 minute"))
    def a(context: Any) -> Any:
        return context.spark.readStream.schema("k string, ts timestamp, v long").parquet(str(tmp_path))

    @bounded_source(watermark=("rts", "1 minute"))
    def b(context: Any) -> Any:
        return context.spark.readStream.schema("rk string, rts timestamp, w long").parquet(str(tmp_path))

    @stage(sink=ParquetSink("/nowhere"))
    def joins(a: Any, b: Any) -> Any:
        return make(a, b).drop("window")

    for fuse in (False, True):
        report = check_plans(Pipeline("p", [a, b, joins], chaining=fuse), spark)
        assert set(report.failed) == ({"joins"} if refused else set()), report.failed
        if refused:
            error = report.failed["joins"]
            assert isinstance(error, PlanRefusedError)
            assert all(part in str(error) for part in ("'joins'", __file__, "leaves it out", "Remove the join or the branch"))


BY_KEY = "SELECT max(x) FROM {t} t WHERE t.k = a.k"
SUBQUERIES: dict[str, tuple[str, bool]] = {
    "the newest row until then": (
        "SELECT a.*, (SELECT max_by(x, lo) FROM {t} t WHERE t.k = a.k AND t.lo <= a.ts) p FROM {a} a",
        True,
    ),
    "the number of rows until then": ("SELECT a.*, (SELECT count(*) FROM {t} t WHERE t.lo <= a.ts) n FROM {a} a", True),
    "another inequality": ("SELECT a.*, (SELECT max(x) FROM {t} t WHERE t.x <= a.v) m FROM {a} a", True),
    "a left lateral join": (
        "SELECT a.*, p.x FROM {a} a LEFT JOIN LATERAL (SELECT max(x) x FROM {t} t WHERE t.k = a.k AND t.lo <= a.ts) p",
        True,
    ),
    "by equal columns": (f"SELECT a.*, ({BY_KEY}) m FROM {{a}} a", False),
    "the number of equal ones": ("SELECT a.*, (SELECT count(*) FROM {t} t WHERE t.k = a.k) n FROM {a} a", False),
    "a subquery without a reference": ("SELECT a.*, (SELECT max(x) FROM {t}) m FROM {a} a", False),
    "exists": ("SELECT * FROM {a} a WHERE EXISTS (SELECT 1 FROM {t} t WHERE t.k = a.k AND t.lo <= a.ts)", False),
    "in": ("SELECT * FROM {a} a WHERE k IN (SELECT k FROM {t})", False),
    "not in": ("SELECT * FROM {a} a WHERE k NOT IN (SELECT k FROM {t})", False),
    "a join by an inequality": ("SELECT a.*, x FROM {a} a LEFT JOIN {t} t ON t.k = a.k AND t.lo <= a.ts", False),
}


@pytest.mark.parametrize("what", SUBQUERIES)
def test_a_subquery_over_a_table_makes_no_state(spark: SparkSession, tmp_path: Path, what: str) -> None:
    sql, refused = SUBQUERIES[what]

    @bounded_source(watermark=("ts", "1 minute"))
    def a(context: Any) -> Any:
        return context.spark.readStream.schema("k string, ts timestamp, v long").parquet(str(tmp_path))

    @bounded_source
    def t(context: Any) -> Any:
        return context.spark.createDataFrame([], "k string, lo timestamp, x long")

    @stage(sink=ParquetSink("/nowhere"), inputs={"t": StageInput(mode="static")})
    def looks_up(a: Any, t: Any) -> Any:
        return a.sparkSession.sql(sql, a=a, t=t)

    report = check_plans(Pipeline("p", [a, t, looks_up], chaining=False), spark)
    assert set(report.failed) == ({"looks_up"} if refused else set()), report.failed
    if refused:
        shown = str(report.failed["looks_up"])
        assert all(part in shown for part in ("'looks_up'", __file__, "subquery, or a lateral join", "process_batch")), shown
