"""The live feed: copies December's files, day by day, into the directories that the live sources read.

Each file appears whole, by a rename, with a distinct modification time: Spark's file source lists the
directories while the feeder writes, and reads in the order of modification times. Stopped and started again, the
feeder continues with the first file that is missing. With SOURCE=kafka the flights of each file are sent to Kafka as well.

This module must not know Spark or Dagster.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from assets.flights_data import AIRPORTS, FlightsData, default_root, prepare
from assets.flights_kafka import kind_of_source, send_flights

_MILLISECOND = 1_000_000
"""In nanoseconds. Spark sees modification times in milliseconds."""


def feed(
    data: FlightsData,
    *,
    seconds_per_day: float = 1.0,
    stop: threading.Event | None = None,
    on_day: Callable[[str, int, int], None] | None = None,
) -> bool:
    """Copy the files of December that have not been copied yet.

    Args:
        data: The files that `prepare` has written.
        seconds_per_day: Pause after each of December's 31 days, in seconds.
        stop: Event that ends the feed at once when it is set.
        on_day: Called after each day with its date ("2013-12-24"), its number and the number of days.

    Returns:
        Whether all of December has been copied; then `data.feed_complete` exists.
    """
    stop = stop or threading.Event()
    days = sorted({file.name for airport in AIRPORTS for file in (data.december / airport).glob("*.parquet")})
    if not days:
        raise FileNotFoundError(f"expected files of December in {data.december}, found none: call prepare() first.")
    for number, name in enumerate(days, start=1):
        if stop.is_set():
            return False
        # A list, not a generator: `any` would stop at the first airport whose file was missing.
        if any([_copy(data, airport, name) for airport in AIRPORTS]):
            if on_day is not None:
                on_day(name.removesuffix(".parquet"), number, len(days))
            if stop.wait(seconds_per_day):
                return False
    data.feed_complete.touch()
    return True


def reset(data: FlightsData) -> None:
    """Remove every copied file, so that the feed begins with December 1 again."""
    data.feed_complete.unlink(missing_ok=True)
    for airport in AIRPORTS:
        shutil.rmtree(data.live / airport, ignore_errors=True)
        (data.live / airport).mkdir(parents=True)


def _copy(data: FlightsData, airport: str, name: str) -> bool:
    """Copy one file if it is missing. Returns whether it was missing."""
    source, target = data.december / airport / name, data.live / airport / name
    if target.exists() or not source.exists():
        return False
    # Names that begin with a dot are invisible to Spark.
    new = target.with_name(f".{name}.new")
    shutil.copyfile(source, new)
    newest = max((file.stat().st_mtime_ns for file in target.parent.glob("*.parquet")), default=0)
    mtime = max(time.time_ns(), newest + _MILLISECOND)
    os.utime(new, ns=(mtime, mtime))
    new.rename(target)
    if kind_of_source() == "kafka":
        send_flights(airport, target)
    return True


def _main() -> None:
    parser = argparse.ArgumentParser(description="Copy December's flights into the live directories, day by day.")
    parser.add_argument("--root", type=Path, default=default_root(), help="the data (default: %(default)s)")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds per day (default: %(default)s)")
    parser.add_argument("--reset", action="store_true", help="begin with December 1 again")
    arguments = parser.parse_args()

    data = prepare(arguments.root.absolute())
    if arguments.reset:
        reset(data)
    try:
        feed(
            data,
            seconds_per_day=arguments.pace,
            on_day=lambda day, number, days: print(f"fed {day} ({number} of {days})", flush=True),
        )
    except KeyboardInterrupt:
        print("stopped; the next start continues from this day")
    else:
        print(f"all of December is in {data.live}")


if __name__ == "__main__":
    _main()
