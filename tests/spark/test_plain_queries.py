"""Plain queries that stages take over with their state, and stages' queries that go on as plain ones: every row once."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_checkpoints.cli.app import app
from dagster_checkpoints.pipeline import Pipeline, Quarantine, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.stored_state import export_checkpoint, import_checkpoint
from dagster_checkpoints.state.plain_queries import ExportRefused, ImportRefused
from tests.spark.plain_programs import LATENESS, PROGRAMS, ROWS
from tests.spark.takeovers import Takeover, cut


def test_what_does_not_fit_is_refused_by_name(lab: Any) -> None:
    there = Takeover(lab, PROGRAMS["windows"])
    checkpoint, output = there.folder / "checkpoint", there.folder / "plain"
    there.put(2)
    there.run_plain(checkpoint, output)
    lab.put("right", ROWS, [])

    def refusal(*stages: Any, stage: str = "other", **options: Any) -> str:
        with pytest.raises(ImportRefused) as refused:
            import_checkpoint(lab.spark, Pipeline("p", list(stages)), checkpoint, stage=stage, dry_run=True, **options)
        return str(refused.value)

    @unbounded_source(watermark=("ts", LATENESS))
    def left(context: Any) -> Any:
        return there.read("left")

    @unbounded_source(watermark=("ts", LATENESS))
    def right(context: Any) -> Any:
        return lab.stream("right", ROWS)

    def other(result: Any, source: Any = left) -> tuple[Any, Any]:
        if source is left:
            return left, stage(name="other", sink=lab.sink())(lambda left: result(left))
        return right, stage(name="other", sink=lab.sink())(lambda right: result(right))

    windows = PROGRAMS["windows"].result
    assert "[0] dedupe" in refusal(*other(PROGRAMS["distinct"].result))
    assert "found in the state of" in refusal(*other(PROGRAMS["filtered"].result))
    assert "[1] stateStoreSave" in refusal(*other(PROGRAMS["steps"].result))
    with_another_key = refusal(*other(lambda left: windows(left.withColumn("k", left.v))))
    assert "Spark does not read its state" in with_another_key and "longtype" in with_another_key.lower()
    assert "found that the query has read" in refusal(*other(windows, right))
    assert "found offsets of 1" in refusal(left, right, stage(name="other", sink=lab.sink())(PROGRAMS["pairs"].result))
    two = stage(name="other", sink=lab.sink(), inputs={"left": StageInput(edge="all_to_all", key="k")}, instances=["a", "b"])
    assert "'other' has 2 instances" in refusal(left, two(lambda left: windows(left)))
    lookup = stage(name="other", sink=lab.sink(), inputs={"right": StageInput(mode="static")})
    kept = refusal(left, bounded_source(name="right")(lambda context: lab.table("right", ROWS)), lookup(lambda left, right: left))
    assert "reads 'right' as a static input" in kept
    cut("in the output", checkpoint, there.outputs[-1])
    assert "last_batch=" in refusal(*other(windows))
    assert "found both" in refusal(*other(windows), output=output, last_batch=1)
    shutil.rmtree(checkpoint / "state/0/1")
    assert "was not copied completely" in refusal(*other(windows), output=output)


def test_stages_with_a_quarantine_take_a_plain_query_over(lab: Any) -> None:
    """Its source and its windows get one: the query is divided with its state, and rows are refused from then on."""
    there = Takeover(lab, PROGRAMS["windows"])
    checkpoint, output = there.folder / "checkpoint", there.folder / "plain"
    there.put(3)
    there.run_plain(checkpoint, output)
    plain = len(there.all["left"])
    of_source = Quarantine({"is_no_five": "v % 5 > 0"}, sink=lab.sink("fives"), most_share=0.9)

    @unbounded_source(watermark=("ts", LATENESS), quarantine=of_source)
    def left(context: Any) -> Any:
        return there.read("left")

    @stage(sink=lab.sink(), quarantine=Quarantine({"is_even": "n % 2 = 0"}, sink=lab.sink("odd")))
    def windows(left: Any) -> Any:
        return PROGRAMS["windows"].result(left)

    pipeline = Pipeline("taken", [left, windows])
    target = str(there.folder / "savepoints")
    taken = import_checkpoint(lab.spark, pipeline, str(checkpoint), stage="windows", target=target, output=str(output))
    assert "new: 'left_refused', 'windows_refused' begin without state." in taken.changes
    there.put(3)
    job = lab.start(pipeline, interval=0.5, restore_from=taken.url)
    job.wait_until(lambda: lab.count("fives") > 0)
    there.put(1)
    job.wait_until(lambda: sum(job.execution.rows().get(name, 0) for name in ("left", "left_refused")) == 4 * 24)
    job.drain()
    job.finished()
    later = there.all["left"][plain:]
    assert sorted(row[:3] for row in lab.committed("fives")) == sorted(row for row in later if row[2] % 5 == 0)
    read = there.all["left"][:plain] + [row for row in later if row[2] % 5]
    expected = lab.rows(PROGRAMS["windows"].expected(lab.spark.createDataFrame(read, ROWS)))
    found = [row[:4] for row in lab.committed("odd")]
    assert found and all(row[3] % 2 for row in found)
    assert sorted(found + lab.committed() + there.outputs[0].rows()) == sorted(expected)


def test_what_cannot_go_on_as_a_plain_query(lab: Any) -> None:
    there = Takeover(lab, PROGRAMS["windows"])
    there.put(3)

    @unbounded_source(watermark=("ts", LATENESS))
    def left(context: Any) -> Any:
        return there.read("left")

    @stage(sink=lab.sink("passed"))
    def passed(left: Any) -> Any:
        return left

    @stage(sink=lab.sink())
    def windows(passed: Any) -> Any:
        return PROGRAMS["windows"].result(passed)

    job = lab.start(Pipeline("behind", [left, passed, windows]), interval=0.5)
    job.wait_until(lambda: lab.count("passed") == 72)
    savepoint = job.done("stop").url
    with pytest.raises(ExportRefused, match="through"):
        export_checkpoint(savepoint, there.folder / "back", stage="windows")
    assert not (there.folder / "back").exists()
    (there.folder / "taken").mkdir()
    (there.folder / "taken/file").touch()
    with pytest.raises(ExportRefused, match="expected an empty directory"):
        export_checkpoint(savepoint, there.folder / "taken", stage="passed")
    with pytest.raises(ExportRefused, match="expected an empty directory"):
        export_checkpoint(savepoint, there.folder / "back", stage="passed", output=there.folder / "taken")
    with pytest.raises(ExportRefused, match="expected a directory that can be written at"):
        export_checkpoint(savepoint, there.folder / "taken/file/back", stage="passed")
    found = export_checkpoint(savepoint, there.folder / "back", stage="passed")
    assert found.stages == ("left", "passed") and not list(there.folder.glob(".*unfinished"))


CODE = """
from pyspark.sql import functions as F
from dagster_checkpoints import ParquetSink, Pipeline, stage, unbounded_source

