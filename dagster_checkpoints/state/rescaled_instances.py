"""What an instance of a rescaled stage begins with, how state is dealt out, and what is left of instances that are gone.

Sinks know instances by their index: the transactions and rows of an instance that is gone belong to the job all the same. Must
not know: storage, Spark, how keyed state is moved.

Operator state is dealt out from the states of the old instances, in order, None for one that has finished: it contributes
nothing. The state of an instance is given by name; items are opaque. Of keyed state an instance takes the keys of its groups
(`rescaled_checkpoint`); a source has one enumerator per stage, whose state is not distributed.

Source: PROTOCOL 8.3; Flink's RoundRobinOperatorStateRepartitioner and StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from dagster_checkpoints.pipeline import total_rows
from dagster_checkpoints.state.errors import InstancesChanged, UnknownStage
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint, KeyedStateShare, SettledInstance, quoted
from dagster_checkpoints.state.key_groups import chosen_max_parallelism, key_groups_of
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    OperatorState,
    QuerySnapshot,
    StageInstanceSnapshot,
    TaskSnapshot,
)
from dagster_checkpoints.state.rescaled_channels import least_watermark
from dagster_checkpoints.state.row_counts import rows_in_snapshot

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


def part_of(task: TaskSnapshot | None, stage: str) -> StageInstanceSnapshot:
    """The part of a stage in a task's snapshot; an empty one if the task has finished."""
    return task.stages.get(stage, StageInstanceSnapshot(rows_out=0)) if task is not None else StageInstanceSnapshot(rows_out=0)


def with_transactions(own: StageInstanceSnapshot, held: TaskSnapshot | None, tail: str) -> StageInstanceSnapshot:
    """An instance with the transactions of the sink of its index, and what that had committed."""
    sink = part_of(held, tail)
    return msgspec.structs.replace(
        own, transactions=sink.transactions, transaction_files=sink.transaction_files, committed=sink.committed
    )


def has_ended(task: TaskSnapshot | None) -> bool:
    """Whether an instance has finished (None), or waits behind the end of its data: it emits no more rows.

    The one that waits has nothing left to do but to commit: the checkpoint was triggered after its `finish`.
    """
    return task is None or task.end_of_data == "drain"


def dealt_out(stage: str, old: Sequence[TaskSnapshot | None], parallelism: int) -> list[StageInstanceSnapshot]:
    """The parts of a stage's new instances; the first one counts the rows of the instances that are gone.

    Instances that have ended leave no items of lists: `finish` has emitted what they stood for, and would emit it again. What
    every instance holds or sees is left: broadcasts, and the items of a union of an instance that waits.

    Args:
        stage: name of the stage.
        old: by old instance, its snapshot; None for one that has finished.
        parallelism: the new number of instances.
    """
    held = [part_of(task, stage) for task in old]
    kept = [
        tuple(state for state in part.operator_states if state.kind != "list" or not has_ended(task))
        for part, task in zip(held, old, strict=True)
    ]
    states = deal_out_operator_states(kept, parallelism)
    running = (part for part, task in zip(held, old, strict=True) if not has_ended(task))
    described = next((part for part in running if part.state_plan is not None), StageInstanceSnapshot())
    gone = held[parallelism:]
    rows = [rows_in_snapshot(task, stage) if task is not None else 0 for task in old]
    return [
        StageInstanceSnapshot(
            operator_states=states[index],
            rows_out=total_rows([*rows[index : index + 1], *(rows[parallelism:] if index == 0 else ())]),
            late_rows=(held[index].late_rows if index < len(held) else 0) + (sum(g.late_rows for g in gone) if index == 0 else 0),
            state_plan=described.state_plan,
            planned=described.planned,
        )
        for index in range(parallelism)
    ]


def with_shared_splits(
    chain: ChainMetadata, origins: Sequence[int | None], now: Sequence[str], where: str
) -> dict[int, TaskSnapshot]:
    """The tasks of a split source whose instances have changed, by present instance.

    Its enumerator assigns all splits again that are not finished, in their order: an instance that went on with its own one would
    advance event time past that of an instance that is gone. An instance whose data has ended stays so under its name. If
    that of all has ended, the new ones have none either: their readers are at the end of event time.

    Args:
        chain: the source's chain.
        origins: by present instance, the old one of its name; None for a new one.
        now: the names of the present instances.
        where: the checkpoint, for the error.

    Raises:
        InstancesChanged: no instance is left that reads splits.
    """
    name, running = chain.name, {index for index, task in chain.tasks.items() if task.end_of_data != "drain"}
    old = [chain.tasks[index] for index in sorted(running)]
    reading = [new for new, origin in enumerate(origins) if origin is None or origin in running]
    if old and not reading:
        raise InstancesChanged(
            f"The instances that {name!r} has now ({quoted(now)}) have ended in {where}, and those that read are "
            "gone: no instance would read the splits that are left. Give the source one of these again, or a new one."
        )
    shares = dict(zip(reading, dealt_out(name, old, len(reading)), strict=True)) if old else {}
    watermark = least_watermark(task.watermark for task in old or chain.tasks.values())
    tasks = {}
    for new, origin in enumerate(origins):
        ended = chain.tasks.get(origin) if origin is not None else None
        if new in reading:
            stages = {name: shares.get(new, StageInstanceSnapshot(rows_out=0))}
            task = TaskSnapshot(stages, end_of_data="none" if old else "drain", watermark=watermark)
        elif ended is not None:
            task = ended
        else:
            continue
        part = with_transactions(part_of(task, name), chain.tasks.get(new), name)
        tasks[new] = msgspec.structs.replace(task, stages={name: part})
    return tasks


