"""The inputs and sinks of stages: their record in a checkpoint, and the changes that a restore refuses.

The state of an instance depends on the rows that it has read, and so on key, pattern and input. Rows that a stage emitted before
the checkpoint are only in the state of the stages that read them then. Must not know: storage, Spark, tasks.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagster_checkpoints.pipeline import Stage, total_rows
from dagster_checkpoints.state.errors import InputRowsGone, InputsChanged, SinkRemoved
from dagster_checkpoints.state.metadata import CheckpointMetadata, InputMetadata, StageMetadata
from dagster_checkpoints.state.row_counts import rows_in_snapshot
from dagster_checkpoints.state.views import EdgeView, PipelineView


def recorded_inputs(pipeline: PipelineView) -> dict[str, tuple[InputMetadata, ...]]:
    """The record of the inputs of each stage, in their order."""
    inputs: dict[str, list[InputMetadata]] = {stage.name: [] for stage in pipeline.stages}
    for edge in pipeline.edges:
        inputs[edge.target].append(_recorded(edge))
    return {name: tuple(found) for name, found in inputs.items()}


def check_inputs(pipeline: PipelineView, recorded: Mapping[str, StageMetadata], where: str) -> None:
    """Check that each stage of the checkpoint reads the same stages as then, in the same way.

    A fully finished stage does not read any more, so its inputs may change.

    Args:
        pipeline: the pipeline that is to run.
        recorded: the stages of the checkpoint, by name.
        where: the checkpoint, for the error.

    Raises:
        InputsChanged: names the stage and its changed inputs, in the checkpoint and in the pipeline.
    """
    now = recorded_inputs(pipeline)
    for stage in pipeline.stages:
        known = recorded.get(stage.name)
        if known is None or known.fully_finished or known.inputs is None:
            continue
        changes = _changes(known.inputs, now[stage.name])
        if changes:
            raise InputsChanged(
                f"Stage {stage.name!r} does not read its inputs as in {where}: {'; '.join(changes)}. Its state, and the records "
                "on their way to it, belong to the inputs of the checkpoint: with others, rows that belong together would meet "
                "in different instances, or not at all. Restore the inputs as they were; or end the old pipeline with a drain, "
                "which emits and commits all that it holds, and begin with the new inputs as a new start (restore_from: none)."
            )


def check_new_stages(
    pipeline: PipelineView, metadata: CheckpointMetadata, recorded: Mapping[str, StageMetadata], where: str
) -> None:
    """Check that no new stage reads rows that were emitted before the checkpoint and are not in it.

    A new stage may read a running stage as a stream: it gets the rows that are emitted from now on.

    Args:
        pipeline: the pipeline that is to run.
        metadata: the metadata of the checkpoint.
        recorded: the stages of the checkpoint, by name.
        where: the checkpoint, for the error.

    Raises:
        InputRowsGone: names the new stage, the stage that it reads, and the remedies.
    """
    for edge in pipeline.edges:
        upstream = recorded.get(edge.source)
        if edge.target in recorded or upstream is None:
            continue
        found = _gone(metadata, upstream, static=edge.input.mode == "static")
        if found:
            raise InputRowsGone(
                f"Stage {edge.target!r} is not in {where}, and reads {edge.source!r}"
                f"{' as a static input' if edge.input.mode == 'static' else ''}, which {found}. These rows are not in the "
                f"checkpoint, and {edge.source!r} does not emit them again: {edge.target!r} would start without them. Add a copy "
                f"of {edge.source!r} under another name, which runs from its beginning, and let {edge.target!r} read that one; "
                f"or let it read what the sink of {edge.source!r} has written, as a bounded source; or start the pipeline "
                "without this checkpoint (restore_from: none)."
            )


def check_sinks(pipeline: PipelineView, metadata: CheckpointMetadata, where: str) -> None:
    """Check that each stage whose rows wait for their commit still has a sink.

    Args:
        pipeline: the pipeline that is to run.
        metadata: the metadata of the checkpoint.
        where: the checkpoint, for the error.

    Raises:
        SinkRemoved: names the stage and the remedies.
    """
    without = {stage.name for stage in pipeline.stages if isinstance(stage, Stage) and stage.sink is None}
    for chain in metadata.chains:
        for task in chain.tasks.values():
            for name, snapshot in task.stages.items():
                if snapshot.transactions and name in without:
                    raise SinkRemoved(
                        f"Stage {name!r} has no sink. In {where} it has one, with rows that are committed at the restore unless "
                        "they were before. Put the sink back; or set allow_non_restored_state to leave these rows behind, which "
                        "loses none after a suspend: it has committed them."
                    )


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


def _gone(metadata: CheckpointMetadata, upstream: StageMetadata, *, static: bool) -> str:
    """The rows of a recorded stage that a new consumer would not get, in words; empty if there are none."""
    tasks = next(chain.tasks for chain in metadata.chains if upstream.name in chain.stages)  # each stage is in one
    ended = len(upstream.finished) + sum(task.end_of_data == "drain" for task in tasks.values())
    if ended:
        return "has emitted its last row there" if ended >= upstream.parallelism else "has in part emitted its last row there"
    emitted = total_rows(rows_in_snapshot(task, upstream.name) for task in tasks.values())
    if static and emitted:
        return f"has emitted {emitted} rows before it"
    # The number of rows that a stage has emitted inside its query may not be known.
    ran = any(task.query is not None and task.query.batch_id >= 0 for task in tasks.values())
    return "has run micro-batches before it" if static and ran else ""
