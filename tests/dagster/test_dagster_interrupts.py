"""Signals that arrive in code that must not be interrupted by an exception."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from dagster_checkpoints.plugin.interrupts import interrupts_delayed


class Interrupted(BaseException):
    pass


@pytest.fixture
def raising() -> Iterator[None]:
    """The handlers that Dagster installs while an op runs."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = {number: signal.signal(number, raise_it) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("raising")
def test_an_interrupt_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(Interrupted), interrupts_delayed():
        signal.raise_signal(number)
        steps.append("after the signal")
    assert steps == ["after the signal"]
    with pytest.raises(Interrupted):
        signal.raise_signal(number)  # as before


@pytest.mark.usefixtures("raising")
def test_nothing_happens_without_an_interrupt() -> None:
    with interrupts_delayed():
        pass


def test_other_threads_are_not_interrupted() -> None:
    done = []

    def work() -> None:
        with interrupts_delayed():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
