"""The numbers of rows that a checkpoint records of its stages; None for a number that it does not record.

A release that did not count the rows of stages inside a query wrote no number for them.
"""

from __future__ import annotations

from dagster_checkpoints.pipeline import total_rows
from dagster_checkpoints.state.metadata import CheckpointMetadata, StageMetadata, TaskSnapshot


def rows_in_snapshot(task: TaskSnapshot, stage: str) -> int | None:
    """The number of rows that a stage had emitted in a task's snapshot; 0 if the snapshot has no such stage."""
    held = task.stages.get(stage)
    if held is None:
        return 0
    counted = stage == next(reversed(task.stages)) or any(stage == source.source for source in task.fused)
    return 0 if held.rows_out is None and counted else held.rows_out


def rows_of_stage(metadata: CheckpointMetadata, stage: StageMetadata) -> int | None:
    """The number of rows that all instances of a stage had emitted, finished ones included."""
    ends_chain = any(chain.stages[-1] == stage.name for chain in metadata.chains)
    return 0 if stage.rows is None and ends_chain else stage.rows


def rows_of_finished(metadata: CheckpointMetadata) -> dict[str, int | None]:
    """By stage, the number of rows of its finished tasks, also of those that the pipeline does not have now; not if it is 0."""
    found: dict[str, int | None] = {}
    for stage in metadata.stages:
        total = rows_of_stage(metadata, stage)
        tasks = (task for chain in metadata.chains if stage.name in chain.stages for task in chain.tasks.values())
        running = total_rows(rows_in_snapshot(task, stage.name) for task in tasks)
        if total is None or running is None:
            found[stage.name] = None if stage.fully_finished or stage.finished else 0
        else:
            found[stage.name] = total - running
    return {name: rows for name, rows in found.items() if rows != 0}