def holds_state(chain: ChainMetadata, tasks: Sequence[TaskSnapshot], where: str) -> bool:
    """Whether the query of the chain has stateful operators.

    Raises:
        InstancesChanged: the release that took the checkpoint did not record it.
    """
    plans = [task.stages[name].state_plan for task in tasks if task.query is not None for name in task.stages]
    if None in plans:
        raise InstancesChanged(
            f"The instances of {chain.name!r} have changed, or those of a stage that it reads, and {where} does not say whether "
            "it keeps state: an earlier release took it. Restore it with the same instances, take a savepoint, and restore that."
        )
    return any(plans)


def keyed_state_shares(
    old: Sequence[TaskSnapshot | None],
    ran: Mapping[int, QuerySnapshot],
    parallelism: int,
    groups: int,
    key: str,
    *,
    whole_partitions: bool,
) -> dict[int, KeyedStateShare]:
    """By index of a new instance, its share.

    All instances continue one query, that with the earliest watermark: a later one would make rows late that are not. But where
    each gets whole partitions of one old instance, it continues the query of that instance, whose partitions stay as they are.
    An instance that would get whole partitions, and none of whose old instances has state, has no share: it begins a new query.

    Args:
        old: by old instance, its snapshot; None for one that has ended.
        ran: by old instance that has not ended and whose query has run a batch, the query; at least one.
        parallelism: the new number of instances.
        groups: the number of key groups.
        key: the column by which rows are routed.
        whole_partitions: whether each key group is a state partition.
    """
    held = {index: key_groups_of(index, len(old), groups) for index in range(len(old))}
    own_query = whole_partitions and parallelism % len(old) == 0
    earliest = min(ran, key=lambda i: (_event_time(old[i]), i))
    shares = {}
    for index in range(parallelism):
        own = key_groups_of(index, parallelism, groups)
        parts = {i: query for i, query in ran.items() if set(held[i]) & set(own)}
        if parts or not whole_partitions:
            continued = next(iter(parts)) if own_query else earliest
            shares[index] = KeyedStateShare(own, groups, key, continued, parts, held, whole_partitions)
    return shares


def _event_time(task: TaskSnapshot | None) -> float:
    return float("-inf") if task is None or task.valve_watermark is None else task.valve_watermark


def removed_instances(checkpoint: FittedCheckpoint) -> Iterator[SettledInstance]:
    """The instances beyond the number that a stage has now: sinks know instances by their index."""
    for chain in checkpoint.metadata.chains:
        tail = checkpoint.recorded[chain.stages[-1]]
        most = max(tail.parallelism, tail.most_instances)
        for index in range(len(checkpoint.instances[tail.name]) if tail.name in checkpoint.instances else most, most):
            name = tail.instances[index] if index < tail.parallelism else str(index)
            yield SettledInstance(tail.name, index, name, most, part_of(chain.tasks.get(index), tail.name))


def instances_of_finished_ones(before: CheckpointMetadata, now: CheckpointMetadata) -> Iterator[SettledInstance]:
    """The instances whose number an instance has now that had finished: it has no task, which would commit their transactions.

    Args:
        before: the checkpoint as it was taken.
        now: the checkpoint with the present instances.
    """
    stages = {stage.name: stage for stage in before.stages}
    for old, new in zip(before.chains, now.chains, strict=True):
        tail = stages[old.stages[-1]]
        parallelism = next(stage.parallelism for stage in now.stages if stage.name == tail.name)
        for index, task in old.tasks.items():
            if index < parallelism and index not in new.tasks:
                yield SettledInstance(tail.name, index, tail.instances[index], parallelism, part_of(task, tail.name))


def note_instances(checkpoint: CheckpointMetadata, most_instances: dict[str, int]) -> None:
    """Note how many instances the stages of a retained checkpoint have or have had.

    Args:
        checkpoint: the checkpoint.
        most_instances: by stage, the largest number that is known; it is changed.
    """
    for stage in checkpoint.stages:
        most_instances[stage.name] = max(stage.parallelism, stage.most_instances, most_instances.get(stage.name, 0))


def with_known_instances(checkpoint: CheckpointMetadata, most_instances: Mapping[str, int]) -> CheckpointMetadata:
    """The checkpoint, which knows of instances that later ones have had: if it is restored, their sinks take their rows back.

    Args:
        checkpoint: the checkpoint that is restored.
        most_instances: what :func:`note_instances` has noted of the retained checkpoints.
    """
    stages = (
        msgspec.structs.replace(each, most_instances=max(each.most_instances, most_instances.get(each.name, 0)))
        for each in checkpoint.stages
    )
    return msgspec.structs.replace(checkpoint, stages=tuple(stages))


def with_most_instances(checkpoint: FittedCheckpoint) -> CheckpointMetadata:
    """The checkpoint, with the largest number of instances of stages that have fewer now."""
    stages = []
    for stage in checkpoint.metadata.stages:
        most = max(stage.parallelism, stage.most_instances)
        now = len(checkpoint.instances.get(stage.name, ()))
        stages.append(msgspec.structs.replace(stage, most_instances=most if most > now else 0))
    return msgspec.structs.replace(checkpoint.metadata, stages=tuple(stages))
