"""Whether the plan of a query still fits its state and its offsets in a checkpoint.

Plans are compared as text: the stateful operators of each stage, as they are declared and as Spark has planned them
(:mod:`planned_operators`), and the streaming sources of the query in Spark's order. Must not know Spark, nor the meaning of these
texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dagster_checkpoints.state.errors import SourcesChanged, StatefulPlanChanged
from dagster_checkpoints.state.metadata import PlannedOperator, TaskSnapshot
from dagster_checkpoints.state.planned_operators import PlannedDifference, difference, layout_difference
from dagster_checkpoints.state.processor_states import fits_states
from dagster_checkpoints.state.spark_versions import in_oldest_words

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
