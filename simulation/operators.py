"""The operators of a simulated pipeline: they use every kind of state, so that a lost or repeated record changes the output.

An operator is one instance of one stage. It gets rows by `take`, emits them by `forward`, and gets event time by `advance`. Its
output must not depend on timing: `consistency` computes the same from the source records alone. The shipped functions
redistribute the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar

from dagster_checkpoints.state import rescaled_instances
from simulation.channels import mix, owner_of
from simulation.shapes import EDGES, StageSpec
from simulation.violations import Violation, check

Forward = Callable[[int, int, int], None]
WINDOW = 4
"""Length of a window in event time."""
FLUSHED_TS = 10**6
"""Event time of the rows that a stage emits only at its end: later than any window."""


class Operator:
    """Forwards rows under a new uid, which depends on the edge that they came by and on the static table."""

    at_start: ClassVar[Any] = None
    """The state at a new start."""

    def __init__(self, number: int, spec: StageSpec, index: int) -> None:
        self.number = number
        self.spec = spec
        self.index = index
        self.table = 0
        self.has_table = any(i.static for i in spec.inputs)
        self.forward: Forward
        self.watermark = 0
        self.finished = False
        self.held = copy(self.at_start)

    def named(self, uid: int, edge: int) -> int:
        uid = uid * EDGES + edge
        return mix(uid, self.table) if self.has_table else uid

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        self.forward(self.named(uid, edge), ts, key)

    def advance(self, watermark: int) -> None:
        self.watermark = watermark

    def finish(self) -> None:
        """No more rows: emit the rows that were held back."""

    def snapshot(self) -> Any:
        return None

    def restore(self, states: Sequence[Any]) -> None:
        """Restore this instance's share of the states of all instances; the state of a finished instance is None."""


class _Keyed(Operator):
    """Holds the number of rows, and the sum of their uids, under names that end with the key."""

    at_start: ClassVar[dict[tuple[int, ...], tuple[int, int]]] = {}

    def add(self, name: tuple[int, ...], uid: int) -> None:
        spec = self.spec
        keyed = spec.instances > 1 and any(i.keyed for i in spec.inputs)
        if keyed and owner_of(name[-1], spec.instances, spec.key_groups) != self.index:
            raise Violation(f"key {name[-1]} at instance {self.index} of stage {self.number}, which does not own it")
        count, total = self.held.get(name, (0, 0))
        self.held[name] = (count + 1, total + uid)

    def snapshot(self) -> Any:
        return self.held.copy()

    def restore(self, states: Sequence[Any]) -> None:
        self.held = dict(states[self.index] or {})


class Window(_Keyed):
    """Counts the rows of each key and window, and emits the count once event time has passed the window's end."""

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        window = ts // WINDOW
        if (window + 1) * WINDOW <= self.watermark:
            raise Violation(f"late: a row of {ts} at stage {self.number}[{self.index}], where event time is {self.watermark}")
        self.add((window, key), self.named(uid, edge))

    def advance(self, watermark: int) -> None:
        self.watermark = watermark
        for name in sorted(w for w in self.held if (w[0] + 1) * WINDOW <= watermark):
            window, key = name
            self.forward(mix(self.number, *name, *self.held.pop(name)), (window + 1) * WINDOW - 1, key)


class Totals(_Keyed):
    """Forwards rows, and emits at the end the count of each key."""

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        uid = self.named(uid, edge)
        self.add((key,), uid)
        self.forward(uid, ts, key)

    def finish(self) -> None:
        for name in sorted(self.held):
            self.forward(mix(self.number, *name, *self.held[name]), FLUSHED_TS, *name)
        self.held = {}


class Buffer(Operator):
    """Holds every row back until the end, in list state; emits them then, and does not clear the list."""

    at_start: ClassVar[list[tuple[int, int]]] = []

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        self.held.append((self.named(uid, edge), key))

    def finish(self) -> None:
        for uid, key in self.held:
            self.forward(uid, FLUSHED_TS, key)

    def snapshot(self) -> dict[str, tuple[tuple[int, int], ...]]:
        return {"held": tuple(self.held)}

    def restore(self, states: Sequence[Any]) -> None:
        self.held = rescaled_instances.redistribute_lists(states, self.spec.instances)[self.index].get("held", [])


class Union(Operator):
    """Counts its rows in union list state: after a restore each instance gets all counts, and the first takes their sum."""

    at_start = 0

    def take(self, uid: int, ts: int, key: int, edge: int) -> None:
        self.held += 1
        self.forward(self.named(uid, edge), ts, key)

    def snapshot(self) -> dict[str, list[int]]:
        return {"counts": [self.held]}

    def restore(self, states: Sequence[Any]) -> None:
        counts = rescaled_instances.redistribute_unions(states, self.spec.instances)[self.index].get("counts", ())
        self.held = sum(counts) if self.index == 0 else 0


class Broadcast(Operator):
    """Forwards rows; holds a rule in broadcast state, which every instance has, also after rescaling."""

    def snapshot(self) -> dict[str, int]:
        return {"rule": mix(self.number)}

    def restore(self, states: Sequence[Any]) -> None:
        share = rescaled_instances.redistribute_broadcasts(states, self.spec.instances)[self.index]
        check(share == self.snapshot(), f"stage {self.number}[{self.index}] has lost its broadcast state")


KINDS: dict[str, type[Operator]] = {"broadcast": Broadcast, "window": Window, "totals": Totals, "buffer": Buffer, "union": Union}


def operator(number: int, spec: StageSpec, index: int) -> Operator:
    return KINDS.get(spec.kind, Operator)(number, spec, index)
