"""The recipes of the documentation: their code runs, their tests pass, and their tables hold what the pages say."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro

from bench.kafka_broker import add_connector
from bench.maven_jars import JarsUnavailable, fetched, pinned
from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source, unbounded_source
from dagster_checkpoints.spark.job.events import CheckpointDone
from dagster_checkpoints.spark.session.java import find_java_home

FOLDER = Path(__file__).resolve().parents[3] / "docs/recipes"


@pytest.fixture
def run_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the code of a recipe in an empty folder, and its tests; returns its names, and the text blocks that the page shows."""
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> tuple[dict[str, Any], list[str]]:
        shown = re.findall(
            r"^```(\w+)\n(.*?)^```$", (FOLDER / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        names: dict[str, Any] = {"__name__": name}
        for number, (language, text) in enumerate(shown):
            if language == "python":
                exec(compile(text, f"{name}.md, block {number + 1}", "exec"), names)
        for test in [value for each, value in names.items() if each.startswith("test_")]:
            test()
        return names, [text for language, text in shown if language == "text"]

    return run


def test_every_recipe_is_run_here() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} == {
        "avro-into-iceberg",
        "blue-green",
        "change-data-capture",
        "daily-files",
        "quarantine",
        "rebuilt-history",
        "sizing",
        "slowly-changing-table",
    }


@pytest.mark.parametrize("name", ["quarantine", "sizing", "slowly-changing-table"])
def test_the_code_and_the_tests_of_the_page(run_page: Any, name: str) -> None:
    run_page(name)


def test_daily_files(run_page: Any, lab: Any) -> None:
    names, (expected,) = run_page("daily-files")
    for night in names["nights"]:
        lab.put("sales", names["SALES"], night)

    @bounded_source(watermark=("at", "3 days"))
    def sales(context: StageContext) -> DataFrame:
        return lab.stream("sales", names["SALES"])  # type: ignore[no-any-return]

    lab.start(Pipeline("daily", [sales, names["final"], names["so_far"]])).finished()
    for table in ("so_far", "final"):
        rows = DeltaTable(f"tables/{table}").to_pyarrow_table().sort_by("day").to_pylist()
        assert "".join(f"{row['day'].date()} {row['amount']:.0f}\n" for row in rows) == expected


def test_change_data_capture(run_page: Any, lab: Any) -> None:
    names, (expected,) = run_page("change-data-capture")
    for batch in names["received"]:
        lab.put("changes", names["CHANGES"], batch)

    @bounded_source
    def changes(context: StageContext) -> DataFrame:
        return lab.stream("changes", names["CHANGES"])  # type: ignore[no-any-return]

    lab.start(Pipeline("capture", [changes, names["customers"]])).finished()
    rows = DeltaTable("tables/customers").to_pyarrow_table().sort_by("id").to_pylist()
    assert "".join(f"{row['id']} {row['name']} {row['city']} deleted={row['deleted']}\n" for row in rows) == expected


def sales_of(first: int, end: int) -> list[tuple[datetime, str, float]]:
    """A sale every ten minutes, numbered from the beginning of 2026."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return [(start + timedelta(minutes=10 * n), ("north", "south")[n % 2], float(n)) for n in range(first, end)]


def put(folder: Path, name: str, rows: list[tuple[datetime, str, float]]) -> None:
    """Add a file, whole, with the columns of the pages' sales."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = zip(("at", "shop", "amount"), zip(*rows, strict=True), strict=True)
    pq.write_table(pa.table({column: list(values) for column, values in columns}), folder / f".{name}", coerce_timestamps="us")
    (folder / f".{name}").rename(folder / name)


def test_blue_green(run_page: Any, lab: Any) -> None:
    """One after the other, in this session; side by side, in two processes: `processes/test_forks.py`."""
    names, _ = run_page("blue-green")
    incoming = names["DATA"] / "incoming"
    blue = lab.start(names["blue"], interval=None)

    def more(file: int) -> None:
        put(incoming, str(file), sales_of(30 * file, 30 * file + 30))
        blue.wait_until(lambda: blue.execution.rows().get("sales") == 30 * file + 30)

    more(0)
    more(1)
    blue.done("checkpoint")
    more(2)
    savepoint = blue.done("savepoint", name="for-green")
    more(3)
    blue.drain()
    blue.finished()
    green = lab.start(names["green"], restore_from=savepoint.url)
    green.wait_until(lambda: green.execution.rows().get("sales") == 120)
    green.drain()
    green.finished()
    number = savepoint.checkpoint_id
    for color in ("blue", "green"):  # both commit the rows that blue had not committed at the savepoint, under its number
        assert list((names["DATA"] / color).glob(f"checkpoint={number}-*"))
    assert names["differences"](lab.spark, number).collect() == []
    assert {row["only"] for row in names["differences"](lab.spark, number - 1).collect()} == {"blue"}
    found = names["whole_table"](lab.spark, number).select(F.unix_seconds("hour"), "shop", "amount", "tax").collect()
    expected = Counter()
    for at, name, amount in sales_of(0, 120):
        expected[int(at.timestamp()) // 3600 * 3600, name] += amount
    assert {(hour, name): amount for hour, name, amount, _ in found} == expected and len(found) == len(expected)
    rates = {round(tax / amount, 6) for *_, amount, tax in found}
    assert rates == {0.19, 0.21}


def test_a_growing_history_that_is_rebuilt(run_page: Any, lab: Any) -> None:
    """The page's stages, with a topic of files, cancelled in the archive; again, with another boundary and more archive."""
    names, _ = run_page("rebuilt-history")
    data = names["DATA"]

    @unbounded_source(watermark=("at", "1 day"))
    def live(context: StageContext) -> DataFrame:
        files = context.spark.readStream.schema(names["SALES"]).option("maxFileAge", "36500d").option("maxFilesPerTrigger", 1)
        return files.parquet(str(data / "topic"))

    days = 144
    for day in range(9):
        put(data / "topic", str(day), sales_of(day * days, (day + 1) * days))
    for version, first_live_day in (("v2", 4), ("v3", 6)):
        for day in range(first_live_day):
            put(data / "archive", str(day), sales_of(day * days, (day + 1) * days))
        made = names["revenue"](version, datetime(2026, 1, 1 + first_live_day, tzinfo=UTC))
        pipeline = Pipeline(made.name, [live if stage.name == "live" else stage for stage in made.stages])
        job = lab.start(pipeline, interval=0.3)
        if version == "v2":
            job.wait_for(CheckpointDone)
            job.cancel()
            job.result()
            job = lab.start(pipeline, interval=0.3)
        job.wait_until(lambda job=job: job.execution.rows().get("live") == 9 * days)
        job.drain()
        job.finished()
        rows = DeltaTable(str(data / f"revenue_{version}")).to_pyarrow_table().to_pylist()
        expected = Counter()
        for at, name, amount in sales_of(0, 9 * days):
            expected[at.date(), name] += amount
        assert {(row["day"].date(), row["shop"]): row["amount"] for row in rows} == expected and len(rows) == len(expected)


@pytest.fixture
def avro_lab(lab: Any) -> Any:
    """The test environment, whose session has Spark's module for Avro, as with the setting `spark.jars.packages`."""
    try:
        jars = fetched(pinned(Path(__file__).resolve().parents[3] / "bench/spark-avro-jars.txt"), f"{find_java_home()}/bin/java")
    except JarsUnavailable as problem:
        pytest.skip(str(problem))
    add_connector(lab.spark, jars)
    return lab


def test_avro_into_iceberg(run_page: Any, avro_lab: Any) -> None:
    """The topic is one of files; Spark writes the messages, and the test their heads."""
    lab, (names, (expected,)) = avro_lab, run_page("avro-into-iceberg")
    columns = "timestamp timestamp, value binary"

    def message(number: int, schema: str, shop: str, *others: Any) -> tuple[datetime, bytes]:
        fields = [field["name"] for field in json.loads(schema)["fields"]]
        row = lab.spark.createDataFrame([(shop, *others)], fields).select(to_avro(F.struct(*fields), schema)).head()
        return lab.at(0), b"\0" + number.to_bytes(4, "big") + bytes(row[0])

    @bounded_source
    def messages(context: StageContext) -> DataFrame:
        return lab.stream("messages", columns)  # type: ignore[no-any-return]

    def run() -> Any:
        return lab.start(Pipeline("avro", [messages, names["sales"]]))

    old, new = names["SCHEMAS"][7], names["NEWEST"]
    lab.put("messages", columns, [message(7, old, "north", 10.0), message(12, new, "south", 20.0, "USD")])
    lab.put("messages", columns, [message(13, new, "south", 30.0, "CHF")])
    error = run().result().error
    assert "a schema that SCHEMAS does not have: 13" in str(error)
    names["SCHEMAS"][13] = new
    run().finished()
    catalog = load_catalog("default", type="sql", uri="sqlite:///lake/catalog.db")
    rows = catalog.load_table("shop.sales").scan().to_arrow().sort_by("amount").to_pylist()
    assert "".join(f"{row['shop']} {row['amount']} {row['currency']}\n" for row in rows) == expected + "south 30.0 CHF\n"
