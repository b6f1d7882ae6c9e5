"""The stages that have finished, come or gone since a checkpoint, or lost their sink: rules of a restore.

No rule lets rows be lost in silence: those that a stage would not get again, and those that wait in the checkpoint for a stage or
a sink that the pipeline does not have. Must not know: storage, Spark, tasks.

Source: FLIP-147; Flink's VertexFinishedStateChecker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dagster_checkpoints.pipeline import EdgePattern, Stage, total_rows
from dagster_checkpoints.state.errors import InputRowsGone, NonRestoredState, SinkRemoved, SourcesChanged, UnfinishedPredecessor
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint, quoted
from dagster_checkpoints.state.metadata import CheckpointMetadata, StageMetadata
from dagster_checkpoints.state.row_counts import rows_in_snapshot


def check_finished_stages(checkpoint: FittedCheckpoint) -> None:
    """Check that no stage that has finished, in whole or in part, would get new rows.

    Raises:
        UnfinishedPredecessor: names the stage, and the one that would send.
    """
    ended, patterns = _ended(checkpoint), dict[tuple[str, str], EdgePattern]()
    for edge in checkpoint.pipeline.edges:
        # If two edges connect the same stages, the stricter rule of ALL_TO_ALL applies.
        if edge.pattern is EdgePattern.ALL_TO_ALL or (edge.source, edge.target) not in patterns:
            patterns[edge.source, edge.target] = edge.pattern
    for (source, target), pattern in patterns.items():
        stage = checkpoint.recorded.get(target)
        if stage is None or not (stage.finished or stage.fully_finished):
            continue
        upstream = checkpoint.recorded.get(source)
        fully = upstream is not None and (upstream.fully_finished or ended[source] >= upstream.parallelism)
        partly = upstream is not None and ended[source] > 0
        if fully or (partly and not stage.fully_finished and pattern is EdgePattern.POINTWISE):
            continue
        raise UnfinishedPredecessor(_finished_message(stage, source, upstream, pattern, checkpoint.where))


def check_removed_stages(checkpoint: FittedCheckpoint) -> FittedCheckpoint | None:
    """Check that the pipeline has each stage of the checkpoint that has state, or that this is to be left behind.

    Raises:
        NonRestoredState: names the stages and the remedies.
    """
    gone, recorded = checkpoint.removed_stages, checkpoint.recorded
    # A fully finished stage has no state, except for its enumerator.
    with_state = [name for name in gone if not recorded[name].fully_finished or recorded[name].enumerator is not None]
    if not with_state:
        return None
    waiting = _with_waiting_rows(checkpoint, with_state)
    if not checkpoint.allow_non_restored_state:
        raise NonRestoredState(_unclaimed_message(checkpoint, with_state, waiting))
    rows = [_rows_left(waiting)] if waiting else []
    return checkpoint.changed("left behind", [f"the state of {quoted(with_state)}", *rows])


def check_sinks(checkpoint: FittedCheckpoint) -> FittedCheckpoint | None:
    """Check that each stage whose rows wait for their commit still has a sink, or that they are to be left behind.

    Raises:
        SinkRemoved: names the stage and the remedies.
    """
    without = [stage.name for stage in checkpoint.pipeline.stages if isinstance(stage, Stage) and stage.sink is None]
    waiting = _with_waiting_rows(checkpoint, without)
    if not waiting:
        return None
    if not checkpoint.allow_non_restored_state:
        raise SinkRemoved(
            f"Stage {waiting[0]!r} has no sink. In {checkpoint.where} it has one, with rows that are committed at the restore "
            "unless they were before. Put the sink back; or set allow_non_restored_state to leave these rows behind, which "
            "loses none after a suspend: it has committed them."
        )
    return checkpoint.changed("left behind", [_rows_left(waiting)])


def _with_waiting_rows(checkpoint: FittedCheckpoint, stages: Iterable[str]) -> list[str]:
    """Those of the stages for whose sinks the checkpoint holds rows, which a restore commits unless they were before."""
    tasks = [task for chain in checkpoint.metadata.chains for task in chain.tasks.values()]
    held = [name for task in tasks for name, snapshot in task.stages.items() if snapshot.transactions]
    return [name for name in dict.fromkeys(held) if name in {*stages}]


def _rows_left(stages: Sequence[str]) -> str:
    return f"rows for the sinks that {quoted(stages)} had, unless they have been committed"


def check_split_sources(checkpoint: FittedCheckpoint) -> None:
    """Check that each source is read in splits if, and only if, it was in the checkpoint.

    A fully finished source is not read any more.

    Raises:
        SourcesChanged: names the source.
    """
    for stage in checkpoint.pipeline.stages:
        known = checkpoint.recorded.get(stage.name)
        if known is None or known.fully_finished or (known.enumerator is not None) == (stage.split_interval is not None):
            continue
        now, then = ("is", "was not") if known.enumerator is None else ("is not", "was")
        raise SourcesChanged(
            f"Stage {stage.name!r} {now} a split source, and {then} one in {checkpoint.where}. The checkpoint says what "
            f"was read of it: as {'offsets' if known.enumerator is None else 'splits'}, which do not fit. Give the new source "
            "another name, or take the change back; or start the pipeline without this checkpoint (restore_from: none)."
        )


def with_ended_sources(checkpoint: FittedCheckpoint) -> FittedCheckpoint | None:
    """End the sources again that requests had ended, and that had not finished.

    Where that were all instances of a source that had not finished, it is all that there are now; otherwise those of these names.
    """
    ending = []
    for stage in checkpoint.metadata.stages:
        unfinished = {name for n, name in enumerate(stage.instances) if n not in stage.finished}
        every = bool(unfinished) and unfinished == {*stage.ending}
        ending += [(stage.name, name) for name in checkpoint.instances.get(stage.name, ()) if every or name in stage.ending]
    if not ending:
        return None
    sources = [f"{name!r} of {stage!r} reads what is there, and ends" for stage, name in ending]
    return replace(checkpoint.changed("ended by a request", sources), ending=frozenset(ending))


def check_new_stages(checkpoint: FittedCheckpoint) -> FittedCheckpoint | None:
    """Check that no new stage reads rows that were emitted before the checkpoint and are not in it.

    A new stage may read a running stage as a stream: it gets the rows that are emitted from now on. The rule reads the checkpoint
    as it was taken: among other instances there is none that has finished.

    Raises:
        InputRowsGone: names the new stage, the stage that it reads, and the remedies.
    """
    taken = checkpoint.taken or checkpoint.metadata
    recorded = {stage.name: stage for stage in taken.stages}
    for edge in checkpoint.pipeline.edges:
        upstream = recorded.get(edge.source)
        if edge.target in recorded or upstream is None:
            continue
        found = _gone(taken, upstream, static=edge.input.mode == "static")
        if found and edge.target in checkpoint.stages_of_refused_rows:
            raise InputRowsGone(
                f"Stage {edge.source!r} has a quarantine, and had none in {checkpoint.where}. It {found}: the conditions would "
                f"not see these rows, which have passed. Take the quarantine away from {edge.source!r}, or give it to the "
                "stage that reads these rows; or start the pipeline without this checkpoint (restore_from: none)."
            )
        if found:
            raise InputRowsGone(
                f"Stage {edge.target!r} is not in {checkpoint.where}, and reads {edge.source!r}"
                f"{' as a static input' if edge.input.mode == 'static' else ''}, which {found}. These rows are not in the "
                f"checkpoint, and {edge.source!r} does not emit them again: {edge.target!r} would start without them. Add a copy "
                f"of {edge.source!r} under another name, which runs from its beginning, and let {edge.target!r} read that one; "
                f"or let it read what the sink of {edge.source!r} has written, as a bounded source; or start the pipeline "
                "without this checkpoint (restore_from: none)."
            )
    new = checkpoint.new_stages
    return checkpoint.changed("new", [f"{quoted(new)} {'begins' if len(new) == 1 else 'begin'} without state"]) if new else None


def _ended(checkpoint: FittedCheckpoint) -> dict[str, int]:
    """By stage, the number of instances that emit no more rows: they have finished, or wait after their end of data."""
    ended = {name: len(stage.finished) for name, stage in checkpoint.recorded.items()}
    for chain in checkpoint.metadata.chains:
        waiting = sum(task.end_of_data == "drain" for task in chain.tasks.values())
        for name in chain.stages:
            ended[name] += waiting
    return ended


def _finished_message(stage: StageMetadata, source: str, upstream: StageMetadata | None, pattern: EdgePattern, where: str) -> str:
    state = "fully finished" if stage.fully_finished else f"partly finished (instances {_list(stage.finished)})"
    needs_all = stage.fully_finished or pattern is EdgePattern.ALL_TO_ALL
    expected = "fully finished" if needs_all else "at least partly finished"
    if upstream is None:
        found = "is not in the checkpoint, so it would run from its beginning"
    elif upstream.finished:
        found = f"is only partly finished (instances {_list(upstream.finished)})"
    else:
        found = "is still running"
    renamed = f"If {source!r} was renamed, write its former name as its uid. Otherwise take" if upstream is None else "Take"
    return (
        f"Stage {stage.name!r} is {state} in {where}, so its predecessor {source!r} over {pattern.name} must be {expected}; "
        f"but {source!r} {found}. Its records would not be read. {renamed} {source!r} out of the inputs of {stage.name!r}, "
        f"give {stage.name!r} another name so that it starts without state, or start the pipeline without this checkpoint."
    )


def _unclaimed_message(checkpoint: FittedCheckpoint, unclaimed: Sequence[str], waiting: Sequence[str]) -> str:
    """The text for state without a stage: after a rename the uid keeps it; in another pipeline's checkpoint nothing is to do.

    Args:
        checkpoint: the checkpoint.
        unclaimed: the stages that the pipeline does not have.
        waiting: those of them for whose sinks the checkpoint holds rows.
    """
    present, new, where = sorted(checkpoint.instances), sorted(checkpoint.new_stages), checkpoint.where
    uids = [name.removeprefix("uid ") for name in unclaimed]
    found = (
        f"{where[0].upper()}{where[1:]} holds state of {quoted(unclaimed)}, which the pipeline {checkpoint.pipeline.name!r} "
        f"does not have (it has {quoted(present)}). "
    )
    renamed = (
        f"write uid={uids[0]!r} at {new[0]!r}"
        if len(new) == len(uids) == 1
        else f"write the former name of each renamed stage as its uid ({' or '.join(f'uid={uid!r}' for uid in uids)}"
        + (f"; new here: {quoted(new)})" if new else ")")
    )
    if len(new) == len(present):
        return found + (
            "It has no stage of this pipeline: it is probably of another pipeline of the same name, whose state must not be "
            "given up. Give this pipeline another name or another storage. If it is the same pipeline, and all of its stages "
            f"were renamed, keep their state: {renamed}."
        )
    kept = f"If a stage was renamed, {renamed}: it then keeps its state. " if new else ""
    back = "Otherwise put it back under that name" if new else "Put the stage back under that name"
    rows = f", and {_rows_left(waiting)}, as after a suspend" if waiting else ""
    return found + (
        f"{kept}{back}; or, if it was removed on purpose, set allow_non_restored_state, which loses its state for ever{rows}."
    )


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


def _list(indices: Iterable[int]) -> str:
    return ", ".join(map(str, indices))