@unbounded_source(watermark=("ts", "1 minute"))
def left(context):
    return context.spark.readStream.schema("{rows}").option("maxFilesPerTrigger", 1).parquet("{folder}/input/left")

@stage(sink=ParquetSink("{folder}/out"))
def windows(left):
    sums = left.groupBy(F.window("ts", "5 minutes"), "k").agg(F.sum("v").alias("v"), F.count("*").alias("n"))
    return sums.select("k", F.window_time("window").alias("ts"), "v", "n")

@stage(sink=ParquetSink("{folder}/more"))
def more(windows):
    return windows

typed = Pipeline("typed", [left, windows, more])
"""


def test_the_command_line_takes_a_query_over_and_gives_it_back(lab: Any) -> None:
    there = Takeover(lab, PROGRAMS["windows"])
    checkpoint, output = there.folder / "checkpoint", there.folder / "plain"
    there.put(2)
    there.run_plain(checkpoint, output)
    last = cut("not in the output", checkpoint, there.outputs[-1])
    (there.folder / "code.py").write_text(CODE.format(rows=ROWS, folder=there.folder))

    def typed(*arguments: object) -> Any:
        words = [*map(str, arguments), "--storage", str(there.folder / "store")]
        return CliRunner().invoke(app, words)

    of_code = ("--stage", "windows", "-f", there.folder / "code.py")
    refused = typed("import", checkpoint, *of_code, "--json")
    assert refused.exit_code == 1 and json.loads(refused.stdout)["error"] == "ImportRefused"
    dry = typed("import", checkpoint, *of_code, "--output", output, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert f"Would take micro-batch {last - 1}" in dry.stdout and "is planned again" in dry.stdout
    assert "new: 'more' begins without state." in dry.stdout and not (there.folder / "store").exists()
    taken = typed("import", checkpoint, *of_code, "--output", output, "--json")
    assert taken.exit_code == 0, taken.output
    found = json.loads(taken.stdout)
    assert (found["batch_id"], found["operators"]) == (last - 1, {"0": "stateStoreSave"})
    assert found["url"].startswith(f"file://{there.folder}/store/typed/savepoints/savepoint-1-imported-")
    assert "is imported, not started yet" in typed("list").stdout
    again = there.folder / "plain again"
    back = typed("export", found["url"], there.folder / "back", "--stage", "windows", "--output", again, "--json")
    assert back.exit_code == 0, back.output
    assert json.loads(back.stdout)["batch_id"] == last - 1
    once_more = typed("import", there.folder / "back", *of_code, "--dry-run")
    assert once_more.exit_code == 0 and "Nothing says what the output holds" in once_more.stdout, once_more.output
    second = typed("export", found["url"], there.folder / "back", "--stage", "windows")
    assert second.exit_code == 1 and "expected an empty directory" in second.stderr
    there.put(2)
    there.put_last()
    there.run_plain(there.folder / "back", again)
    there.check("k <> 'z'")
