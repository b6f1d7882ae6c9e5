"""The inputs of stages: their record in a checkpoint, and the changes that a restore refuses.

The state of an instance depends on the rows that it has read, and so on key, pattern and input. Must not know: storage, Spark,
tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dagster_checkpoints.state.errors import InputsChanged
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.metadata import ChannelSnapshot, InputMetadata, Segment, TaskSnapshot
from dagster_checkpoints.state.views import EdgeView, PipelineView


def recorded_inputs(pipeline: PipelineView) -> dict[str, tuple[InputMetadata, ...]]:
    """The record of the inputs of each stage, in their order."""
    inputs: dict[str, list[InputMetadata]] = {stage.name: [] for stage in pipeline.stages}
    for edge in pipeline.edges:
        inputs[edge.target].append(_recorded(edge))
    return {name: tuple(found) for name, found in inputs.items()}


def check_inputs(checkpoint: FittedCheckpoint) -> None:
    """Check that each stage of the checkpoint reads the same stages as then, in the same way; a rule of a restore.

    A fully finished stage does not read any more, so its inputs may change.

    Raises:
        InputsChanged: names the stage and its changed inputs, in the checkpoint and in the pipeline.
    """
    now = recorded_inputs(checkpoint.pipeline)
    for name, inputs in now.items():
        known = checkpoint.recorded.get(name)
        if known is None or known.fully_finished or known.inputs is None:
            continue
        changes = _changes(known.inputs, inputs)
        if changes:
            raise InputsChanged(
                f"Stage {name!r} does not read its inputs as in {checkpoint.where}: {'; '.join(changes)}. Its state, and the "
                "records on their way to it, belong to the inputs of the checkpoint: with others, rows that belong together "
                "would meet in different instances, or not at all. Restore the inputs as they were; or end the old pipeline with "
                "a drain, which emits and commits all that it holds, and begin with the new inputs as a new start "
                "(restore_from: none)."
            )
    _check_refused_rows(checkpoint)


def _check_refused_rows(checkpoint: FittedCheckpoint) -> None:
    """Check that a stage of refused rows gets no records that were on their way to a stage of its name that read all rows."""
    for chain in checkpoint.metadata.chains:
        if chain.stages[0] in checkpoint.stages_of_refused_rows and any(map(_awaits_rows, chain.tasks.values())):
            raise InputsChanged(
                f"Stage {chain.stages[0]!r} commits the rows that a quarantine refuses, and expected none on their way to it in "
                f"{checkpoint.where}, since no barrier overtakes them. Found some: a stage of this name has read all rows of the "
                "stage in front, and those that pass would be committed as refused ones. Suspend the old pipeline, or request a "
                "savepoint of it, and restore that: a savepoint holds no rows on their way."
            )


def _awaits_rows(task: TaskSnapshot) -> bool:
    return any(map(_has_rows, task.channels))


def _has_rows(channel: ChannelSnapshot) -> bool:
    return any(isinstance(element, Segment) for element in channel.in_flight)


def check_waiting_columns(
    snapshot: TaskSnapshot, reads: Mapping[str, str], before: Mapping[str, str], now: Mapping[str, str], stage: str, where: str
) -> None:
    """Check that no column has another name now than in the records that a task has in front of it, or as a static input.

    A column that these records do not have is null in them. So it has to be for one that the stage in front has got since then.
    If it has lost one as well, the new one may hold what the records have under the old name.

    Args:
        snapshot: the snapshot of the task.
        reads: by input channel, the stage in front.
        before: by stage, the schema of its rows in the checkpoint, in Spark's JSON form; "" if it is not known.
        now: by stage, the schema of its rows in the pipeline.
        stage: name of the stage that reads them.
        where: the checkpoint, for the error.

    Raises:
        InputsChanged: names both stages and the columns.
    """
    waiting = {reads[saved.channel] for saved in snapshot.channels if saved.channel in reads and _has_rows(saved)}
    waiting |= {table.input for table in snapshot.static if table.segments}
    for name in sorted(each for each in waiting if before.get(each)):
        known, present = (set(_columns(json.loads(schema))) for schema in (before[name], now[name]))
        lost, new = sorted(known - present), sorted(present - known)
        if lost and new:
            raise InputsChanged(
                f"Stage {stage!r} has rows of {name!r} in {where} that are still to be read. They have the columns "
                f"{', '.join(lost)}; {name!r} has {', '.join(new)} instead now, which would be null in these rows. Keep the old "
                f"names in {name!r}, and rename the columns in {stage!r}; or, if {name!r} is read as a stream, restore a "
                "savepoint, which holds no rows on their way."
            )


def _columns(kind: Any, path: str = "") -> Iterator[str]:
    """The paths of the columns of a type of Spark's, as JSON, that hold no others."""
    if isinstance(kind, str):
        yield path
        return
    inner = {field["name"]: field["type"] for field in kind.get("fields", ())}
    inner |= {part: kind[f"{part}Type"] for part in ("element", "key", "value") if f"{part}Type" in kind}
    for name, below in inner.items():
        yield from _columns(below, f"{path}.{name}" if path else name)


def _recorded(edge: EdgeView) -> InputMetadata:
    return InputMetadata(edge.source, edge.input.mode, edge.pattern.value, edge.input.key or "")


def _changes(before: tuple[InputMetadata, ...], now: tuple[InputMetadata, ...]) -> list[str]:
    """The changes in words, by input; empty if only the order of the inputs has changed."""
    found = []
    for name in dict.fromkeys(each.stage for each in (*before, *now)):
        was, is_now = (sorted(_in_words(each) for each in side if each.stage == name) for side in (before, now))
        if was != is_now:
            found.append(f"input {name!r} was {' and '.join(was) or 'none'}, is now {' and '.join(is_now) or 'none'}")
    return found


def _in_words(each: InputMetadata) -> str:
    if each.mode == "static":
        return "a static input"
    pattern = each.pattern.upper()
    return f"a stream over {pattern} by key {each.key!r}" if each.key else f"a stream over {pattern}"
