"""`check` as a user's continuous integration runs it, on files as a user writes them; and code locations as `-f`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.cli.loading import CodeNotImported, load_code, load_pipeline

PIPELINE = """
import dagster as dg
from dagster_checkpoints import (
    CheckpointCoordinatorResource, ParquetSink, Pipeline, bounded_source, pipeline_assets, stage, unbounded_source,
)


def _assets():
    @bounded_source
    def numbers(context):
        return context.spark.range(5)

    @stage(sink=ParquetSink("numbers"))
    def doubled(numbers):
        return numbers.selectExpr("id * 2 AS id")

    pipeline = Pipeline("behind_assets", [numbers, doubled])

    @pipeline_assets(pipeline=pipeline, key_prefix="deep")
    def assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
        yield from checkpoint_coordinator.run(pipeline, context=context)

    return assets
"""
LAZY = """
@dg.definitions
def defs():
    other = dg.Definitions(resources={"checkpoint_coordinator": CheckpointCoordinatorResource(storage="checkpoints")})
    return dg.Definitions.merge(dg.Definitions(assets=[_assets().with_attributes(group_names_by_key={})]), other)
"""
MISTAKES = """
print("printed while the code is imported")

@bounded_source(watermark=("ts", "1 hour"))
def history(context):
    print("printed by a stage")
    return context.spark.readStream.schema("ts timestamp, v long").parquet(".")

@stage
def total(history):
    return history.select("value")

@stage(sink=ParquetSink("behind"))
def behind(total):
    return total

@unbounded_source
def ending(context):
    return context.spark.range(3)

@stage(sink=ParquetSink("mistakes.py/sound"))  # no place to write to
def sound(history):
    return history

sales = Pipeline("sales", [history, total, behind, sound])

@stage(sink=ParquetSink("clicks_out"))
def kept(ending):
    return ending

clicks = Pipeline("clicks", [ending, kept])
"""


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("CHECKPOINT_STORAGE", "DAGSTER_HOME")}
    command = [sys.executable, "-m", "dagster_checkpoints.cli", "check", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_all_mistakes_of_all_pipelines_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "mistakes.py").write_text(PIPELINE + MISTAKES)
    before = sorted(tmp_path.rglob("*"))
    ran = check(tmp_path, "-f", "mistakes.py", "--json", "--without-sinks")
    assert ran.returncode == 1, ran.stderr
    told = json.loads(ran.stdout)
    assert "printed while the code is imported" in ran.stderr and "printed by a stage" in ran.stderr
    sales, clicks = told["pipelines"]
    results = {stage["name"]: stage["result"] for stage in sales["stages"] + clicks["stages"]}
    assert results == {
        "history": "passed",
        "total": "failed",
        "behind": "unchecked",
        "sound": "passed",
        "ending": "failed",
        "kept": "unchecked",
    }
    messages = {stage["name"]: stage.get("message", "") for stage in sales["stages"] + clicks["stages"]}
    first, *rest = messages["total"].splitlines()
    assert re.match(r"Stage 'total' .* failed at .*mistakes\.py:\d+, in total: return history\.select\(\"value\"\)", first)
    assert rest[0].startswith("AnalysisException: [UNRESOLVED_COLUMN") and "+-" not in messages["total"]
    assert "declare the source @bounded_source" in messages["ending"]
    assert [stage["because_of"] for stage in sales["stages"] if stage["result"] == "unchecked"] == ["total"]
    assert any("maxFilesPerTrigger" in warning for warning in sales["warnings"])
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)) == before


def test_a_code_location_whose_pipeline_is_only_behind_its_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "location.py").write_text(PIPELINE + LAZY)
    ran = check(tmp_path, "-f", "location.py")
    assert ran.returncode == 0, ran.stderr
    assert "pipeline behind_assets" in ran.stdout
    assert "2 of 2 stages can run, in 2 Spark queries; 0 warnings." in ran.stdout
    # `graph` and `verify` find a pipeline by the same means.
    found = load_pipeline(None, str(tmp_path / "location.py"), "defs", None)
    assert found is not None and found.name == "behind_assets"
    with pytest.raises(UsageProblem, match=r"expected a pipeline 'other'.*Its pipelines: behind_assets"):
        load_pipeline(None, str(tmp_path / "location.py"), None, "other")


def test_code_that_cannot_be_imported_fails_the_check(tmp_path: Path) -> None:
    text = PIPELINE + "@stage(sink=ParquetSink('x'))\ndef lonely(nothing):\n    return nothing\np = Pipeline('p', [lonely])\n"
    (tmp_path / "broken.py").write_text(text)
    ran = check(tmp_path, "-f", "broken.py")
    assert ran.returncode == 1
    assert "UnknownStageError" in ran.stderr and "'nothing'" in ran.stderr and "Traceback" not in ran.stderr


def test_a_pipeline_of_a_variable_and_of_assets_is_one(tmp_path: Path) -> None:
    text = (
        PIPELINE
        + "defs = dg.Definitions(assets=[_assets()])\nfrom dagster_checkpoints.definitions.pipelines import pipelines_of\n"
    )
    (tmp_path / "both.py").write_text(text + "mine = pipelines_of(defs)[0]\n")
    code = load_code(None, str(tmp_path / "both.py"))
    assert list(code.pipelines) == ["mine"]
    assert code.one_or_more(None, None) == [code.pipelines["mine"]]


def test_a_pipeline_of_a_variable_is_not_lost_behind_another_one_that_has_its_name(tmp_path: Path) -> None:
    lines = (
        "defs = dg.Definitions(assets=[_assets()])",
        "first = bounded_source(name='first', sink=ParquetSink('first'))(lambda context: None)",
        "behind_assets = Pipeline('another', [first])",
    )
    (tmp_path / "names.py").write_text(PIPELINE + "\n".join(lines))
    code = load_code(None, str(tmp_path / "names.py"))
    assert sorted(pipeline.name for pipeline in code.one_or_more(None, None)) == ["another", "behind_assets"]
    assert "behind_assets, behind_assets of the definitions;" in code.overview()


@pytest.mark.parametrize("line", ['F.udf("double")(abs)', 'F.window("ts", "1 hour")', 'F.col("v")'])
def test_what_needs_a_session_at_import_says_where_it_belongs(tmp_path: Path, line: str) -> None:
    """In one process: without the session that other tests of this process may have."""
    code = f"from pyspark.sql import functions as F\nfrom pyspark import SparkContext\n{line}\n"
    (tmp_path / "early.py").write_text(code)
    active, SparkContext._active_spark_context = SparkContext._active_spark_context, None
    session, SparkSession._instantiatedSession = SparkSession._instantiatedSession, None
    try:
        with pytest.raises(CodeNotImported) as raised:
            load_code(None, str(tmp_path / "early.py"))
    finally:
        SparkContext._active_spark_context, SparkSession._instantiatedSession = active, session
    first, *rest = str(raised.value).splitlines()
    assert first.endswith(f"early.py:3: {line}")
    assert "@F.udf(DoubleType())" in rest[-1] and "inside the stage's function" in rest[-1]
