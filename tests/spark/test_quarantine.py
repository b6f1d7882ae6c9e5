"""Rows that a stage's conditions refuse, on Spark: each row is in one of two tables, once, with the same checkpoint."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Window
from pyspark.sql import functions as F

from dagster_checkpoints.coordination.restarts import FixedDelayRestart
from dagster_checkpoints.pipeline import (
    Pipeline,
    Quarantine,
    Stage,
    StageInput,
    bounded_source,
    commit_check,
    split_source,
    stage,
    unbounded_source,
)
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.spark.channels import outputs, segments
from dagster_checkpoints.spark.errors import StageQuarantineError
from dagster_checkpoints.spark.job.events import CheckpointDone, CheckpointNotDone, JobRestarting, StageFinished
from dagster_checkpoints.spark.job.pipeline_checks import check_plans

ROWS = "file long, k string, ts timestamp, v long"
CONDITIONS = {
    "is_positive": "v > 0",
    "has_key": lambda rows: rows.k.isNotNull(),
    "is_lucky": lambda rows: F.rand() < 0.8,  # another answer each time that it is evaluated
}


def feed(lab: Any, name: str, first: int, files: int) -> None:
    """Files of twelve rows, of which every third is not positive, and every fourth has no key, by its number."""
    for file in range(first, first + files):
        rows = [
            (file, "ab"[n % 2] if n % 4 else None, lab.at(60 * file + n), n * (-1 if n % 3 == 0 else 1)) for n in range(1, 13)
        ]
        lab.put(name, ROWS, rows)


def orders_of_two_sources(lab: Any) -> Pipeline:
    """A backfill and a feed, whose rows meet; refused rows are in no window."""

    @bounded_source(watermark=("ts", "1 minute"))
    def history(context):
        return lab.stream("history", ROWS)

    @unbounded_source(watermark=("ts", "1 minute"))
    def live(context):
        return lab.stream("live", ROWS)

    @stage(sink=lab.sink("orders"), quarantine=Quarantine(CONDITIONS, sink=lab.sink("refused"), most_share=0.95))
    def orders(history, live):
        return history.unionByName(live)

    @stage(sink=lab.sink("windows"))
    def windows(orders):
        return orders.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v")).select("window.start", "k", "v")

    return Pipeline("p", [history, live, orders, windows])


def expected_reasons(row: dict[str, Any]) -> set[str]:
    return {name for name, holds in (("is_positive", row["v"] > 0), ("has_key", row["k"] is not None)) if not holds}


def test_every_row_is_in_one_of_two_tables_through_a_failure_and_a_drain(lab: Any) -> None:
    pipeline = orders_of_two_sources(lab)
    assert [each.name for each in pipeline.stages] == ["history", "live", "orders", "orders_refused", "windows"]
    feed(lab, "history", 0, 6)
    feed(lab, "live", 100, 4)
    overtaking = {"unaligned": True, "aligned_checkpoint_timeout": 0.0}

    job = lab.start(pipeline, interval=0.3, checkpoints=overtaking)
    job.wait_for(CheckpointDone, lambda e: e.stages["orders_refused"].rows and not e.finished_stages)
    job.wait_until(lambda: lab.count("refused") > 0)
    job.cancel()
    job.result()

    job = lab.start(pipeline, interval=0.3, checkpoints=overtaking)
    feed(lab, "live", 104, 2)
    job.wait_for(CheckpointDone, lambda e: (e.stages["orders"].rows or 0) + (e.stages["orders_refused"].rows or 0) >= 12 * 12)
    last = job.checkpoints()[-1]
    job.drain()
    job.finished()

    passed, refused = (lab.spark.read.parquet(str(lab.folder / name)) for name in ("orders", "refused"))
    assert refused.columns == [*passed.columns[:-1], "refused_by", "refused_in_checkpoint", "checkpoint"]
    read = lab.table("history", ROWS).unionByName(lab.table("live", ROWS))
    columns = ["file", "k", "ts", "v"]
    assert lab.rows(passed.select(columns).unionByName(refused.select(columns))) == lab.rows(read)
    of_file: dict[int, set[int]] = defaultdict(set)
    lucky = 0
    for row in passed.toArrow().to_pylist():
        assert not expected_reasons(row)
        of_file[row["file"]].add(row["checkpoint"])
    for row in refused.toArrow().to_pylist():
        reasons = row["refused_by"].split(", ")
        assert reasons == [name for name in CONDITIONS if name in reasons]
        assert {*reasons} - {"is_lucky"} == expected_reasons(row)
        lucky += reasons == ["is_lucky"]
        assert row["refused_in_checkpoint"] == int(row["checkpoint"].split("-")[0]), "as the table numbers its commits"
        of_file[row["file"]].add(row["checkpoint"])
    assert lucky, "the last condition has refused rows by itself"
    # A micro-batch of a source is one file: its rows are committed together, whatever barriers overtake.
    assert {file: len(checkpoints) for file, checkpoints in of_file.items()} == dict.fromkeys(of_file, 1)
    assert len({*set.union(*of_file.values())}) > 1
    in_windows = passed.groupBy(F.window("ts", "10 minutes"), "k").agg(F.sum("v").alias("v")).select("window.start", "k", "v")
    lab.check(in_windows, "windows")
    ended = {event.stage: event.rows for event in job.of(StageFinished)}
    assert (ended["orders"], ended["orders_refused"]) == (passed.count(), refused.count())
    assert last.stages["orders_refused"].rows + last.stages["orders"].rows == 12 * 12


class Doubled(Stage):
    """Handles its micro-batches itself, and holds one row back until the end."""

    def transform(self, context: Any, counted: Any) -> Any:
        self.spark = context.spark
        return counted.select("k", F.col("n").cast("long").alias("n"))

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        return batch.withColumn("n", F.col("n") * 2)

    def finish(self) -> Any:
        return self.spark.createDataFrame([("end", -1), ("end", 1)], "k string, n long")


class OrderedSink(ParquetSink):
    """Refuses rows that come when its data has ended, as the contract of sinks allows."""

    ended = False

    def write(self, batch: Any, files: Any, batch_id: int) -> None:
        assert not self.ended, "a batch behind finish()"
        super().write(batch, files, batch_id)

    def finish(self) -> None:
        self.ended = True
        super().finish()


def test_all_kinds_of_stages_have_a_quarantine(lab: Any, tmp_path: Path) -> None:
    """Splits, text that cannot be parsed, instances, an edge by key, a static table, rows of `process_batch` and `finish`."""
    lines = [f'{{"n": {n}, "k": "{"ab"[n % 2]}"}}' for n in range(20)]
    for name, text in (("one", lines[:10]), ("two", [*lines[10:], "no JSON", '{"n": "none", "k": "a"}'])):
        (tmp_path / f"{name}.json").write_text("\n".join(text))
    parsed = Quarantine(
        {"is_parsed": "_corrupt_record IS NULL", "is_small": "n < 18 OR n IS NULL"}, sink=OrderedSink(lab.folder / "unread")
    )

    @split_source(
        schema="n long, k string, _corrupt_record string", discover=["one", "two"], instances=["x", "y"], quarantine=parsed
    )
    def numbers(context, split):
        reader = context.spark.read.schema("n long, k string, _corrupt_record string")
        return reader.option("columnNameOfCorruptRecord", "_corrupt_record").json(str(tmp_path / f"{split}.json"))

    whole = Quarantine({"is_parsed": "_corrupt_record IS NULL"}, sink=lab.sink("broken"))

    @bounded_source(sink=lab.sink("lines"), quarantine=whole)
    def lines(context):
        reader = context.spark.readStream.schema("n long, k string, _corrupt_record string").option("maxFileAge", "36500d")
        return reader.option("columnNameOfCorruptRecord", "_corrupt_record").json(str(tmp_path / "*.json"))

    @bounded_source(quarantine=Quarantine({"is_known": "name <> 'none'"}, sink=lab.sink("unknown")))
    def names(context):
        return context.spark.createDataFrame([("a", "A"), ("b", "none"), ("c", None)], "k string, name string")

    @stage(
        inputs={"numbers": StageInput(key="k"), "names": StageInput(mode="static")},
        instances=["x", "y"],
        sink=lab.sink("counted"),
        quarantine=Quarantine({"is_named": lambda rows: rows.name.isNotNull()}, sink=lab.sink("nameless")),
    )
    def counted(numbers, names):
        return numbers.drop("_corrupt_record").join(F.broadcast(names), "k", "left").select("k", "n", "name")

    doubled = Doubled(
        "doubled",
        instances=["x", "y"],
        sink=lab.sink("doubled"),
        quarantine=Quarantine({"is_above": "n > 4"}, sink=lab.sink("below")),
    )

    @stage(sink=lab.sink("seen"))
    def seen(numbers_refused):
        return numbers_refused.selectExpr("refused_by", "_corrupt_record AS text", "refused_in_checkpoint AS id")

    job = lab.start(Pipeline("p", [numbers, lines, names, counted, doubled, seen]))
    job.finished()
    ids = [row[-1] for row in lab.committed("unread")]
    assert all(ids)
    unread = [(18, "a", None, "is_small"), (19, "b", None, "is_small")]
    found = [row[:-1] for row in lab.committed("unread")]
    assert sorted(row[3] for row in found) == ["is_parsed", "is_parsed", "is_small", "is_small"]
    assert [row for row in found if row[3] == "is_small"] == unread
    broken = sorted(row[2] for row in found if row[2] is not None)
    assert broken == ["no JSON", '{"n": "none", "k": "a"}']
    assert sorted(map(repr, lab.committed("seen"))) == sorted(repr((row[3], row[2], None)) for row in found)
    assert len(lab.committed("lines")) == 20
    assert sorted(row[2] for row in lab.committed("broken")) == broken
    assert [row[:3] for row in lab.committed("unknown")] == [("b", "none", "is_known"), ("c", None, "is_known")]
    lab.check([("a", n, "A") for n in range(0, 18, 2)], "counted")
    assert sorted(row[:4] for row in lab.committed("nameless")) == [("b", n, None, "is_named") for n in range(1, 18, 2)]
    doubles = [("a", 2 * n) for n in range(0, 18, 2)] + [("end", -1), ("end", 1)] * 2
    lab.check([row for row in doubles if row[1] > 4], "doubled")
    assert sorted(row[:3] for row in lab.committed("below")) == sorted((*row, "is_above") for row in doubles if row[1] <= 4)


LINES = {
    "csv": ["n,k,w", "0,a,0.5", "x,b,1.5", "2", "3,c,1.5,more", '"4,d,2.0', "5,e,none", "", "6,,", '7,"f, g",0.5', ",h,1"],
    "json": [
        '{"n": 0, "k": "a", "w": 0.5}',
        '{"n": 1, "w": "none"}',
        "no JSON",
        "",
        '{"n": "two"}',
        "7",
        "{}",
        '[{"n": 5}, {"n": 6}]',
    ],
}
CORRUPT = {"csv": [2, 3, 4, 5, 6], "json": [1, 2, 4, 5]}
PASSED = {"csv": [0, 6, 7], "json": [0, 5, 6]}


def test_lines_that_are_not_parsed_are_refused_through_a_suspend(lab: Any) -> None:
    """CSV and JSON: each line is in one of two tables, once, as a batch reader finds it."""
    schema = "n long, k string, w double, _corrupt_record string"
    parsed = {"is_parsed": "_corrupt_record IS NULL", "has_n": "n IS NOT NULL"}

    def read(kind: str, reader: Any) -> Any:
        options = {
            "columnNameOfCorruptRecord": "_corrupt_record",
            "header": True,
            "maxFileAge": "36500d",
            "maxFilesPerTrigger": 1,
        }
        return getattr(reader.schema(schema).options(**options), kind)(str(lab.input(kind)))

    def source_of(kind: str) -> Stage:
        @unbounded_source(
            name=kind, sink=lab.sink(f"{kind}_rows"), quarantine=Quarantine(parsed, sink=lab.sink(f"{kind}_refused"))
        )
        def lines(context):
            return read(kind, context.spark.readStream)

        return lines

    def put(files: int) -> None:
        for kind, lines in LINES.items():
            for number in range(files - 2, files):
                (lab.input(kind) / f".{number}").write_text("\n".join(lines))
                (lab.input(kind) / f".{number}").rename(lab.input(kind) / f"{number}.{kind}")

    pipeline = Pipeline("p", [source_of(kind) for kind in LINES])
    put(2)
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count("csv_refused") > 0 and lab.count("json_refused") > 0)
    job.done("stop")
    job.finished()
    put(4)
    job = lab.start(pipeline, interval=0.3)
    read_now = {kind: read(kind, lab.spark.read).count() for kind in LINES}
    job.wait_until(lambda: {k: sum(job.execution.rows().get(n, 0) for n in (k, f"{k}_refused")) for k in LINES} == read_now)
    job.drain()
    job.finished()
    for kind, lines in LINES.items():
        passed, refused = lab.committed(f"{kind}_rows"), lab.committed(f"{kind}_refused")
        found = [*passed, *(row[:4] for row in refused)]
        assert sorted(found, key=repr) == lab.rows(read(kind, lab.spark.read))
        assert sorted(row[0] for row in passed) == sorted(4 * PASSED[kind])
        assert sorted(row[3] for row in refused if row[3]) == sorted(4 * [lines[line] for line in CORRUPT[kind]])
        assert {row[4] for row in refused if not row[3]} == {"has_n"}
        for row in refused:
            assert row[4] == ", ".join(name for name, unmet in (("is_parsed", row[3]), ("has_n", row[0] is None)) if unmet)


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("nothing > 0", "nothing"),
        ("v >", "PARSE_SYNTAX_ERROR"),
        ("v", "boolean"),
        ("sum(v) > 0", "aggregate"),
        (lambda rows: F.row_number().over(Window.orderBy("v")) < 3, "window function"),
        (lambda rows: F.explode(F.array(F.lit(True))), "GENERATOR"),
        (lambda rows: rows.v.nothing(), "not callable"),
        (lambda rows: rows.where("v > 0"), "the function returned DataFrame"),
        (lambda rows: True, "the function returned True, not a Column"),
        ("_metadata.file_size > 0", "`_metadata`.`file_size` cannot be resolved"),
        ("renamed.v > 0", "`renamed`.`v` cannot be resolved"),
    ],
)
def test_conditions_that_are_none_are_known_at_the_start(lab: Any, condition: Any, found: str) -> None:
    @unbounded_source(
        sink=lab.sink("orders"), quarantine=Quarantine({"good": "v > 0", "bad": condition}, sink=lab.sink("refused"))
    )
    def orders(context):
        return lab.stream("orders", ROWS).alias("renamed")

    error = check_plans(Pipeline("p", [orders]), lab.spark).failed["orders"]
    assert isinstance(error, StageQuarantineError)
    assert "its quarantine's condition 'bad' cannot be evaluated. Expected Spark's SQL" in str(error)
    assert found.lower() in str(error).lower()


def test_many_sets_of_conditions_are_one_table(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark planned a union of 255 tables for two minutes."""
    plans: list[str] = []
    written: list[Any] = []

    def write_segment(rows: Any, folder: Path) -> Any:
        plans.append(str(rows._jdf.queryExecution().optimizedPlan()))
        segment = segments.write_segment(rows, folder)
        assert segment is not None
        written.extend(lab.spark.read.parquet(*map(str, segment.files)).collect())
        return segment

    monkeypatch.setattr(outputs, "write_segment", write_segment)
    conditions: dict[str, Any] = {f"bit_{bit}": f"v >> {bit} & 1 = 0" for bit in range(6)}
    output = outputs.TaskOutput(lab.folder / "segments", [], None, 1, Quarantine(conditions, sink=None))
    assert output.write(lab.spark.range(0, 80, 1, 2).selectExpr("id AS v", "id % 2 = 0 AS even"), 0) == 2
    assert (output.rows, output.refused, len(plans)) == (2, 78, 1)
    assert "Union" not in plans[0]
    assert sorted((row.v, row.even, row.refused_by) for row in written) == [
        (v, v % 2 == 0, ", ".join(f"bit_{bit}" for bit in range(6) if v >> bit & 1)) for v in range(80) if v % 64
    ]
    assert not list((lab.folder / "segments").iterdir()), "no consumer holds the files"


