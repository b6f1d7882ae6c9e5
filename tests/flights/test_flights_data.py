"""The files of the flights pipeline: every flight once, in the order in which Spark's file source reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from assets.flights_data import AIRPORTS, FLIGHTS, WEATHER, FlightsData, prepare

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FlightsData:
    return prepare(tmp_path_factory.mktemp("flights"), progress=lambda line: None)


def inodes(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_ino for path in root.rglob("*") if path.is_file() and path.name != ".lock"}


def test_every_flight_is_there_once(data: FlightsData) -> None:
    history = sum(pq.read_metadata(file).num_rows for file in data.history.glob("*"))
    december = {a: sum(pq.read_metadata(f).num_rows for f in (data.december / a).glob("*")) for a in AIRPORTS}
    assert history == 308_641
    assert december == {"EWR": 9_922, "JFK": 9_146, "LGA": 9_067}
    assert history + sum(december.values()) == 336_776


def test_a_file_per_day_in_history_and_per_airport_and_day_in_december(data: FlightsData) -> None:
    assert len(list(data.history.glob("2013-*.parquet"))) == 334
    for airport in AIRPORTS:
        files = sorted((data.december / airport).glob("*"))
        assert len(files) == 31
        assert {origin for file in files for origin in pq.read_table(file)["origin"].to_pylist()} == {airport}


def test_the_order_of_modification_times_is_the_order_of_event_time(data: FlightsData) -> None:
    times: list[object] = []
    files = sorted(data.history.glob("*"), key=lambda file: file.stat().st_mtime_ns)
    assert [file.name for file in files] == sorted(file.name for file in files)
    assert len({int(file.stat().st_mtime) for file in files}) == len(files)
    for file in files:
        times += pq.read_table(file)["ts"].to_pylist()
    assert times == sorted(times)  # type: ignore[type-var]
    # Spark's file source ignores files that are a week older than the newest file.
    assert files[-1].stat().st_mtime - files[0].stat().st_mtime < 7 * 24 * 3600


def test_the_live_directories_wait_empty(data: FlightsData) -> None:
    assert {path.name: list(path.iterdir()) for path in data.live.iterdir()} == {name: [] for name in AIRPORTS}


def test_the_files_have_the_columns_that_the_pipeline_declares(spark: SparkSession, data: FlightsData) -> None:
    def columns(schema: str) -> dict[str, str]:
        return {field.name: field.dataType.simpleString() for field in spark.createDataFrame([], schema).schema}

    for path, schema in [
        (data.history, FLIGHTS),
        (data.december / "JFK", FLIGHTS),
        (data.weather, WEATHER),
    ]:
        found = {field.name: field.dataType.simpleString() for field in spark.read.parquet(str(path)).schema}
        assert found == columns(schema)


def test_event_time_is_the_scheduled_departure_in_utc(spark: SparkSession, data: FlightsData) -> None:
    first = spark.read.schema(FLIGHTS).parquet(str(data.history / "2013-01-01.parquet")).where("flight = 1545")
    assert first.selectExpr("cast(ts AS string)", "origin", "dep_delay").collect() == [("2013-01-01 10:15:00", "EWR", 2.0)]


def test_what_is_complete_is_not_written_again(tmp_path: Path) -> None:
    data = prepare(tmp_path, progress=lambda line: None)
    before, said = inodes(tmp_path), list[str]()
    assert prepare(tmp_path, progress=said.append) == data
    assert inodes(tmp_path) == before
    assert said == []


@pytest.mark.parametrize("marker", [None, "", "[]", '{"version": 0}'])
def test_what_is_incomplete_or_of_another_version_is_written_anew(tmp_path: Path, marker: str | None) -> None:
    data = FlightsData(tmp_path)
    data.history.mkdir()
    (data.history / "half.parquet").write_text("interrupted")
    (data.live / "EWR").mkdir(parents=True)
    (data.live / "EWR" / "old.parquet").write_text("fed from other files")
    if marker is not None:
        (tmp_path / "_PREPARED.json").write_text(marker)
    said: list[str] = []
    prepare(tmp_path, progress=said.append)
    assert said
    assert len(list(data.history.iterdir())) == 334
    assert list((data.live / "EWR").iterdir()) == []
    assert json.loads((tmp_path / "_PREPARED.json").read_text())["rows"] == {
        "history": 308_641,
        "december": 28_135,
    }
    assert not list(tmp_path.glob(".preparing-*"))
