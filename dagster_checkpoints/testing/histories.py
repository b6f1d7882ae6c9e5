"""Histories: the ways in which the same rows may reach a pipeline, made at random, and made smaller.

A row is known by its instance of a source, and its number there: rows in order of their numbers are in order of event time. Must
not know Spark, nor the rows' columns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

RowId = tuple[str, int]
"""The instance of the source, and the row's number there."""
Batches = Mapping[str, tuple[tuple[int, ...], ...]]
"""By instance of a source, the numbers of the rows of each micro-batch."""

Step = Literal["crash", "instances", "restore", "time_zone", "order", "batches"]
"""What a history may have beside its rows: a run that is cancelled, other instances, a run that is restored, another time zone,
rows in another order than that of event time, and several micro-batches."""
STEPS: tuple[Step, ...] = get_args(Step)


@dataclass(frozen=True)
class Feed:
    """What is known of the rows of one instance of a source.

    Attributes:
        times: The event time of each row in microseconds, in order; None for a row without one, or all None without event time.
        lateness_ms: How much older than the newest row before it a row may be; None without event time.
        bounded: Whether all rows are there when the job begins.
        keeps_order: Whether rows come in the order of their numbers.
    """

    times: tuple[int | None, ...]
    lateness_ms: int | None = None
    bounded: bool = False
    keeps_order: bool = False


@dataclass(frozen=True)
class Run:
    """One run of the job.

    Attributes:
        batches: The micro-batches that it reads.
        crashes: Whether it is cancelled before it commits: the next run reads the same rows.
        instances: Other names of instances, by stage.
    """

    batches: Batches
    crashes: bool = False
    instances: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """A way in which rows reach a pipeline, and in which the job is stopped and restored.

    Attributes:
        runs: The runs, in order. After the last one that does not crash the sources end.
        engine: "batch": the stages are evaluated once over all rows, each micro-batch is a partition.
        time_zone: The time zone of Spark's session and of Python's workers; None for the session's own.
    """

    runs: tuple[Run, ...]
    engine: Literal["batch", "stream"] = "stream"
    time_zone: str | None = None

    @property
    def rows(self) -> tuple[RowId, ...]:
        """The rows, in the order of instances and numbers."""
        return tuple(sorted({(name, row) for run in self.runs for name, rows in _joined(run.batches).items() for row in rows}))

    def keeping(self, rows: Collection[RowId]) -> History:
        """The history with these rows only; without micro-batches, and runs, that have none."""
        kept = set(rows)
        runs = [replace(run, batches=_kept_batches(run.batches, kept)) for run in self.runs]
        full = tuple(run for run in runs if any(run.batches.values()))
        return replace(self, runs=full or (Run({}),))

    def described(self) -> Iterator[str]:
        """The history in words, one line for each run."""
        if self.time_zone is not None:
            yield f"time zone {self.time_zone}"
        for number, run in enumerate(self.runs, start=1):
            batches = "; ".join(
                f"{name}: {' | '.join(', '.join(map(str, batch)) for batch in each)}"
                for name, each in run.batches.items()
                if each
            )
            if self.engine == "batch":
                yield f"as a batch, partitions of rows {batches or '(no rows)'}"
                continue
            end = "cancelled before it commits" if run.crashes else "sources end" if run is self.runs[-1] else "suspended"
            others = "".join(f", {stage} has {len(names)} instances" for stage, names in run.instances.items())
            yield f"run {number}{others}: micro-batches of rows {batches or '(no rows)'}; {end}"


def in_order(feeds: Mapping[str, Feed], engine: Literal["batch", "stream"]) -> History:
    """All rows in one micro-batch for each instance, in order of event time."""
    return History((Run({name: (tuple(range(len(feed.times))),) for name, feed in feeds.items() if feed.times}),), engine)