@pytest.mark.parametrize("name", ["refused_by", "Refused_In_Checkpoint"])
def test_columns_of_refused_rows_are_not_the_users(lab: Any, name: str) -> None:
    @unbounded_source(sink=lab.sink("orders"), quarantine=Quarantine({"good": "v > 0"}, sink=lab.sink("refused")))
    def orders(context):
        return lab.stream("orders", ROWS).withColumnRenamed("k", name)

    error = check_plans(Pipeline("p", [orders]), lab.spark).failed["orders"]
    assert f"expected no column {name!r} beside quarantine=" in str(error)


@pytest.mark.parametrize("with_sink", [True, False])
def test_above_the_limit_no_reader_sees_a_row(lab: Any, with_sink: bool) -> None:
    limits: dict[str, Any] = {"most_rows": 1, "most_share": 0.5}
    quarantine = Quarantine({"is_positive": "v > 0"}, sink=lab.sink("refused"), **limits)

    @unbounded_source(sink=lab.sink("orders") if with_sink else None, quarantine=quarantine)
    def orders(context):
        return lab.stream("orders", ROWS)

    @stage(sink=lab.sink("all"))
    def everything(orders):
        return orders

    def put(*values: int) -> None:
        lab.put("orders", ROWS, [(0, "a", lab.at(0), v) for v in values])

    pipeline = Pipeline("p", [orders, everything])
    put(1, 2, 3, -4)
    job = lab.start(pipeline, interval=0.3, checkpoints={"tolerable_failed_checkpoints": 1})
    job.wait_until(lambda: lab.count("all") == 3 and lab.count("refused") == 1)
    put(-5, -6)
    declined = job.wait_for(CheckpointNotDone, lambda e: "most_rows" in str(e))
    text = str(declined)
    for part in (
        "do not pass blocking checks (quarantine: ",
        "most_rows=1 and expected most_share=0.5",
        "2 of 2 rows since the last",
    ):
        assert part in text
    assert job.result().status == "FAILED", "the next checkpoint counts the rows again"
    assert (lab.count("all"), lab.count("refused")) == (3, 1)
    if not with_sink:
        return
    # The rows are read again by the next run, whose definition tolerates them.
    orders.quarantine = Quarantine(quarantine.conditions, sink=lab.sink("refused"), most_share=0.9)
    put(7)
    tolerant = {"tolerable_failed_checkpoints": 1000}  # those before the last row is read
    job = lab.start(Pipeline("p", [orders, everything]), interval=0.3, checkpoints=tolerant)
    job.wait_until(lambda: lab.count("all") == 4 and lab.count("refused") == 3)
    job.drain()
    job.finished()
    assert [row[3] for row in lab.committed("orders")] == [1, 2, 3, 7]
    assert [row[3:5] for row in lab.committed("refused")] == sorted([(v, "is_positive") for v in (-4, -5, -6)], key=repr)


