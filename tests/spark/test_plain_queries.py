"""Plain queries that stages take over with their state, and stages' queries that go on as plain ones: every row once."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_checkpoints.cli.app import app
from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.spark.stored_state import CheckpointImport, export_checkpoint, import_checkpoint
from dagster_checkpoints.state import ExportRefused, ImportRefused
from tests.spark.plain_programs import LATENESS, PROGRAMS, ROWS, Program, rows_of

PAGE: dict[str, Any] = {}
"""The functions on the page about plain queries."""
for example in re.findall(
    r"^```python\n(.*?)^```$",
    (Path(__file__).parents[2] / "docs/migrating.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
):
    exec(example, PAGE)

CUTS = ("stopped", "in the output", "not in the output")
QUICK = {"windows": "in the output", "unmatched": "not in the output", "steps": "stopped"}
"""Of these programs the rest is in `long/test_plain_programs.py`."""


class Takeover:
    """A program over input files: as a plain query, as a pipeline, and as a plain query again."""

    def __init__(self, lab: Any, program: Program) -> None:
        self.lab = lab
        self.program = program
        self.files = 0
        self.outputs: list[Path] = []
        self.folder: Path = lab.folder

    def put(self, files: int) -> None:
        """Add files to each of the streams."""
        for number in range(self.files, self.files + files):
            for name in self.program.streams:
                self.lab.put(name, ROWS, rows_of(name, number, self.lab.at))
        self.files += files

    def put_last(self) -> None:
        """Add one row to each stream, of another key, much later than all others."""
        for name in self.program.streams:
            self.lab.put(name, ROWS, [("z", self.lab.at(1_000_000), -7)])

    def read(self, name: str) -> Any:
        return self.lab.stream(name, ROWS)

    def run_plain(self, checkpoint: Path, output: Path) -> None:
        """Run the plain query until it has read all files."""
        writer = self.program.plain(self.read).writeStream.format("parquet").outputMode("append")
        query = writer.option("checkpointLocation", str(checkpoint)).start(str(output))
        query.processAllAvailable()
        query.stop()
        self.outputs.append(output)

    def pipeline(self, **options: bool) -> Pipeline:
        return self.program.pipeline(self.read, self.lab.sink(), **options)

    def drain_from(self, savepoint: str, **options: bool) -> None:
        """Run the pipeline from a savepoint until it has read all files, and has emitted all that it holds."""
        self.lab.start(self.pipeline(bounded=True, **options), interval=0.5, restore_from=savepoint).finished()

    def take(self, checkpoint: Path, apart: bool = False, **options: Any) -> CheckpointImport:
        target, pipeline = str(self.folder / "savepoints"), self.pipeline(apart=apart)
        return import_checkpoint(self.lab.spark, pipeline, checkpoint, stage=self.program.name, target=target, **options)

    def check(self, but: str = "k <> 'y'") -> None:
        """Check that all outputs together have exactly the rows of a batch computation."""
        found = Counter(self.lab.committed())
        for output in self.outputs:
            found.update(self.lab.rows(self.lab.spark.read.parquet(str(output))))
        tables = [self.lab.table(name, ROWS) for name in self.program.streams]
        wanted = Counter(self.lab.rows(self.program.expected(*tables).where(but)))
        assert found == wanted, (list((wanted - found).elements())[:5], list((found - wanted).elements())[:5])


def cut(how: str, checkpoint: Path, output: Path) -> int:
    """Make the directory what a query leaves that is killed in its last micro-batch. Returns that batch's number."""
    last = max(int(each.name) for each in (checkpoint / "commits").iterdir() if each.name.isdecimal())
    if how != "stopped":
        (checkpoint / f"commits/{last}").unlink()
    if how == "not in the output":
        (output / f"_spark_metadata/{last}").unlink()
    return last


@pytest.mark.parametrize("name, how", QUICK.items())
def test_a_plain_query_is_taken_over_and_given_back(lab: Any, name: str, how: str) -> None:
    check_there_and_back(lab, name, how)


def check_there_and_back(lab: Any, name: str, how: str) -> None:
    """A plain query that ended as `how` says goes on as a pipeline, which is suspended, and goes on as a plain query."""
    there = Takeover(lab, PROGRAMS[name])
    checkpoint, output = there.folder / "checkpoint", there.folder / "plain"
    there.put(4)
    there.run_plain(checkpoint, output)
    last = cut(how, checkpoint, output)
    before = sorted(each.relative_to(checkpoint) for each in checkpoint.rglob("*"))
    dry = there.take(checkpoint, output=output, dry_run=True)
    assert (dry.url, dry.batch_id) == ("", last - (how == "not in the output"))
    assert dry.planned_again == (last if how == "not in the output" else None)
    assert dry.operators == there.program.operators
    assert not (there.folder / "savepoints").exists()
    shown = PAGE["what_would_be_taken"](lab.spark, there.pipeline(), str(checkpoint), name, str(output))
    assert shown == {"batch": dry.batch_id, "operators": dry.operators, "sources": [offset for _, offset in dry.sources]}
    savepoints = str(there.folder / "savepoints")
    savepoint = PAGE["taken_over"](lab.spark, there.pipeline(), str(checkpoint), name, str(output), savepoints)
    assert sorted(each.relative_to(checkpoint) for each in checkpoint.rglob("*")) == before

    there.put(2)
    job = lab.start(there.pipeline(), interval=0.5, restore_from=savepoint)
    job.wait_until(lambda: bool(job.checkpoints()))
    there.put(2)
    stopped = job.done("stop", target=savepoints)
    job.finished()

    back, again = there.folder / "back", there.folder / "plain again"
    assert PAGE["given_back"](stopped.url, str(back), str(again), name) == (*there.program.streams, name)
    there.put(2)
    there.put_last()
    there.run_plain(back, again)
    there.check("k <> 'z'" if there.program.held else "true")


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
        return there.read("right")

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
    cut("in the output", checkpoint, output)
    assert "last_batch=" in refusal(*other(windows))
    assert "found both" in refusal(*other(windows), output=output, last_batch=1)
    shutil.rmtree(checkpoint / "state/0/1")
    assert "was not copied completely" in refusal(*other(windows), output=output)


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
    last = cut("not in the output", checkpoint, output)
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
    second = typed("export", found["url"], there.folder / "back", "--stage", "windows")
    assert second.exit_code == 1 and "expected an empty directory" in second.stderr
    there.put(2)
    there.put_last()
    there.run_plain(there.folder / "back", again)
    there.check("k <> 'z'")
