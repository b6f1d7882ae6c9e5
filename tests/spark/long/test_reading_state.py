"""What a checkpoint holds, read back as tables: keyed state, states of `context.state`, offsets, and the rows of a sink."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import functions as F

from dagster_checkpoints.cli.app import app
from dagster_checkpoints.pipeline import Pipeline, Stage, StageInput, unbounded_source
from dagster_checkpoints.pipeline import stage as stage_of
from dagster_checkpoints.spark.stored_state import StageState, read_state
from dagster_checkpoints.state.errors import UnknownStage

ROWS = "k string, ts timestamp, v long"
STATE_PAGE = Path(__file__).parents[3] / "docs/state.md"


class Counted(Stage):
    """Counts its micro-batches in each kind of `context.state`."""

    def open(self, context: Any) -> None:
        self.state = context.state
        self.instance = context.instance

    def transform(self, context: Any, live: Any) -> Any:
        return live

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        self.state.list("sizes").add({"instance": self.instance, "rows": batch.count()})
        self.state.union("seen").add(self.instance)
        self.state.broadcast("limits").put("most", 100)
        return batch


def sums_by_timer(frame: Any) -> Any:
    """The sum of each key in a stateful processor's variable; a timer that never fires."""
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Sums(StatefulProcessor):
        def init(self, handle):
            self.handle = handle
            self.sum = handle.getValueState("sum", "v long")

        def handleInputRows(self, key, rows, timerValues):
            total = self.sum.get()[0] if self.sum.exists() else 0
            self.sum.update((total + sum(int(batch["v"].sum()) for batch in rows),))
            self.handle.registerTimer(4_000_000_000_000)
            yield pd.DataFrame({"k": pd.Series([], dtype=str)})

        def close(self):
            pass

    return frame.groupBy("k").transformWithStateInPandas(Sums(), "k string", "Append", "EventTime")


def by_name(state: StageState) -> dict[tuple[str, str], Any]:
    return {(keyed.operator, keyed.variable): keyed for keyed in state.keyed}


def test_the_state_of_every_stage_of_a_running_pipeline(lab: Any, tmp_path: Path) -> None:
    instances = ["left", "right"]

    @unbounded_source(watermark=("ts", "1 hour"), instances=instances)
    def live(context):
        return lab.stream(f"live-{context.instance}", ROWS)

    counted = Counted(instances=instances)

    @stage_of(sink=lab.sink("windows"), instances=instances)
    def windows(counted):
        return counted.groupBy(F.window("ts", "20 minutes"), "k").agg(F.sum("v").alias("v")).select("window.start", "k", "v")

    @stage_of(sink=lab.sink("pairs"), instances=instances)
    def pairs(counted):
        other = counted.selectExpr("k AS k2", "ts AS ts2", "v AS v2")
        return counted.join(other, F.expr("k = k2 AND ts = ts2"))

    @stage_of(sink=lab.sink("sums"), inputs={"counted": StageInput(edge="all_to_all", key="k")}, instances=["one", "two"])
    def sums(counted):
        return sums_by_timer(counted)

    pipeline = Pipeline("read", [live, counted, windows, pairs, sums])
    rows = {name: [(k, lab.at(60 * m), m + 100 * i) for m in range(0, 40, 2) for k in "ab"] for i, name in enumerate(instances)}
    for name in instances:
        lab.put(f"live-{name}", ROWS, rows[name][:20])
        lab.put(f"live-{name}", ROWS, rows[name][20:])
    job = lab.start(pipeline, interval=None)
    job.wait_until(lambda: job.execution.rows().get("counted", 0) == 80)
    location = job.done("savepoint", target=str(tmp_path / "kept")).location

    def read(stage: str) -> StageState:
        return read_state(lab.spark, location, stage=stage)

    # An aggregation: key and value of each group, of both instances.
    state = read("windows")
    [keyed] = state.keyed
    assert (keyed.operator, keyed.variable) == ("stateStoreSave", "default")
    found = keyed.rows.select("instance", F.col("key.window.start").alias("start"), "key.k", F.col("value.sum").alias("v"))
    wanted = lab.spark.createDataFrame([(name, *row) for name in instances for row in rows[name]], f"instance string, {ROWS}")
    wanted = wanted.groupBy("instance", F.window("ts", "20 minutes"), "k").agg(F.sum("v").alias("v"))
    assert lab.rows(found) == lab.rows(wanted.select("instance", "window.start", "k", "v"))
    assert (state.query_of, state.finished, state.operator, state.in_flight, state.static) == (("windows",), (), (), {}, {})

    # A join: the rows of each side that may still find another one.
    sides = by_name(read("pairs"))
    for side, column in (("left", "value.v"), ("right", "value.v2")):
        joined = lab.rows(sides["symmetricHashJoin", side].rows.select("instance", column))
        assert joined == sorted(((name, row[2]) for name in instances for row in rows[name]), key=repr)

    # A stateful processor: its variable, and its timers.
    processor = by_name(read("sums"))
    [(operator, _), *_] = processor
    summed = processor[operator, "sum"].rows.select("key.k", "value.v")
    assert lab.rows(summed) == lab.rows(wanted.groupBy("k").agg(F.sum("v").alias("v")))
    timers = processor[operator, "timers"].rows
    assert {tuple(row) for row in timers.select("key.k", "expiration_timestamp_ms").collect()} == {
        ("a", 4_000_000_000_000),
        ("b", 4_000_000_000_000),
    }

    # context.state, and the offsets of a source.
    state = read("counted")
    assert {(each.instance, each.name, each.kind, json.dumps(each.values)) for each in state.operator} == {
        found
        for name in instances
        for found in [
            (name, "sizes", "list", json.dumps([{"instance": name, "rows": 20}] * 2)),
            (name, "seen", "union", json.dumps([name] * 2)),
            (name, "limits", "broadcast", json.dumps({"most": 100})),
        ]
    }
    state = read("live")
    assert state.query_of == ("live", "counted")
    assert [each.instance for each in state.offsets] == instances
    [(description, offset)] = state.offsets[0].sources
    assert offset == {"logOffset": 1} and "live-left" in description

    # The example of the page, and the command line.
    [_, example, _] = re.findall(r"^```python\n(.*?)^```$", STATE_PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    page: dict[str, Any] = {}
    exec(example, page)
    [(instance, _, largest)] = page["largest_groups"](lab.spark, location)
    assert (instance, largest) == ("right", sum(v for _, ts, v in rows["right"] if ts >= lab.at(60 * 20)) // 2)
    shown = CliRunner().invoke(app, ["state", location, "--stage", "windows", "--json"])
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.stdout)
    assert document["query_of"] == ["windows"]
    assert len(document["keyed"][0]["rows"]) == 8
    assert document["keyed"][0]["rows"][0].keys() == {"instance", "partition_id", "key", "value"}
    table = CliRunner().invoke(app, ["state", location, "--stage", "counted", "--limit", "1"]).output
    assert '{"instance":"left","rows":20}' in table.replace(" ", "")

    with pytest.raises(
        UnknownStage, match=r"expected a stage 'window' in .*/kept.*, found none of that name. Did you mean 'windows'"
    ):
        read("window")
    with pytest.raises(ValueError, match="expected an empty directory for copies of the state, found"):
        read_state(lab.spark, location, stage="windows", directory=tmp_path)
    job.drain()
    job.finished()
