"""The tables that the flights pipeline must write, computed in one batch in SQL, for a comparison.

Shares with `flights` the files and their columns, but not the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from assets.flights_data import AIRLINES, AIRPORTS, FLIGHTS, PLANES, WEATHER, FlightsData
from assets.flights_sinks import committed_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_HOURLY_DELAYS = """
SELECT hour + INTERVAL 1 HOUR - INTERVAL 1 MICROSECOND AS ts,
       hour AS window_start,
       hour + INTERVAL 1 HOUR AS window_end,
       origin,
       carrier,
       carrier_name,
       count(*) AS flights,
       sum(CASE WHEN cancelled THEN 1 ELSE 0 END) AS cancelled,
       sum(seats) AS seats,
       sum(dep_delay) / count(dep_delay) AS mean_delay,
       percentile_disc(0.9) WITHIN GROUP (ORDER BY dep_delay) AS p90_delay
FROM (
    SELECT flights.*,
           date_trunc('HOUR', flights.ts) AS hour,
           airlines.carrier_name,
           planes.seats
    FROM {flights} AS flights
    LEFT JOIN {airlines} AS airlines ON airlines.carrier = flights.carrier
    LEFT JOIN {planes} AS planes ON planes.tailnum = flights.tailnum
)
GROUP BY hour, origin, carrier, carrier_name
"""

_DELAYS_WITH_WEATHER = """
SELECT delays.*, weather.temp, weather.humid, weather.wind_speed, weather.precip, weather.visib
FROM {delays} AS delays
LEFT JOIN {weather} AS weather ON weather.origin = delays.origin AND weather.hour = delays.window_start
"""


def expected_hourly_delays(spark: SparkSession, data: FlightsData) -> DataFrame:
    """The table `hourly_delays` over the history and the live files fed so far."""
    live = [str(data.live / airport) for airport in AIRPORTS]
    return spark.sql(
        _HOURLY_DELAYS,
        flights=spark.read.schema(FLIGHTS).parquet(str(data.history), *live),
        airlines=spark.read.schema(AIRLINES).csv(str(data.airlines), header=True),
        planes=spark.read.schema(PLANES).csv(str(data.planes), header=True),
    )


def expected_delays_with_weather(spark: SparkSession, data: FlightsData) -> DataFrame:
    """The table `delays_with_weather` over the history and the live files fed so far."""
    return spark.sql(
        _DELAYS_WITH_WEATHER,
        delays=expected_hourly_delays(spark, data),
        weather=spark.read.schema(WEATHER).parquet(str(data.weather)),
    )


EXPECTED = {
    "hourly_delays": expected_hourly_delays,
    "delays_with_weather": expected_delays_with_weather,
}
"""The tables by the name of the stage whose sink holds them."""


def committed(spark: SparkSession, data: FlightsData, name: str) -> DataFrame:
    """All rows that the sink of the stage `name` has committed so far."""
    return committed_rows(spark, data, name, EXPECTED[name](spark, data).schema)


@dataclass(frozen=True)
class Comparison:
    """How a table differs from the expected one, in rows.

    Rows are compared as a whole: a row with one wrong value counts as one missing and one unexpected row.
    """

    expected: int
    missing: int
    duplicated: int
    unexpected: int

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.duplicated or self.unexpected)


def compare_table(spark: SparkSession, data: FlightsData, name: str) -> Comparison:
    """Compare the rows that the sink of the stage `name` has committed with the expected table."""
    return compare(EXPECTED[name](spark, data), committed(spark, data, name))


def compare(expected: DataFrame, actual: DataFrame) -> Comparison:
    """Compare two tables as multisets of rows; nulls are equal, the order of columns is ignored.

    Args:
        expected: The expected table.
        actual: The table to compare, for example all rows that a sink has committed.

    Returns:
        Numbers of rows: expected; missing (expected more often than found); duplicated (found more often than expected);
        unexpected (found, but not expected at all).

    Raises:
        ValueError: The tables have different columns.
    """
    types, actual_types = ({field.name: field.dataType.simpleString() for field in table.schema} for table in (expected, actual))
    if types != actual_types:
        differing = {
            name: (types.get(name, "absent"), actual_types.get(name, "absent"))
            for name in {**types, **actual_types}
            if types.get(name) != actual_types.get(name)
        }
        raise ValueError(f"expected two tables with the same columns, found (expected, actual): {differing}")

    wanted = expected.select(*types).selectExpr("*", "1 AS in_expected", "0 AS in_actual")
    found = actual.select(*types).selectExpr("*", "0 AS in_expected", "1 AS in_actual")
    counts = (
        wanted.unionByName(found)
        .groupBy(*types)
        .agg({"in_expected": "sum", "in_actual": "sum"})
        .selectExpr("`sum(in_expected)` AS wanted", "`sum(in_actual)` AS found")
        .selectExpr(
            "coalesce(sum(wanted), 0)",
            "coalesce(sum(greatest(wanted - found, 0)), 0)",
            "coalesce(sum(greatest(found - wanted, 0)) FILTER (WHERE wanted > 0), 0)",
            "coalesce(sum(found) FILTER (WHERE wanted = 0), 0)",
        )
    )
    (row,) = counts.collect()
    return Comparison(*(int(value) for value in row))
