"""The live feed: files appear whole and in order, and a feeder that was stopped continues from its last file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from assets.feeder import feed, reset
from assets.flights_data import AIRPORTS, FlightsData

DAYS = [f"2013-12-{day:02}" for day in range(1, 6)]


@pytest.fixture
def data(tmp_path: Path) -> FlightsData:
    data = FlightsData(tmp_path)
    for airport in AIRPORTS:
        (data.december / airport).mkdir(parents=True)
        (data.live / airport).mkdir(parents=True)
        for day in DAYS:
            (data.december / airport / f"{day}.parquet").write_text(f"{airport} {day}")
    return data


def fed(data: FlightsData, airport: str) -> list[str]:
    """The days in the order in which Spark's file source reads them."""
    files = sorted((data.live / airport).iterdir(), key=lambda file: file.stat().st_mtime_ns // 1_000_000)
    return [file.stem for file in files]


def test_all_of_december_is_dropped_in_order(data: FlightsData) -> None:
    assert feed(data, seconds_per_day=0)
    for airport in AIRPORTS:
        assert fed(data, airport) == DAYS
        assert (data.live / airport / f"{DAYS[0]}.parquet").read_text() == f"{airport} {DAYS[0]}"
        times = {file.stat().st_mtime_ns // 1_000_000 for file in (data.live / airport).iterdir()}
        assert len(times) == len(DAYS)
    assert data.feed_complete.exists()


def test_a_feed_that_is_stopped_goes_on_with_the_first_day_that_is_missing(data: FlightsData) -> None:
    stop, told = threading.Event(), list[tuple[str, int, int]]()

    def on_day(day: str, number: int, days: int) -> None:
        told.append((day, number, days))
        if number == 2:
            stop.set()

    assert not feed(data, seconds_per_day=0, stop=stop, on_day=on_day)
    assert fed(data, "JFK") == DAYS[:2]
    assert not data.feed_complete.exists()

    assert feed(data, seconds_per_day=0, on_day=lambda *day: told.append(day))
    assert told == [(day, number, 5) for number, day in enumerate(DAYS, start=1)]
    assert fed(data, "JFK") == DAYS
    assert data.feed_complete.exists()


def test_stopping_does_not_wait_for_the_next_day(data: FlightsData) -> None:
    stop = threading.Event()
    result: list[bool] = []
    feeder = threading.Thread(target=lambda: result.append(feed(data, seconds_per_day=3600, stop=stop)), daemon=True)
    feeder.start()
    stop.set()
    feeder.join(timeout=30)
    assert result == [False]


def test_a_day_that_an_interrupted_feeder_left_half_dropped_is_completed(data: FlightsData) -> None:
    (data.live / "EWR" / f"{DAYS[0]}.parquet").write_text(f"EWR {DAYS[0]}")
    (data.live / "JFK" / f".{DAYS[0]}.parquet.new").write_text("half")
    assert feed(data, seconds_per_day=0)
    assert [fed(data, airport) for airport in AIRPORTS] == [DAYS] * 3
    assert (data.live / "JFK" / f"{DAYS[0]}.parquet").read_text() == f"JFK {DAYS[0]}"


def test_a_second_feed_drops_nothing(data: FlightsData) -> None:
    feed(data, seconds_per_day=0)
    told: list[str] = []
    assert feed(data, seconds_per_day=3600, on_day=lambda day, number, days: told.append(day))
    assert told == []


def test_reset_takes_everything_back(data: FlightsData) -> None:
    feed(data, seconds_per_day=0)
    reset(data)
    assert [fed(data, airport) for airport in AIRPORTS] == [[], [], []]
    assert not data.feed_complete.exists()


def test_without_a_stock_the_feeder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"prepare\(\)"):
        feed(FlightsData(tmp_path))
