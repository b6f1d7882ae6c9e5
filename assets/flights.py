"""The flights of 2013 as a pipeline: a backfill and three live feeds that meet in the same windows.

    flights_history (January to November) ─┐
    flights_live    (EWR, JFK, LGA)       ─┴─ departures ── hourly_delays ── delays_with_weather
    airlines, planes (tables)             ───────┘                               │
    weather          (a table)            ───────────────────────────────────────┘

Each stage is a function from DataFrames to a DataFrame; the names of its parameters are the stages that it
reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from assets.flights_data import AIRLINES, AIRPORTS, FLIGHTS, PLANES, WEATHER, FlightsData, default_root
from assets.flights_kafka import kind_of_source, live_flights
from assets.flights_sinks import sink_of
from dagster_checkpoints import (
    Pipeline,
    StageContext,
    StageInput,
    bounded_source,
    stage,
    unbounded_source,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DATA = FlightsData(default_root())
ANY_AGE = "36500d"
"""Read files of any age: by default Spark skips a file that is older than another one by more than seven days."""


@bounded_source(watermark=("ts", "1 hour"))
def flights_history(context: StageContext) -> DataFrame:
    """The flights of January to November, one file per day; ends when the last file has been read."""
    files = context.spark.readStream.schema(FLIGHTS).option("maxFilesPerTrigger", 12).option("maxFileAge", ANY_AGE)
    return files.parquet(str(DATA.history))


@unbounded_source(watermark=("ts", "1 hour"), instances=AIRPORTS)
def flights_live(context: StageContext) -> DataFrame:
    """The flights of December as they arrive, one directory or one partition of a topic per airport."""
    if kind_of_source() == "kafka":
        return live_flights(context.spark, context.instance)
    files = context.spark.readStream.schema(FLIGHTS).option("maxFilesPerTrigger", 2).option("maxFileAge", ANY_AGE)
    return files.parquet(str(DATA.live / context.instance))


@bounded_source
def airlines(context: StageContext) -> DataFrame:
    """The names of the carriers."""
    return context.spark.read.schema(AIRLINES).csv(str(DATA.airlines), header=True)


@bounded_source
def planes(context: StageContext) -> DataFrame:
    """The planes that are known by their tail numbers."""
    return context.spark.read.schema(PLANES).csv(str(DATA.planes), header=True)


@bounded_source
def weather(context: StageContext) -> DataFrame:
    """The weather at the three airports, hour by hour."""
    return context.spark.read.schema(WEATHER).parquet(str(DATA.weather))


@stage(inputs={"airlines": StageInput(mode="static"), "planes": StageInput(mode="static")})
def departures(flights_history: DataFrame, flights_live: DataFrame, airlines: DataFrame, planes: DataFrame) -> DataFrame:
    """All departures, with the carrier's name and the plane."""
    flights = flights_history.unionByName(flights_live)
    return flights.join(airlines, "carrier", "left").join(planes, "tailnum", "left")


@stage(sink=sink_of(DATA, "hourly_delays"))
def hourly_delays(departures: DataFrame) -> DataFrame:
    """Delays of the departures of each hour, by airport and carrier."""
    hours = departures.groupBy(F.window("ts", "1 hour"), "origin", "carrier", "carrier_name").agg(
        F.count("*").alias("flights"),
        F.count_if("cancelled").alias("cancelled"),
        F.sum("seats").alias("seats"),
        F.avg("dep_delay").alias("mean_delay"),
        F.percentile_approx("dep_delay", 0.9).alias("p90_delay"),
    )
    return hours.select(
        F.window_time("window").alias("ts"),  # the event time of a window: its last microsecond
        F.col("window.start").alias("window_start"),
        F.col("window.end").alias("window_end"),
        *(column for column in hours.columns if column != "window"),
    )


@stage(inputs={"weather": StageInput(mode="static")}, sink=sink_of(DATA, "delays_with_weather"))
def delays_with_weather(hourly_delays: DataFrame, weather: DataFrame) -> DataFrame:
    """The hourly delays with the weather at the airport in that hour, where it was recorded."""
    weather_by_window = weather.withColumnRenamed("hour", "window_start")
    return hourly_delays.join(weather_by_window, ["origin", "window_start"], "left")


flights = Pipeline(
    "flights",
    [
        flights_history,
        flights_live,
        airlines,
        planes,
        weather,
        departures,
        hourly_delays,
        delays_with_weather,
    ],
)
