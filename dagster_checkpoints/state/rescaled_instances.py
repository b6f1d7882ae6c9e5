"""What an instance of a rescaled stage begins with. Must not know: pipelines, storage, Spark."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.metadata import ChainMetadata, StageInstanceSnapshot, TaskSnapshot
from dagster_checkpoints.state.redistribution import deal_out_operator_states


def part_of(task: TaskSnapshot | None, stage: str) -> StageInstanceSnapshot:
    """The part of a stage in a task's snapshot; an empty one if the task has finished."""
    return task.stages.get(stage, StageInstanceSnapshot()) if task is not None else StageInstanceSnapshot()


def with_transactions(own: StageInstanceSnapshot, held: TaskSnapshot | None, tail: str) -> StageInstanceSnapshot:
    """An instance with the transactions of the sink of its index."""
    sink = part_of(held, tail)
    return msgspec.structs.replace(own, transactions=sink.transactions, transaction_files=sink.transaction_files)


def dealt_out(stage: str, old: Sequence[TaskSnapshot], parallelism: int) -> list[StageInstanceSnapshot]:
    """The parts of a stage's new instances; the first one counts the rows of the instances that are gone."""
    held = [part_of(task, stage) for task in old]
    states = deal_out_operator_states([each.operator_states for each in held], parallelism)
    gone = held[parallelism:]
    return [
        StageInstanceSnapshot(
            operator_states=states[index],
            rows_out=(held[index].rows_out if index < len(held) else 0) + (sum(g.rows_out for g in gone) if index == 0 else 0),
            late_rows=(held[index].late_rows if index < len(held) else 0) + (sum(g.late_rows for g in gone) if index == 0 else 0),
            state_plan=held[0].state_plan,
        )
        for index in range(parallelism)
    ]


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
