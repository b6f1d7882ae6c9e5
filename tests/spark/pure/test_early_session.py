"""A session that is created early: on a thread of its own, with the same errors, and never without a need."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dagster_checkpoints.spark.session.session_life import EarlySession


class Creation:
    """Creates a session, once; remembers the thread."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.threads: list[threading.Thread] = []
        self._error = error

    def __call__(self) -> Any:
        self.threads.append(threading.current_thread())
        self.begun.set()
        if self._error is not None:
            raise self._error
        return "session"


def starts() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "spark-start"]


def test_without_a_wait_the_session_is_created_at_the_call() -> None:
    creation = Creation()
    session = EarlySession(creation)
    assert session() == "session"
    assert creation.threads == [threading.current_thread()]
    session.close()


def test_it_is_created_during_a_wait_on_another_thread_which_then_ends() -> None:
    creation = Creation()
    session = EarlySession(creation)
    session.create_after(0.0)
    assert creation.begun.wait(30.0)
    assert session() == "session"
    (thread,) = creation.threads
    assert thread is not threading.current_thread() and not thread.is_alive() and not starts()
    assert thread.daemon, "a run that is terminated while it waits ends at once"


def test_it_is_created_at_once_when_it_is_needed_before() -> None:
    creation = Creation()
    session = EarlySession(creation)
    session.create_after(3600.0)
    assert session() == "session" and len(creation.threads) == 1 and not starts()


def test_the_error_of_its_creation_is_raised_at_the_call() -> None:
    session = EarlySession(Creation(ValueError("no Java")))
    session.create_after(0.0)
    with pytest.raises(ValueError, match="no Java"):
        session()
    assert not starts()


def test_a_run_that_is_refused_creates_none() -> None:
    creation = Creation()
    session = EarlySession(creation)
    session.create_after(3600.0)
    session.close()
    assert not creation.threads and not starts()
