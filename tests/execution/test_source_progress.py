"""When a source has caught up: tables of what a query does, and every short history of a model of Spark."""

from __future__ import annotations

import itertools

import pytest

from dagster_checkpoints.execution.sources import SourceProgress

Begins, Nothing = "begins", "nothing"
Step = tuple[str, int]


@pytest.mark.parametrize(
    ("steps", "newest", "with_rows", "expected"),
    [
        pytest.param([(Begins, -1)], -1, (), False, id="was not asked yet"),
        pytest.param([(Begins, -1)], 0, (0,), False, id="its first batch runs, or is committed and it was not asked again"),
        pytest.param([(Begins, -1), (Nothing, -1)], -1, (), True, id="there was nothing to read"),
        pytest.param([(Begins, -1), (Nothing, -1)], 0, (0,), False, id="rows have come since"),
        pytest.param([(Begins, -1), (Nothing, 3)], 3, (3,), True, id="asked after its last rows"),
        pytest.param([(Begins, -1), (Nothing, 3)], 4, (4,), False, id="more files than one batch takes: between two of them"),
        pytest.param([(Begins, -1)], 4, (3,), True, id="a batch for event time alone: it was asked, and had none"),
        pytest.param([(Begins, -1)], 9, (), True, id="timers of processing time: batch after batch"),
        pytest.param([(Begins, 5)], 5, (), False, id="restored: the batch under the restored event time is run unasked"),
        pytest.param([(Begins, 5)], 5, (5,), False, id="restored: a batch that had rows is run again"),
        pytest.param([(Begins, 4)], 4, (4,), False, id="restored without a planned batch, not asked yet"),
        pytest.param([(Begins, 5)], 6, (6,), False, id="restored, and files were waiting"),
        pytest.param([(Begins, 5), (Nothing, 5)], 5, (), True, id="restored, and asked"),
        pytest.param([(Begins, 5)], 6, (), True, id="restored, asked, and a batch for event time alone"),
        pytest.param([(Begins, -1), (Nothing, 5), (Begins, 5)], 5, (), False, id="started again: what was known does not count"),
        pytest.param([(Begins, -1), (Nothing, 5), (Nothing, 4)], 5, (5,), False, id="told late, by another thread"),
    ],
)  # fmt: skip
def test_when_a_source_has_caught_up(steps: list[Step], newest: int, with_rows: tuple[int, ...], expected: bool) -> None:
    progress = SourceProgress()
    for step, batch_id in steps:
        progress.begins(batch_id) if step == Begins else progress.found_nothing(batch_id)
    assert progress.caught_up(newest, lambda batch_id: batch_id in with_rows) is expected


class Query:
    """A model of Spark's query: it asks, plans, runs and commits one batch after the other; each takes one file at most."""

    def __init__(self, always_wants_a_batch: bool) -> None:
        self.always_wants_a_batch = always_wants_a_batch
        self.progress = SourceProgress()
        self.planned: list[bool] = []
        """By batch, whether it has rows."""
        self.committed = -1
        self.waiting = 0
        self.waited_when_asked: int | None = None
        """The number of files that no batch had taken when Spark last asked in this run of the query."""
        self.found_nothing = False
        self.restart(planned=False)

    def restart(self, *, planned: bool) -> None:
        del self.planned[self.committed + 1 :]
        if planned and self.planned:
            self.planned.append(False)
        self.waited_when_asked, self.found_nothing = None, False
        self.progress.begins(len(self.planned) - 1)

    def do(self, step: str) -> None:
        if step == "file":
            self.waiting += 1
        elif step == "restart":
            self.restart(planned=False)
        elif step == "restart under event time":
            self.restart(planned=True)
        elif step == "reset":  # a task with fused sources takes note of Spark's flag, and resets it
            self.caught_up()
            self.found_nothing = False
        elif self.committed + 1 < len(self.planned):
            self.committed += 1
        else:
            self.waited_when_asked = self.waiting - 1 if self.waiting else 0
            if self.waiting or self.always_wants_a_batch:
                self.planned.append(self.waiting > 0)
                self.waiting = self.waited_when_asked
            self.found_nothing = len(self.planned) - 1 == self.committed

    def caught_up(self) -> bool:
        if self.found_nothing:
            self.progress.found_nothing(self.committed)
        return self.progress.caught_up(len(self.planned) - 1, lambda batch_id: self.planned[batch_id])


STEPS = ("file", "spark", "reset", "restart", "restart under event time")


@pytest.mark.parametrize("always_wants_a_batch", [False, True], ids=["waits for rows", "timers"])
@pytest.mark.parametrize("look", [False, True], ids=["looked at once", "looked at after each step"])
def test_it_is_said_only_if_nothing_waited_and_always_once_spark_has_asked(always_wants_a_batch: bool, look: bool) -> None:
    said = 0
    for steps in itertools.product(STEPS, repeat=6):
        query = Query(always_wants_a_batch)
        for step in steps:
            query.do(step)
            if look:
                query.caught_up()
        if query.caught_up():
            said += 1
            assert query.waited_when_asked == 0, steps
            assert not any(query.planned[query.committed + 1 :]), steps
        for _ in range(20):
            query.do("spark")
        assert query.caught_up(), steps
    assert said > 1000
