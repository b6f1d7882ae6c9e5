"""The distribution of state over the instances of a stage at a restore.

The arguments are the states of the old instances, in order, None for one that has finished: it contributes
nothing. The state of an instance is given by name; items are opaque. Of keyed state an instance takes the keys of its groups
(`rescaled_checkpoint`); a source has one enumerator per stage, whose state is not distributed. Must not know: the metadata
format, except for `redistribute_operator_states`.

Source: PROTOCOL 8.3; Flink's RoundRobinOperatorStateRepartitioner and StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from dagster_checkpoints.state.errors import UnknownStage
from dagster_checkpoints.state.key_groups import chosen_max_parallelism
from dagster_checkpoints.state.metadata import CheckpointMetadata, OperatorState

T = TypeVar("T")
Lists = Mapping[str, Sequence[T]]


def redistribute_lists(instances: Sequence[Lists[T] | None], parallelism: int) -> list[dict[str, list[T]]]:
    """Split each list state evenly, its items in order; if the number of instances is unchanged, each keeps its own.

    The instances that get one item more of a state follow those of the state before, so that they are not always the same.
    """
    if parallelism == len(instances):
        return [{name: list(items) for name, items in (states or {}).items()} for states in instances]
    result: list[dict[str, list[T]]] = [{} for _ in range(parallelism)]
    start = 0
    for name, items in _concatenated(instances).items():
        size, remainder = divmod(len(items), parallelism)
        position = 0
        for step in range(parallelism):
            end = position + size + (step < remainder)
            result[(start + step) % parallelism][name] = items[position:end]
            position = end
        start = (start + remainder) % parallelism
    return result


def redistribute_unions(instances: Sequence[Lists[T] | None], parallelism: int) -> list[dict[str, list[T]]]:
    """Give all items to every instance, also if the number of instances is unchanged."""
    everything = _concatenated(instances)
    return [{name: list(items) for name, items in everything.items()} for _ in range(parallelism)]


def redistribute_broadcasts(instances: Sequence[Mapping[str, T] | None], parallelism: int) -> list[dict[str, T]]:
    """Give one copy to each instance: its own if it has one, otherwise another instance's, since all are equal."""
    first: dict[str, T] = {}
    for states in instances:
        for name, copy in (states or {}).items():
            first.setdefault(name, copy)
    own = [*instances[:parallelism], *[None] * (parallelism - len(instances))]
    return [{**first, **(states or {})} for states in own]


def redistribute_operator_states(
    metadata: CheckpointMetadata, stage: str, parallelism: int
) -> tuple[tuple[OperatorState, ...], ...]:
    """By new instance of a stage, the operator states that it is restored with.

    Raises:
        UnknownStage: the checkpoint does not hold the stage.
        ParallelismTooHigh: there are more instances than the key groups that the checkpoint fixes.
    """
    recorded = next((known for known in metadata.stages if known.name == stage), None)
    if recorded is None:
        raise UnknownStage(
            f"Checkpoint {metadata.checkpoint_id} of pipeline {metadata.pipeline!r} holds no stage {stage!r}, but "
            f"{', '.join(repr(known.name) for known in metadata.stages) or 'none at all'}. A new stage starts without state."
        )
    if recorded.max_parallelism:
        chosen_max_parallelism(stage, parallelism, None, recorded.max_parallelism)
    tasks = next(chain.tasks for chain in metadata.chains if stage in chain.stages)  # each stage is in one: see metadata_file
    held: list[tuple[OperatorState, ...] | None] = [None] * recorded.parallelism
    for index, task in tasks.items():
        if stage in task.stages and index not in recorded.finished:
            held[index] = task.stages[stage].operator_states
    lists = redistribute_lists(_by_name(held, "list"), parallelism)
    unions = redistribute_unions(_by_name(held, "union"), parallelism)
    broadcasts = redistribute_broadcasts(_by_name(held, "broadcast"), parallelism)
    return tuple(
        (*_states("list", lists[i]), *_states("union", unions[i]), *_states("broadcast", broadcasts[i]))
        for i in range(parallelism)
    )


def deal_out_operator_states(
    instances: Sequence[tuple[OperatorState, ...]], parallelism: int
) -> tuple[tuple[OperatorState, ...], ...]:
    """By new instance, the operator states that are its own: items of lists and unions dealt out, broadcasts as they were.

    A union is dealt out here, because a checkpoint holds each item once; the instances that are restored see all of them.

    Args:
        instances: by old instance, its states.
        parallelism: the new number of instances.
    """
    lists = redistribute_lists(_by_name(instances, "list"), parallelism)
    unions = redistribute_lists(_by_name(instances, "union"), parallelism)
    broadcasts = redistribute_broadcasts(_by_name(instances, "broadcast"), parallelism)
    return tuple(
        (*_states("list", lists[i]), *_states("union", unions[i]), *_states("broadcast", broadcasts[i]))
        for i in range(parallelism)
    )


Kind = Literal["list", "union", "broadcast"]


def _by_name(instances: Sequence[tuple[OperatorState, ...] | None], kind: Kind) -> list[dict[str, tuple[bytes, ...]] | None]:
    return [None if states is None else {s.name: s.items for s in states if s.kind == kind} for states in instances]


def _states(kind: Kind, states: Mapping[str, Iterable[bytes]]) -> tuple[OperatorState, ...]:
    return tuple(OperatorState(name, kind, tuple(items)) for name, items in states.items())


def _concatenated(instances: Sequence[Lists[T] | None]) -> dict[str, list[T]]:
    """The items of all instances in their order; the states in the order in which they first appear."""
    items: dict[str, list[T]] = {}
    for states in instances:
        for name, held in (states or {}).items():
            items.setdefault(name, []).extend(held)
    return items
