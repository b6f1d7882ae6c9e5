"""What an instance of a rescaled stage begins with. Must not know: pipelines, storage, Spark."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dagster_checkpoints.pipeline import total_rows
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.metadata import ChainMetadata, StageInstanceSnapshot, TaskSnapshot
from dagster_checkpoints.state.redistribution import deal_out_operator_states
from dagster_checkpoints.state.rescaling import least_watermark
from dagster_checkpoints.state.row_counts import rows_in_snapshot


def part_of(task: TaskSnapshot | None, stage: str) -> StageInstanceSnapshot:
    """The part of a stage in a task's snapshot; an empty one if the task has finished."""
    return task.stages.get(stage, StageInstanceSnapshot(rows_out=0)) if task is not None else StageInstanceSnapshot(rows_out=0)


def with_transactions(own: StageInstanceSnapshot, held: TaskSnapshot | None, tail: str) -> StageInstanceSnapshot:
    """An instance with the transactions of the sink of its index."""
    sink = part_of(held, tail)
    return msgspec.structs.replace(own, transactions=sink.transactions, transaction_files=sink.transaction_files)


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
    advance event time past that of an instance that is gone. An instance whose data has ended stays so under its name.

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
            f"The instances that {name!r} has now ({', '.join(map(repr, now))}) have ended in {where}, and those that read are "
            "gone: no instance would read the splits that are left. Give the source one of these again, or a new one."
        )
    shares = dict(zip(reading, dealt_out(name, old, len(reading)), strict=True)) if old else {}
    watermark = least_watermark(task.watermark for task in old)
    tasks = {}
    for new, origin in enumerate(origins):
        ended = chain.tasks.get(origin) if origin is not None else None
        if new in reading:
            task = TaskSnapshot({name: shares.get(new, StageInstanceSnapshot(rows_out=0))}, watermark=watermark)
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