class AnnouncingSink(ParquetSink):
    """Says when it has pre-committed rows."""

    pre_committed = threading.Event()

    def pre_commit(self, checkpoint_id: int) -> str | None:
        transaction = super().pre_commit(checkpoint_id)
        if transaction is not None:
            self.pre_committed.set()
        return transaction


def test_rows_of_a_declined_checkpoint_are_committed_when_their_share_is_small_again(lab: Any) -> None:
    """The limit counts what is not committed, also after a suspend, and in a checkpoint that another stage has declined."""
    declines: list[bool] = []

    @commit_check(blocking=True)
    def fickle(rows):
        return not (declines and AnnouncingSink.pre_committed.wait(60) and declines.pop())

    @unbounded_source(
        sink=lab.sink("orders"),
        quarantine=Quarantine({"is_positive": "v > 0"}, sink=AnnouncingSink(lab.folder / "refused"), most_share=0.5),
    )
    def orders(context):
        return lab.stream("orders", ROWS)

    @stage(sink=lab.sink("seen"), checks=[fickle])
    def seen(orders):
        return orders

    def put(*values: int) -> None:
        lab.put("orders", ROWS, [(0, "a", lab.at(0), v) for v in values])

    pipeline = Pipeline("p", [orders, seen])
    put(-1, 1)
    job = lab.start(pipeline, interval=0.3)
    job.wait_until(lambda: lab.count("refused") == 1)
    job.done("stop")
    job.finished()
    AnnouncingSink.pre_committed.clear()
    declines.append(True)
    put(-2, -3, 2)  # with the committed rows, their share would be within the limit
    job = lab.start(pipeline, interval=0.3, checkpoints={"tolerable_failed_checkpoints": 100})
    job.wait_for(CheckpointNotDone, lambda e: "2 of 3 rows since the last commit" in str(e))
    put(3, 4)
    declined = job.wait_for(CheckpointNotDone, lambda e: "fickle" in str(e))
    job.wait_until(lambda: lab.count("refused") == 3)
    job.drain()
    job.finished()
    assert [row[3] for row in lab.committed("orders")] == [row[3] for row in lab.committed("seen")] == [1, 2, 3, 4]
    refused = lab.spark.read.parquet(str(lab.folder / "refused")).toArrow().to_pylist()
    ids = {row["v"]: (row["refused_in_checkpoint"], int(row["checkpoint"].split("-")[0])) for row in refused}
    assert len(refused) == len(ids) == 3 and len({*ids[-1]}) == 1
    assert ids[-2] == ids[-3] == (declined.checkpoint_id, declined.checkpoint_id), "as the table numbers its commits"