def random_history(
    feeds: Mapping[str, Feed],
    chance: random.Random,
    *,
    engine: Literal["batch", "stream"] = "stream",
    runs: int = 1,
    crash: bool = False,
    instances: Mapping[str, tuple[str, ...]] | None = None,
    time_zone: str | None = None,
) -> History:
    """Cut the rows into micro-batches and runs.

    In a stream each row comes before the watermark of its instance has passed it, so none is late: it is newer than the newest
    row of the micro-batches before, less the lateness. The rows of a batch are in any order.

    Args:
        feeds: The instances of the sources.
        chance: The source of chance.
        engine: See :class:`History`.
        runs: The number of runs that commit.
        crash: Whether a run is cancelled, too.
        instances: Other names of instances, by stage, from the second run on.
        time_zone: See :class:`History`.
    """
    parts: list[dict[str, tuple[tuple[int, ...], ...]]] = [{} for _ in range(runs)]
    for name, feed in feeds.items():
        # A batch has no order: two instances of a source come in any order.
        batches = _cut(feed, _arrival(feed, chance, any_order=engine == "batch"), chance, engine, runs)
        borders = sorted(chance.sample(range(1, len(batches)), min(runs - 1, max(len(batches) - 1, 0))))
        bounds = [len(batches)] * runs if feed.bounded else [*borders, *[len(batches)] * (runs - len(borders))]
        for part, begin, end in zip(parts, [0, *bounds[:-1]], bounds, strict=True):
            if batches[begin:end]:
                part[name] = tuple(batches[begin:end])
    made = [Run(part, instances=instances or {} if index else {}) for index, part in enumerate(parts)]
    full = [index for index, run in enumerate(made) if run.batches]
    if crash and full:
        at = chance.choice(full[1:] or full)
        rows = {name: (tuple(chance.sample(joined, len(joined))),) for name, joined in _joined(made[at].batches).items()}
        made.insert(at, replace(made[at], batches=rows, crashes=True))
    return History(tuple(made), engine, time_zone)


def on_time(history: History, feeds: Mapping[str, Feed]) -> bool:
    """Whether no row comes behind the watermark of its instance; there is none in a batch."""
    for name, feed in feeds.items() if history.engine == "stream" else ():
        batches = [batch for run in history.runs if not run.crashes for batch in run.batches.get(name, ())]
        read = [row for batch in batches for row in batch]
        if not all(_on_time(feed, read[:end], read[end:]) for end in accumulate(map(len, batches))):
            return False
    return True


def shrink(history: History, fails: Callable[[History], bool], attempts: int) -> History:
    """Make a failing history smaller, as long as it fails.

    First fewer steps, which also makes each attempt cheaper, then fewer rows, then fewer steps again.

    Args:
        history: A history that fails.
        fails: Whether a history fails, too.
        attempts: The largest number of histories that are tried.
    """
    left = [attempts]

    def still_fails(smaller: History) -> bool:
        if left[0] == 0:
            return False
        left[0] -= 1
        return fails(smaller)

    history = _fewer_steps(history, still_fails)
    before = len(history.rows)
    history = _fewer_rows(history, still_fails)
    return _fewer_steps(history, still_fails, also_batches=True) if len(history.rows) < before else history


def simpler(history: History) -> Iterator[tuple[Step, Callable[[History], History]]]:
    """What a history has beside its rows, each with a function that takes it away."""
    runs = history.runs
    if any(run.crashes for run in runs):
        yield "crash", lambda each: replace(each, runs=tuple(run for run in each.runs if not run.crashes))
    if any(run.instances for run in runs):
        yield "instances", lambda each: replace(each, runs=tuple(replace(run, instances={}) for run in each.runs))
    if sum(not run.crashes for run in runs) > 1:
        yield "restore", _in_one_run
    if history.time_zone is not None:
        yield "time_zone", lambda each: replace(each, time_zone=None)
    if any(batch != tuple(sorted(batch)) for run in runs for batches in run.batches.values() for batch in batches) or any(
        list(rows) != sorted(rows) for rows in _joined_runs(history).values()
    ):
        yield "order", _sorted
    if any(len(batches) > 1 for run in runs for batches in run.batches.values()):
        yield (
            "batches",
            lambda each: replace(each, runs=tuple(replace(run, batches=_one_batch(run.batches)) for run in each.runs)),
        )


def _fewer_steps(history: History, fails: Callable[[History], bool], *, also_batches: bool = False) -> History:
    for step in STEPS:
        take_away = dict(simpler(history)).get(step)
        if take_away is not None and fails(smaller := take_away(history)):
            history = smaller
    return _fewer_batches(history, fails) if also_batches else history


def _fewer_batches(history: History, fails: Callable[[History], bool]) -> History:
    """Join two micro-batches that follow each other, one pair after another."""
    for index, run in enumerate(history.runs):
        for name in run.batches:
            position = 0
            while position + 1 < len(batches := history.runs[index].batches[name]):
                joined = (*batches[:position], batches[position] + batches[position + 1], *batches[position + 2 :])
                changed = replace(history.runs[index], batches={**history.runs[index].batches, name: joined})
                smaller = replace(history, runs=(*history.runs[:index], changed, *history.runs[index + 1 :]))
                if fails(smaller):
                    history = smaller
                else:
                    position += 1
    return history


