"""A pipeline that was changed between two runs: what a restore takes and what it refuses, as its page of changes says."""

from __future__ import annotations

import datetime as dt
from typing import Any

from dagster_checkpoints.pipeline import StageInput, stage
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted
from dagster_checkpoints.state.errors import InputRowsGone, InputsChanged, SourcesChanged, StatefulPlanChanged
from tests.spark.long.test_restore_changed_pipelines import NAMES, ROWS, Flow


def test_what_a_restore_takes_and_what_it_refuses(lab: Any) -> None:
    flow = Flow(lab)
    lab.put("names", NAMES, [("a", "A"), ("b", "B")])
    lab.input("spare")
    lab.put("live", ROWS, [("ab"[m % 2], lab.at(60 * m), m) for m in range(90)])
    first = lab.start(flow.pipeline())
    first.wait_for(CheckpointDone, lambda done: "names" in done.finished_stages and done.stages["hours"].rows == 2)
    first.cancel()
    assert first.result().status == "CANCELED"

    @stage(inputs={"names": StageInput(mode="static")}, sink=lab.sink("report"))
    def report(rows, names):
        return rows.join(names, "k")

    flow.refused(InputRowsGone, flow.pipeline(report), "'report'", "reads 'names' as a static input", "another name")
    hours = ("Stage 'hours' (instance 'a', ", "In the checkpoint: aggregate by window(ts, 1 hour), k: count(1)")
    flow.refused(StatefulPlanChanged, flow.pipeline(window="30 minutes"), *hours, "Now: aggregate by window(ts, 30 minutes)")
    problems = flow.verified()["problems"]
    assert [problem["kind"] for problem in problems] == ["stateful_plan_changed"]
    assert all(words in problems[0]["what"] for words in (*hours, "changed.py:", "Now: aggregate by window(ts, 30 minutes)"))
    one, other = f"[0] parquet {lab.input('live')}", f"[1] parquet {lab.input('spare')}"
    swapped = flow.pipeline(sources=("spare", "live"))
    flow.refused(SourcesChanged, swapped, "Stage 'live'", "in another order", f"{one}, {other}", "allow_changed_plan")
    flow.refused(SourcesChanged, flow.pipeline(sources=("live",)), "reads 1 streaming source", "in the checkpoint 2")
    allowed = lab.start(flow.pipeline(window="30 minutes"), allow_changed_plan=True, interval=3600.0)
    assert allowed.wait_for(JobStarted).restored_checkpoint is not None
    allowed.cancel()
    assert allowed.result().status == "CANCELED"
    flow.refused(InputsChanged, flow.pipeline(key="v"), "'hours'", "input 'rows'", "by key 'k', is now", "by key 'v'")

    @stage(sink=lab.sink("late"))
    def late(rows):
        return rows.select("k", "v")

    second = lab.start(flow.pipeline(late, between=True))  # `checked` is between `rows` and `hours` now
    assert second.wait_for(JobStarted).restored_checkpoint is not None
    lab.put("live", ROWS, [("a", lab.at(3600 * 9), 1000), ("b", lab.at(3600 * 9), 1001)])
    second.wait_until(lambda: lab.count("late") == 2)
    second.wait_until(lambda: lab.count("hours") == 4)
    second.drain()
    second.finished()
    assert sorted(lab.committed("late")) == [("a", 1000), ("b", 1001)]
    zero = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    starts = [zero, zero, *[zero + dt.timedelta(hours=1)] * 2, zero + dt.timedelta(hours=9)]
    assert [row[0] for row in lab.committed("hours")] == starts
