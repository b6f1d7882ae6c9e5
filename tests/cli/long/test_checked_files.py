"""`check` of the sinks of pipelines, on a file as a user writes it; and of the example for Kubernetes."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from tests.cli.test_cli_check import PIPELINE, check

REPOSITORY = Path(__file__).resolve().parents[3]

SINKS = """
from dagster_checkpoints import DeltaSink, FileSink, IcebergSink, SqlSink

@bounded_source(sink=DeltaSink("delta"))
def fitting(context):
    return context.spark.range(3)

@bounded_source(sink=DeltaSink("delta", at_new_start="keep"))
def unfit(context):
    return context.spark.range(3).selectExpr("CAST(id AS string) AS id")

@bounded_source(sink=SqlSink("sqlite:///shop.db", "sales"))
def sales(context):
    return context.spark.range(3)

@bounded_source(sink=ParquetSink("location.py/out"))
def unwritable(context):
    return context.spark.range(3)

@bounded_source(sink=ParquetSink("others"))
def foreign(context):
    return context.spark.range(3)

@bounded_source(sink=SqlSink("postgresql+psycopg://me:secret@localhost:1/shop", "sales"))
def away(context):
    return context.spark.range(3)

class Failing(ParquetSink):
    def check_target(self, context, rows):
        raise KeyError("of the sink's own code")

@bounded_source(sink=Failing("failing"))
def failing(context):
    return context.spark.range(3)

one = Pipeline("one", [fitting, failing, sales, unwritable, foreign, away])
two = Pipeline("two", [unfit])
"""


def test_the_sinks_are_checked_and_nothing_stays_behind(tmp_path: Path) -> None:
    (tmp_path / "location.py").write_text(PIPELINE + SINKS)
    write_deltalake(str(tmp_path / "delta"), pa.table({"id": pa.array([1], pa.int64())}))
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE sales (id TEXT NOT NULL, more TEXT NOT NULL)")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / ".sink.json").write_text('{"pipeline": "elsewhere", "stage": "foreign"}')
    before = {path for path in tmp_path.rglob("*")}
    ran = check(tmp_path, "-f", "location.py", "--json")
    assert ran.returncode == 1, ran.stderr
    one, two = json.loads(ran.stdout)["pipelines"]
    found = {stage["name"]: stage for stage in one["stages"] + two["stages"]}
    assert {name: stage["result"] for name, stage in found.items()} == {
        "fitting": "passed",
        "failing": "failed",
        "sales": "failed",
        "unwritable": "failed",
        "foreign": "failed",
        "away": "passed",
        "unfit": "failed",
    }
    assert {stage["error"] for stage in found.values() if "error" in stage} == {"StageSinkError"}
    assert 'fails while it is checked. KeyError: "of the sink\'s own code"' in found["failing"]["message"]
    assert "location.py:" in found["sales"]["message"] and "'id'" in found["sales"]["message"]
    assert "A part of the path is a file" in found["unwritable"]["message"]
    assert "stage 'foreign' of pipeline 'elsewhere' writes there" in found["foreign"]["message"]
    assert "column 'id'" in found["unfit"]["message"]
    (warning,) = one["warnings"]
    assert warning.startswith("Stage 'away': whether its sink takes its rows is not known: ") and "secret" not in ran.stdout
    assert {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)} == before


def test_the_example_for_kubernetes_passes() -> None:
    ran = check(REPOSITORY, "-f", "examples/kubernetes/orders.py", "--without-sinks")
    assert ran.returncode == 0, ran.stdout + ran.stderr