def _fewer_rows(history: History, fails: Callable[[History], bool]) -> History:
    """Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002)."""
    parts = 2
    while len(rows := history.rows) > 1:
        chunks = [rows[len(rows) * index // parts : len(rows) * (index + 1) // parts] for index in range(parts)]
        candidates: list[tuple[int, Sequence[RowId]]] = [(2, chunk) for chunk in chunks]
        if parts > 2:
            candidates += [(parts - 1, [row for row in rows if row not in set(chunk)]) for chunk in chunks]
        for next_parts, kept in candidates:
            if fails(smaller := history.keeping(kept)):
                history, parts = smaller, next_parts
                break
        else:
            if parts >= len(rows):
                break
            parts = min(2 * parts, len(rows))
    return history


def _arrival(feed: Feed, chance: random.Random, *, any_order: bool) -> list[int]:
    """Row numbers in the order in which they come."""
    numbers = list(range(len(feed.times)))
    if feed.keeps_order:
        return numbers
    if any_order or feed.lateness_ms is None:
        chance.shuffle(numbers)
        return numbers
    # If j comes before i, then time(j) <= time(i) + delay, and that is less than the lateness.
    longest = max(feed.lateness_ms - 1, 0) * 1000
    known = [time for time in feed.times if time is not None] or [0]
    key = {
        number: (chance.randint(known[0], known[-1]) if time is None else time) + chance.randint(0, longest)
        for number, time in enumerate(feed.times)
    }
    return sorted(numbers, key=lambda number: (key[number], number))


def _cut(feed: Feed, arrival: Sequence[int], chance: random.Random, engine: str, at_least: int) -> list[tuple[int, ...]]:
    """Cut rows into at least two, and up to five or some more micro-batches, where no row behind the cut would be late."""
    places = [place for place in range(1, len(arrival)) if engine == "batch" or _on_time(feed, arrival[:place], arrival[place:])]
    cuts = sorted(chance.sample(places, min(len(places), chance.randint(at_least, at_least + 3))))
    bounds = [0, *cuts, len(arrival)]
    return [tuple(arrival[begin:end]) for begin, end in pairwise(bounds) if begin < end]


def _on_time(feed: Feed, before: Sequence[int], behind: Sequence[int]) -> bool:
    if feed.lateness_ms is None:
        return True
    newest = max((time for row in before if (time := feed.times[row]) is not None), default=None)
    oldest = min((time for row in behind if (time := feed.times[row]) is not None), default=None)
    if newest is None or oldest is None or feed.keeps_order:
        return True
    # Spark keeps watermarks in milliseconds, and a row at the watermark is late.
    return oldest > (newest // 1000 - feed.lateness_ms) * 1000


def _kept_batches(batches: Batches, kept: Collection[RowId]) -> Batches:
    return {
        name: tuple(smaller for batch in each if (smaller := tuple(number for number in batch if (name, number) in kept)))
        for name, each in batches.items()
    }


def _joined(batches: Batches) -> dict[str, tuple[int, ...]]:
    return {name: tuple(row for batch in each for row in batch) for name, each in batches.items()}


def _joined_runs(history: History) -> dict[str, list[int]]:
    """The rows of each instance in the order in which runs that commit read them."""
    joined: dict[str, list[int]] = {}
    for run in history.runs:
        for name, rows in _joined(run.batches).items() if not run.crashes else ():
            joined.setdefault(name, []).extend(rows)
    return joined


def _in_one_run(history: History) -> History:
    """All rows in one run, and a crash before it where there was one."""
    committing = [run for run in history.runs if not run.crashes]
    names = dict.fromkeys(name for run in committing for name in run.batches)
    run = Run({name: tuple(batch for each in committing for batch in each.batches.get(name, ())) for name in names})
    return replace(history, runs=(*([_crash_before(run)] if len(committing) < len(history.runs) else []), run))


def _sorted(history: History) -> History:
    """The same sizes of micro-batches with the rows of each instance in order."""
    left = {name: iter(sorted(rows)) for name, rows in _joined_runs(history).items()}
    runs: list[Run] = []
    for run in history.runs:
        made = (
            {name: tuple(tuple(next(left[name]) for _ in batch) for batch in each) for name, each in run.batches.items()}
            if not run.crashes
            else {}
        )
        runs.append(replace(run, batches=made))
    behind = [*runs[1:], Run({})]
    return replace(
        history, runs=tuple(_crash_before(next_run) if run.crashes else run for run, next_run in zip(runs, behind, strict=True))
    )


def _crash_before(run: Run) -> Run:
    """A run that reads the rows of the run behind it in one micro-batch: if it is cancelled too late, none of them is late."""
    return replace(run, batches=_one_batch(run.batches), crashes=True)


def _one_batch(batches: Batches) -> Batches:
    return {name: (rows,) if rows else () for name, rows in _joined(batches).items()}
