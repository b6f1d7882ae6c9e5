"""Whether the stateful operators that Spark has planned can take the state of those that it had planned for a checkpoint.

Spark gives state to operators by their number, and values to an operator by their place. Whatever decides the meaning of a place
has to be the same: kinds, keys in their order, the columns of joins, and the conditions that Spark moves in front of an operator
although the query applies them behind it. What stands in front of an operator may change, as long as it is certain which state
goes where: operators of one shape, the sides of a join, and functions over columns must not have exchanged places.

Must not know Spark, nor the meaning of these texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dagster_checkpoints.state.metadata import PlannedInput, PlannedOperator


@dataclass(frozen=True, slots=True)
class PlannedDifference:
    """Why state does not fit: in words, with what is in the checkpoint and what is there now."""

    reason: str
    before: str
    now: str


def difference(before: Sequence[PlannedOperator], now: Sequence[PlannedOperator]) -> PlannedDifference | None:
    """The first difference with which Spark would take one state for another; None if there is none.

    Args:
        before: the operators of a stage in the checkpoint, in Spark's order.
        now: its present ones.
    """
    if len(before) != len(now):
        return PlannedDifference(
            "Spark plans another number of stateful operators for it", _listed(map(_named, before)), _listed(map(_named, now))
        )
    for old, new in zip(before, now, strict=True):
        found = _own_difference(old, new)
        if found is not None:
            return found
    shapes: dict[object, list[int]] = {}
    for number, each in enumerate(now):
        shapes.setdefault((each.kind, each.keys, each.bounds, each.pushed, *(side.columns for side in each.sides)), []).append(
            number
        )
    for places in shapes.values():
        if len(places) > 1 and _exchanged([_fed(before[n]) for n in places], [_fed(now[n]) for n in places]):
            return PlannedDifference(
                "it has operators of one shape, which only what stands in front of them tells apart, and that has changed for "
                "more than one: each might continue with the state of another one",
                *(_listed(_told_apart([_fed(each[n]) for n in places])) for each in (before, now)),
            )
    return None


def layout_difference(before: Sequence[PlannedOperator], now: Sequence[PlannedOperator]) -> PlannedDifference | None:
    """The first difference in the layout of state, for operators whose columns are traced through other queries.

    Args:
        before: the operators of a stage in a query that it shared with other stages.
        now: those of the same stage in a query of its own.
    """
    for old, new in zip(before, now, strict=False):
        for reason, had, has in (
            ("Spark plans another operator", old.kind, new.kind),
            ("Spark plans another number of keys", str(len(old.keys)), str(len(new.keys))),
            ("Spark applies other conditions in front of an operator", str(len(old.pushed)), str(len(new.pushed))),
        ):
            if had != has:
                return PlannedDifference(reason, f"{_named(old)}{_behind(old)}", f"{_named(new)}{_behind(new)}")
    if len(before) != len(now):
        return PlannedDifference(
            "Spark plans another number of operators", _listed(map(_named, before)), _listed(map(_named, now))
        )
    return None


def _own_difference(old: PlannedOperator, new: PlannedOperator) -> PlannedDifference | None:
    """The difference between an operator and the one that gets its state."""
    if (old.kind, len(old.sides)) != (new.kind, len(new.sides)):
        return PlannedDifference("Spark plans another operator", _named(old), _named(new))
    if old.keys != new.keys:
        return PlannedDifference("Spark plans another key for its state, or the same in another order", _named(old), _named(new))
    if old.bounds != new.bounds:
        return PlannedDifference("the times that its join keeps rows are others", _listed(old.bounds), _listed(new.bounds))
    if old.pushed != new.pushed:
        return PlannedDifference(
            "Spark applies a condition that the query has behind an operator in front of it, so that its state holds only the "
            "rows that met the condition",
            _behind(old).strip() or "none",
            _behind(new).strip() or "none",
        )
    if [side.columns for side in old.sides] != [side.columns for side in new.sides]:
        return PlannedDifference("Spark keeps other values in its state, or in another order", _values(old), _values(new))
    for side, other in zip(old.sides, new.sides, strict=True):
        if _swapped(side.origins, other.origins):
            return PlannedDifference(
                "columns in front of an operator have exchanged their names, and its values their places",
                _listed(side.origins),
                _listed(other.origins),
            )
    alike = len(new.sides) > 1 and len({_types(side) for side in new.sides}) == 1
    if alike and _exchanged(list(map(_origin, old.sides)), list(map(_origin, new.sides))):
        return PlannedDifference(
            "only what stands in front of them tells the sides of its join apart, and that has changed for both: each might "
            "continue with the rows of the other one",
            *(_listed(_told_apart(list(map(_origin, each.sides)))) for each in (old, new)),
        )
    return None


def _types(side: PlannedInput) -> tuple[str, ...]:
    """The types of the columns that a join keeps of a side; their names are the query's."""
    return tuple(column.rpartition(": ")[2] for column in side.columns)


def _exchanged(before: Sequence[frozenset[str]], now: Sequence[frozenset[str]]) -> bool:
    """Whether several of these have changed so that it is not certain which one is which.

    What all of them have in common does not count. One is certain if it keeps something that none of the others had or has, and
    if nothing of it is at another place now.
    """
    old, new = _distinct(before), _distinct(now)
    uncertain = []
    for place, (this, other) in enumerate(zip(old, new, strict=True)):
        others = frozenset().union(*(each for n, each in enumerate(new) if n != place))
        had = frozenset().union(*(each for n, each in enumerate(old) if n != place))
        if this != other and ((this - had) & others or not (this & other) - others - had):
            uncertain.append(place)
    return len({old[place] for place in uncertain}) > 1 and len({new[place] for place in uncertain}) > 1


def _distinct(these: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    common = frozenset.intersection(*these)
    return [each - common for each in these]


def _swapped(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether a value has moved to the place of another one, which is not there any more."""
    changed = [place for place, (this, other) in enumerate(zip(before, now, strict=False)) if this != other]
    return any(now[place] == before[other] for place in changed for other in changed if place != other)


def _fed(operator: PlannedOperator) -> frozenset[str]:
    """All that tells an operator from others of its shape."""
    if len(operator.sides) == 1:
        return _origin(operator.sides[0])
    return frozenset(
        f"{side} side {text}" for side, each in zip(("left", "right"), operator.sides, strict=True) for text in _origin(each)
    )


def _origin(side: PlannedInput) -> frozenset[str]:
    return frozenset((*side.steps, f"values {', '.join(side.origins)}"))


def _told_apart(these: Sequence[frozenset[str]]) -> Iterator[str]:
    for number, own in enumerate(_distinct(these), start=1):
        yield f"[{number}] {' and '.join(sorted(own)) or 'nothing of its own'}"


def _named(operator: PlannedOperator) -> str:
    return f"{operator.kind} by {', '.join(operator.keys) or 'nothing'}"


def _values(operator: PlannedOperator) -> str:
    return f"{_named(operator)}: {' and '.join(', '.join(side.columns) or 'nothing' for side in operator.sides)}"


def _behind(operator: PlannedOperator) -> str:
    return f" where {' AND '.join(operator.pushed)}" if operator.pushed else ""


def _listed(texts: Sequence[str] | Iterator[str] | map[str]) -> str:
    return ", ".join(texts) or "none"