def test_a_check_that_raises_or_returns_nothing_refuses_no_row_twice(lab: Any) -> None:
    """The limit counts the rows since the last commit: those of a failed attempt count when they are read again."""
    answers: list[Any] = []

    @commit_check
    def fickle(rows):
        answer = answers.pop() if answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    @unbounded_source(
        sink=lab.sink("orders"),
        checks=[fickle],
        quarantine=Quarantine({"is_positive": "v > 0"}, sink=lab.sink("refused"), most_rows=2, most_share=0.7),
    )
    def orders(context):
        return lab.stream("orders", ROWS)

    job = lab.start(Pipeline("p", [orders]), interval=0.3, restart=FixedDelayRestart(9, 0.1))
    for number, answer in enumerate((True, ValueError("no answer"), None)):
        answers.append(answer)
        lab.put("orders", ROWS, [(number, "a", lab.at(0), v) for v in (1, -2, None)])
        job.wait_until(lambda rows=2 * (number + 1): lab.count("refused") == rows)
    job.drain()
    job.finished()
    assert not [event for event in job.of(CheckpointNotDone) if "most_" in str(event)]
    causes = [event.cause for event in job.of(JobRestarting)]
    assert len(causes) == 2 and "no answer" in causes[0] and "returned None" in causes[1]
    assert [row[0] for row in lab.committed("orders")] == [0, 1, 2]
    assert sorted((row[0], row[3]) for row in lab.committed("refused") if row[3]) == [(0, -2), (1, -2), (2, -2)]
    assert {row[4] for row in lab.committed("refused")} == {"is_positive"} and lab.count("refused") == 6
