"""The inputs of stages: their record in a checkpoint, and the changes that a restore refuses.

The state of an instance depends on the rows that it has read, and so on key, pattern and input. Must not know: storage, Spark,
tasks.
"""

from __future__ import annotations

from dagster_checkpoints.pipeline import Stage
from dagster_checkpoints.state.errors import InputsChanged
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.metadata import InputMetadata, Segment, TaskSnapshot
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
    takes = {stage.name for stage in checkpoint.pipeline.stages if isinstance(stage, Stage) and stage.takes_refused_rows}
    for chain in checkpoint.metadata.chains:
        if chain.stages[0] in takes and any(map(_awaits_rows, chain.tasks.values())):
            raise InputsChanged(
                f"Stage {chain.stages[0]!r} commits the rows that a quarantine refuses, and expected none on their way to it in "
                f"{checkpoint.where}, since no barrier overtakes them. Found some: a stage of this name has read all rows of the "
                "stage in front, and those that pass would be committed as refused ones. Suspend the old pipeline, or request a "
                "savepoint of it, and restore that: a savepoint holds no rows on their way."
            )


def _awaits_rows(task: TaskSnapshot) -> bool:
    return any(isinstance(element, Segment) for saved in task.channels for element in saved.in_flight)


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
