"""The examples of the documentation about state, on a savepoint, and on one of the same pipeline with other instances."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from pyspark.sql import functions as F

from dagster_checkpoints.cli.app import app
from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, split_source, stage, unbounded_source

ORDERS = "k string, ts timestamp, amount int"
PAGE = Path(__file__).parents[3] / "docs/state.md"


def page_of() -> dict[str, Any]:
    page: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(block, page)
    return page


def pipeline_of(lab: Any, page: dict[str, Any], days: str, instances: str) -> Pipeline:
    @split_source(
        schema=ORDERS,
        discover=lambda: ["day1", "day2"],
        bounded=False,
        watermark=("ts", "1 hour"),
        instances=list(days),
        name="days",
    )
    def days_of(context, split):
        return lab.table(split, ORDERS)

    @unbounded_source(watermark=("ts", "1 hour"))
    def live(context):
        return lab.stream("live", ORDERS)

    @bounded_source
    def names(context):
        return lab.table("names", "k string, name string")

    @stage(inputs={"days": StageInput(edge="all_to_all"), "names": StageInput(mode="static")}, sink=lab.sink("orders"))
    def orders(days, live, names):
        return days.unionByName(live).join(F.broadcast(names), "k").selectExpr("name AS k", "ts", "amount")

    reads = {"orders": StageInput(edge="all_to_all")}
    positive = page["OnlyPositive"](name="positive", inputs=reads, instances=list(instances), sink=lab.sink("positive"))

    @stage(inputs={"positive": StageInput(key="k")}, sink=lab.sink("windows"), instances=list(instances))
    def windows(positive):
        summed = positive.groupBy(F.window("ts", "1 hour"), "k").agg(F.sum("amount").alias("sum"))
        return summed.select("window.start", "k", "sum")

    return Pipeline("page", [days_of, live, names, orders, positive, windows])


def check(lab: Any, page: dict[str, Any], savepoint: str, instances: str, orders: int) -> None:
    """Check what the functions of the page say of a savepoint in which this number of orders is."""
    spark = lab.spark
    values = page["values"](spark, savepoint, "positive")
    assert {name for name, _ in values} == set(instances)
    rejected = [item for (_, name), items in values.items() if name == "rejected" for item in items]
    assert sum(item["rows"] for item in rejected) == orders // 10, "each order whose amount is 0, from all instances"
    assert {str(of) for (_, name), of in values.items() if name == "limits"} == {"{'amount': 0}"}
    assert page["positions"](spark, savepoint, "live") == {"0": [{"logOffset": orders // 30 - 1}]}
    assert page["unread_splits"](spark, savepoint, "days") == []
    assert page["numbers_of_rows"](spark, savepoint, "orders") == {"names": 2}
    assert page["uncommitted"](spark, savepoint, "orders") == {"0": 1}
    [(_, _, largest)] = page["largest_groups"](spark, savepoint)
    assert largest == sum(amount for k, _, amount in rows(lab, 0, orders) if k == "b")


def rows(lab: Any, begin: int, end: int) -> list[tuple[str, Any, int]]:
    """Orders within one hour."""
    return [("ab"[n % 2], lab.at(20 * n), n % 10) for n in range(begin, end)]


def finished_splits(job: Any) -> int:
    return int(job.execution.deployment.split_counts()["days"].finished)


def test_the_examples_of_the_page_also_with_other_instances(lab: Any, tmp_path: Path) -> None:
    page = page_of()
    lab.put("names", "k string, name string", [("a", "a"), ("b", "b")])
    lab.put("day1", ORDERS, rows(lab, 0, 10))
    lab.put("day2", ORDERS, rows(lab, 10, 20))
    lab.put("live", ORDERS, rows(lab, 20, 30))
    job = lab.start(pipeline_of(lab, page, "ab", "xy"), interval=None)
    job.wait_until(lambda: job.execution.rows().get("positive", 0) == 27 and finished_splits(job) == 2)
    first = job.done("stop", drain=False, target=str(tmp_path / "kept")).location
    job.finished()
    check(lab, page, first, "xy", 30)
    shown = CliRunner().invoke(app, ["state", first, "--stage", "days"]).output
    lines = [line.strip() for line in shown.splitlines()]
    splits = lines.index("Splits; others may be discovered") + 1
    assert lines[splits : splits + 2] == ["discovered (0):", "assigned (0):"]
    assert lines[splits + 2] in ("finished (2): day1, day2", "finished (2): day2, day1"), "two instances read beside each other"

    lab.put("live", ORDERS, rows(lab, 30, 60))
    job = lab.start(pipeline_of(lab, page, "bcd", "xyz"), interval=None, restore_from=first)
    job.wait_until(lambda: job.execution.rows().get("positive", 0) == 54)
    second = job.done("savepoint", target=str(tmp_path / "kept")).location
    check(lab, page, second, "xyz", 60)
    job.drain()
    job.finished()
