"""How queries start on a machine with little to give, without a Spark session."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dagster_checkpoints.spark import query
from dagster_checkpoints.spark.query import TaskQuery


def made(folder: Path) -> TaskQuery:
    return TaskQuery(folder, "pool", lambda frame, batch: None, lambda give_up: None)


def test_only_so_many_queries_start_at_once_and_each_gives_way_once_it_has_asked_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "_STARTS", threading.BoundedSemaphore(2))
    monkeypatch.setattr(TaskQuery, "waits_for_data", property(lambda self: False))
    lock, starting, most, three = threading.Lock(), set[int](), [0], threading.Event()

    def run(number: int) -> None:
        one = made(tmp_path / str(number))

        def start() -> None:
            with lock:
                starting.add(number)
                most[0] = max(most[0], len(starting))

        def check() -> None:
            if number in starting and (len(starting) == 2 or three.is_set()):
                with lock:
                    starting.discard(number)
                    three.set()
                (one.checkpoint / "offsets").mkdir(parents=True)
                (one.checkpoint / "offsets" / "0").touch()

        one.start_in_turn(start, check)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert most == [2]


def test_a_query_that_fails_while_it_starts_says_so_and_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "_STARTS", threading.BoundedSemaphore(1))

    def fail() -> None:
        raise RuntimeError("failed to connect back")

    # Not active any more, so it "waits": it must not count as started.
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connect back"):
            made(tmp_path).start_in_turn(lambda: None, fail)
