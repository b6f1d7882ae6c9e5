"""Whether the plan of a query still fits its state and its offsets in a checkpoint.

Plans are compared as text: the stateful operators of each stage, as they are declared and as Spark has planned them
(`difference`), and the streaming sources of the query in Spark's order. Must not know Spark, nor the meaning of these
texts.

The operators that Spark has planned must be able to take the state of those that it had planned for the checkpoint. Spark gives
state to operators by their number, and values to an operator by their place. Whatever decides the meaning of a place has to be
the same: kinds, keys in their order, the columns of joins, and the conditions that Spark moves in front of an operator although
the query applies them behind it. What stands in front of an operator may change, as long as it is certain which state goes where:
operators of one shape, the sides of a join, and functions over columns must not have exchanged places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagster_checkpoints.state.errors import SourcesChanged, StatefulPlanChanged
from dagster_checkpoints.state.metadata import PlannedInput, PlannedOperator, TaskSnapshot
from dagster_checkpoints.state.processor_states import fits_states
from dagster_checkpoints.state.spark_versions import in_oldest_words


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


IN_STATE = "; in state: "
"""In front of the end of an operator's text, which says what Spark's optimizer leaves in its state. It is missing
in checkpoints of earlier releases, and where it is not known."""

_REMEDY = (
    "Take the change back; or end the old pipeline with a drain, which emits and commits all that it holds, and begin with the "
    "new plan as a new start (restore_from: none)"
)


def check_stateful_plans(
    snapshot: TaskSnapshot,
    operators: Mapping[str, Sequence[str]],
    instance: str,
    locations: Mapping[str, object],
    where: str,
    planned: Mapping[str, Sequence[PlannedOperator]] | None = None,
    *,
    traced: bool = True,
) -> None:
    """Check that the stateful operators of each stage are those whose state the checkpoint holds.

    A ``transformWithState`` processor may declare other states where Spark reads the old ones with them
    (:mod:`processor_states`). A query that has run no batch has no state, and a checkpoint of a release that did not record
    plans is not compared.

    Args:
        snapshot: the snapshot of the task.
        operators: by stage, its present stateful operators.
        instance: name of the task's instance, for the error.
        locations: by stage, the location of its function in the source code, for the error.
        where: the checkpoint, for the error.
        planned: by stage, the operators that Spark plans for it now; None if they are not known.
        traced: whether their columns are traced to the sources, as in the checkpoint. If not, and where a fused source has ended,
            for which another stream stands in, only the layout of the state is compared.

    Raises:
        StatefulPlanChanged: names the stage and its operators, in the checkpoint and now.
    """
    if snapshot.query is None:
        return
    compare = difference if traced and not snapshot.ended_sources else layout_difference
    for stage, now in operators.items():
        before = snapshot.stages[stage].state_plan if stage in snapshot.stages else None
        changed = None
        if before is not None and not _fits(before, now):
            changed = f"  In the checkpoint: {_shown(before, now)}\n  Now: {_shown(now, before)}{_hint(before, now)}"
        elif (found := _planned_difference(snapshot, stage, planned, compare)) is not None:
            changed = f"  In the checkpoint: {found.before}\n  Now: {found.now}\nThe stage declares the same, but {found.reason}."
        if changed is not None:
            raise StatefulPlanChanged(
                f"Stage {stage!r} (instance {instance!r}, {locations.get(stage, 'defined elsewhere')}) keeps other state than in "
                f"{where}.\n{changed}\n"
                "Spark would continue with the old state under the new plan, and the rows of both would be in one output. "
                f"{_REMEDY}; or take the risk with allow_changed_plan: true."
            )


def check_divided_plans(
    snapshot: TaskSnapshot,
    operators: Mapping[str, Sequence[str]],
    instance: str,
    locations: Mapping[str, object],
    where: str,
    planned: Mapping[str, Sequence[PlannedOperator]] | None = None,
) -> None:
    """Check that each stage has as many stateful operators in its own query as it had in the recorded one, which was divided.

    A stage that uses its input twice repeats the operators in front of it. Arguments as of :func:`check_stateful_plans`.

    Raises:
        StatefulPlanChanged: names the stage and its operators, in the checkpoint and now.
    """
    for stage, now in operators.items():
        before = snapshot.stages[stage].state_plan if stage in snapshot.stages else None
        if snapshot.query is None or before is None:
            continue
        changed = None
        if len(before) != len(now) or not all(map(_keeps_the_same, before, now)):
            changed = f"  In the checkpoint: {_shown(before, now)}\n  Now: {_shown(now, before)}"
        elif (found := _planned_difference(snapshot, stage, planned, layout_difference)) is not None:
            changed = f"  In the checkpoint: {found.before}\n  Now: {found.now}\n{found.reason}."
        if changed is not None:
            raise StatefulPlanChanged(
                f"Stage {stage!r} (instance {instance!r}, {locations.get(stage, 'defined elsewhere')}) shared a query with other "
                f"stages in {where}, and gets one of its own now, in which it has other stateful operators, or keeps other "
                f"columns in their state.\n{changed}\nThe state cannot be divided. {_REMEDY}."
            )


def check_sources(snapshot: TaskSnapshot, sources: Sequence[str], stage: str, instance: str, where: str) -> None:
    """Check that the streaming sources of a query are those whose offsets the checkpoint holds, in the same order.

    Args:
        snapshot: the snapshot of the task.
        sources: the present sources of the query, in Spark's order.
        stage: name of the first stage of the chain, which reads them.
        instance: name of the task's instance.
        where: the checkpoint, for the error.

    Raises:
        SourcesChanged: names the stage, the sources of the checkpoint and the present ones.
    """
    before = snapshot.query.sources if snapshot.query is not None else None
    # Empty: a part of a query that was divided, which has read none of its sources.
    if not before or before == tuple(sources):
        return
    risk = "; or take the risk with allow_changed_plan: true" if len(before) == len(sources) else ""
    raise SourcesChanged(
        f"Stage {stage!r} (instance {instance!r}) {_difference(before, sources)}.\n  In {where}: {_numbered(before)}\n  Now: "
        f"{_numbered(sources)}\nSpark keeps the offsets of a query's sources by their number, so each would continue where "
        f"another one had stopped. {_REMEDY}{risk}. A source that is to be added or removed without a new start needs a stage "
        "of its own."
    )


def _fits(before: Sequence[str], now: Sequence[str]) -> bool:
    return len(before) == len(now) and all(
        (_declared(this) == _declared(other) or fits_states(this, other)) and _keeps_the_same(this, other)
        for this, other in zip(map(in_oldest_words, before), map(in_oldest_words, now), strict=True)
    )


def _planned_difference(
    snapshot: TaskSnapshot,
    stage: str,
    planned: Mapping[str, Sequence[PlannedOperator]] | None,
    compare: Callable[[Sequence[PlannedOperator], Sequence[PlannedOperator]], PlannedDifference | None],
) -> PlannedDifference | None:
    """How the planned operators of a stage differ from those in a checkpoint; None if they do not, or if these are not known."""
    before = snapshot.stages[stage].planned if stage in snapshot.stages else None
    if before is None or planned is None:
        return None
    return compare(before, planned[stage])


def _declared(operator: str) -> str:
    return operator.partition(IN_STATE)[0]


def _keeps_the_same(before: str, now: str) -> bool:
    """Whether the same columns and values are in the state of an operator, as far as that is known."""
    old, new = before.partition(IN_STATE)[2], now.partition(IN_STATE)[2]
    return not old or not new or old == new


def _hint(before: Sequence[str], now: Sequence[str]) -> str:
    if list(map(_declared, before)) != list(map(_declared, now)):
        return ""
    return (
        "\nThe operators are the same, but the columns that are selected behind them, and their order, decide what Spark keeps "
        "in their state (functions are numbered as they are declared)."
    )


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    if sorted(before) == sorted(now):
        return "reads its sources in another order"
    if len(before) != len(now):
        return f"reads {len(now)} streaming source{'' if len(now) == 1 else 's'}, and in the checkpoint {len(before)}"
    return "reads other streaming sources"


def _numbered(sources: Sequence[str]) -> str:
    return ", ".join(f"[{number}] {source}" for number, source in enumerate(sources)) or "none"


def _shown(these: Sequence[str], others: Sequence[str]) -> str:
    """The operators in which the two differ; all operators if one has more than the other."""
    if len(these) == len(others):
        these = [this for this, other in zip(these, others, strict=True) if this != other]
    return " / ".join(these) or "no state"
