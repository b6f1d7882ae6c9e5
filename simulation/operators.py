"""What the stages of a simulated pipeline compute: enough of every kind of state that a lost or doubled record shows.

An operator is one instance of one stage. Rows go in by `take`, out by `forward`; event time comes by `advance`. What it
computes must not depend on timing: `expected` computes the same from the source records alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simulation.elements import EDGES, FLUSHED_TS, WINDOW, mix, owner_of
from simulation.shapes import StageSpec
from simulation.violations import Violation, check

Forward = Callable[[int, int, int], None]


class Operator:
    """Passes rows on, under a new name that says by which edge they came and which static table they met."""

    __slots__ = ("finished", "forward", "has_table", "index", "number", "spec", "table", "watermark")

    def __init__(self, number: int, spec: StageSpec, index: int) -> None:
        self.number = number
        self.spec = spec
        self.index = index
        self.table = 0
        self.has_table = any(i.static for i in spec.inputs)
        self.forward: Forward
        self.watermark = 0
        self.finished = False

    def named(self, uid: int, edge: int) -> int:
        uid = uid * EDGES + edge
        return mix(uid, self.table) if self.has_table else uid

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        self.forward(self.named(uid, edge), ts, key)

    def advance(self, watermark: int) -> None:
        self.watermark = watermark

    def finish(self) -> None:
        """No more rows: emit what was held back."""

    def snapshot(self) -> Any:
        return None

    def restore(self, states: Iterable[Any]) -> None:
        """Take over this instance's share of what all instances had put into the checkpoint, given in order."""

    def _check_owned(self, key: int) -> None:
        owned = self.spec.instances == 1 or not any(i.keyed for i in self.spec.inputs) or self._owns(key)
        if not owned:
            raise Violation(f"key {key} at instance {self.index} of stage {self.number}, which does not own it")

    def _owns(self, key: int) -> bool:
        return owner_of(key, self.spec.instances) == self.index


class Window(Operator):
    """Counts the rows of each key and window, and says so once when event time has passed the window's end."""

    __slots__ = ("open",)

    def __init__(self, number: int, spec: StageSpec, index: int) -> None:
        super().__init__(number, spec, index)
        self.open: dict[tuple[int, int], tuple[int, int]] = {}

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        self._check_owned(key)
        window = ts // WINDOW
        if (window + 1) * WINDOW <= self.watermark:
            raise Violation(f"late: a row of {ts} at stage {self.number}[{self.index}], where event time is {self.watermark}")
        count, total = self.open.get((window, key), (0, 0))
        self.open[window, key] = (count + 1, total + self.named(uid, edge))

    def advance(self, watermark: int) -> None:
        self.watermark = watermark
        for window, key in sorted(w for w in self.open if (w[0] + 1) * WINDOW <= watermark):
            count, total = self.open.pop((window, key))
            self.forward(*window_row(self.number, window, key, count, total))

    def snapshot(self) -> dict[tuple[int, int], tuple[int, int]]:
        return self.open.copy()

    def restore(self, states: Iterable[dict[tuple[int, int], tuple[int, int]]]) -> None:
        for state in states:
            self.open.update(state)


def window_row(stage: int, window: int, key: int, count: int, total: int) -> tuple[int, int, int]:
    return mix(stage, window, key, count, total), (window + 1) * WINDOW - 1, key


class Totals(Operator):
    """Passes rows on, and says at the end how many each key had."""

    __slots__ = ("totals",)

    def __init__(self, number: int, spec: StageSpec, index: int) -> None:
        super().__init__(number, spec, index)
        self.totals: dict[int, tuple[int, int]] = {}

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        self._check_owned(key)
        uid = self.named(uid, edge)
        count, total = self.totals.get(key, (0, 0))
        self.totals[key] = (count + 1, total + uid)
        self.forward(uid, ts, key)

    def finish(self) -> None:
        for key in sorted(self.totals):
            self.forward(*totals_row(self.number, key, *self.totals[key]))
        self.totals = {}

    def snapshot(self) -> dict[int, tuple[int, int]]:
        return self.totals.copy()

    def restore(self, states: Iterable[dict[int, tuple[int, int]]]) -> None:
        for state in states:
            self.totals.update(state)


def totals_row(stage: int, key: int, count: int, total: int) -> tuple[int, int, int]:
    return mix(stage, key, count, total), FLUSHED_TS, key


class Buffer(Operator):
    """Holds every row back until the end, in list state."""

    __slots__ = ("held",)

    def __init__(self, number: int, spec: StageSpec, index: int) -> None:
        super().__init__(number, spec, index)
        self.held: list[tuple[int, int]] = []

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        self.held.append((self.named(uid, edge), key))

    def finish(self) -> None:
        for uid, key in self.held:
            self.forward(uid, FLUSHED_TS, key)
        self.held = []

    def snapshot(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.held)

    def restore(self, states: Iterable[tuple[tuple[int, int], ...]]) -> None:
        self.held = [item for state in states for item in state]


class Union(Operator):
    """Counts its rows in union list state: after a restore everybody gets all counts, and the first takes their sum."""

    __slots__ = ("counted",)

    def __init__(self, number: int, spec: StageSpec, index: int) -> None:
        super().__init__(number, spec, index)
        self.counted = 0

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        self.counted += 1
        self.forward(self.named(uid, edge), ts, key)

    def snapshot(self) -> int:
        return self.counted

    def restore(self, states: Iterable[int]) -> None:
        self.counted = sum(states) if self.index == 0 else 0


class Broadcast(Operator):
    """Passes rows on by a rule in broadcast state: every instance has the same one, whoever was there before."""

    __slots__ = ("rule",)

    def __init__(self, number: int, spec: StageSpec, index: int) -> None:
        super().__init__(number, spec, index)
        self.rule = mix(number)

    def snapshot(self) -> int:
        return self.rule

    def restore(self, states: Iterable[int]) -> None:
        self.rule = sum(states)
        check(self.rule == mix(self.number), f"stage {self.number}[{self.index}] has lost its broadcast state")


KINDS: dict[str, type[Operator]] = {"broadcast": Broadcast, "window": Window, "totals": Totals, "buffer": Buffer, "union": Union}


def operator(number: int, spec: StageSpec, index: int) -> Operator:
    return KINDS.get(spec.kind, Operator)(number, spec, index)
