"""The stages of the flights pipeline, run as functions on a few days, compared with the batch result in SQL."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from assets import flights
from assets.flights_data import AIRPORTS, FLIGHTS, FlightsData, prepare
from assets.flights_files import package_data
from assets.reference import (
    EXPECTED,
    committed,
    compare,
    compare_table,
    expected_delays_with_weather,
    expected_hourly_delays,
)
from dagster_checkpoints import StageContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The night on which the clocks change, and the days on both sides of the seam between history and live feed.
HISTORY = ["2013-03-10", "2013-11-29", "2013-11-30"]
LIVE = ["2013-12-01", "2013-12-02"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FlightsData:
    """Five days of the flights; the live ones are fed."""
    everything = prepare(tmp_path_factory.mktemp("everything"), progress=lambda line: None)
    few = FlightsData(tmp_path_factory.mktemp("few"))
    for table in ("airlines.csv", "planes.csv", "weather.parquet"):
        shutil.copy2(everything.root / table, few.root / table)
    few.history.mkdir()
    for day in HISTORY:
        shutil.copy2(everything.history / f"{day}.parquet", few.history)
    for airport in AIRPORTS:
        (few.live / airport).mkdir(parents=True)
        for day in LIVE:
            shutil.copy2(everything.december / airport / f"{day}.parquet", few.live / airport)
    return few


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, data: FlightsData) -> None:
    """The pipeline's sources read these few days."""
    monkeypatch.setattr(flights, "DATA", data)


def context(spark: SparkSession, instance: str = "0") -> StageContext:
    no_state: Any = None
    return StageContext(spark, "stage", instance, 0, 1, no_state, logging.getLogger(__name__))


@pytest.fixture
def departures(spark: SparkSession, data: FlightsData, here: None) -> DataFrame:
    history = spark.read.schema(FLIGHTS).parquet(str(data.history))
    live = spark.read.schema(FLIGHTS).parquet(*(str(data.live / airport) for airport in AIRPORTS))
    joined: DataFrame = flights.departures(history, live, flights.airlines(context(spark)), flights.planes(context(spark)))
    return joined


def test_a_departure_is_neither_lost_nor_doubled_by_the_joins(departures: DataFrame, data: FlightsData) -> None:
    days = {tuple(map(int, day.split("-"))) for day in HISTORY + LIVE}
    raw = pd.read_csv(package_data() / "flights.csv.zip", usecols=["year", "month", "day"])
    assert departures.count() == sum(day in days for day in raw.itertuples(index=False, name=None))
    assert departures.where("carrier_name IS NULL").count() == 0
    assert 0 < departures.where("seats IS NULL").count() < departures.count()


def test_hourly_delays_are_those_of_the_batch_result(spark: SparkSession, departures: DataFrame, data: FlightsData) -> None:
    result = compare(expected_hourly_delays(spark, data), flights.hourly_delays(departures))
    assert result.is_equal, result
    assert result.expected > 1_000


def test_delays_with_weather_are_those_of_the_batch_result(spark: SparkSession, departures: DataFrame, data: FlightsData) -> None:
    delays = flights.hourly_delays(departures)
    joined = flights.delays_with_weather(delays, flights.weather(context(spark)))
    result = compare(expected_delays_with_weather(spark, data), joined)
    assert result.is_equal, result
    assert joined.where("temp IS NOT NULL").count() > 1_000


def test_the_reference_sees_a_flight_that_the_pipeline_lost(
    spark: SparkSession, departures: DataFrame, data: FlightsData
) -> None:
    lost = departures.orderBy("ts", "origin", "carrier", "flight").limit(1)
    without_one = departures.exceptAll(lost)
    assert without_one.count() == departures.count() - 1
    assert not compare(expected_hourly_delays(spark, data), flights.hourly_delays(without_one)).is_equal


@pytest.mark.parametrize("name", EXPECTED)
def test_a_table_is_compared_as_its_sink_has_written_it(
    spark: SparkSession, data: FlightsData, tmp_path: Path, name: str
) -> None:
    own = FlightsData(tmp_path)
    for entry in data.root.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    wanted = EXPECTED[name](spark, own).cache()
    nothing = compare_table(spark, own, name)
    assert (nothing.missing, nothing.duplicated, nothing.unexpected) == (nothing.expected, 0, 0)

    halves = [wanted.where("origin = 'EWR'"), wanted.where("origin <> 'EWR'")]
    for checkpoint, half in enumerate(halves, start=1):
        half.write.parquet(str(own.table(name) / f"checkpoint={checkpoint}-job1-0"))
    assert compare_table(spark, own, name).is_equal

    halves[0].write.parquet(str(own.table(name) / "checkpoint=3-job1-0"))
    doubled = compare_table(spark, own, name)
    assert (doubled.missing, doubled.unexpected) == (0, 0)
    assert doubled.duplicated == halves[0].count() > 0
    assert committed(spark, own, name).columns == wanted.columns
    wanted.unpersist()


def test_a_window_carries_the_watermark_in_its_event_time(spark: SparkSession, here: None) -> None:
    stream = flights.flights_history(context(spark)).withWatermark("ts", "1 hour")
    columns = stream.selectExpr("*", "'' AS carrier_name", "0 AS seats")
    ts = flights.hourly_delays(columns).schema["ts"]
    assert ts.dataType.simpleString() == "timestamp"
    assert ts.metadata["spark.watermarkDelayMs"] == 3_600_000


def test_an_instance_of_the_live_feed_reads_its_own_airport(spark: SparkSession, here: None, tmp_path: Path) -> None:
    stream = flights.flights_live(context(spark, "LGA"))
    query = (
        stream.writeStream.format("memory")
        .queryName("lga")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert {row.origin for row in spark.table("lga").select("origin").distinct().collect()} == {"LGA"}
    spark.catalog.dropTempView("lga")


def test_the_pipeline_as_a_whole() -> None:
    pipeline = flights.flights
    assert {stage.name for stage in pipeline.stages if not pipeline.is_bounded(stage.name)} == {
        "flights_live",
        "departures",
        "hourly_delays",
        "delays_with_weather",
    }
    assert pipeline.stage("flights_live").instances == ("EWR", "JFK", "LGA")
    assert {stage.name for stage in pipeline.stages if stage.sink is not None} == {
        "hourly_delays",
        "delays_with_weather",
    }
