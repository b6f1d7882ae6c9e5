"""A recorded chain whose stages cannot run as one query any more, divided into chains that can.

A stage inside a chain gets another reader or a sink, or stages behind it are removed, or others are put between. At a checkpoint
the query is between two micro-batches, so nothing is on its way between its stages. The first part goes on as the query that it
was, with its offsets. Each later part becomes a query behind a new, empty channel. All parts continue with the next batch of the
recorded query; the state of an operator goes with the stage that has it. Must not know: storage, Spark, tasks.

Source: Spark numbers the stateful operators of a query from its output to its inputs (`IncrementalExecution`), and keeps their
state in `state/<number>`; version n + 1 of the state belongs to batch n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from dagster_checkpoints.pipeline import EdgePattern, links, merging_stage
from dagster_checkpoints.state.chain_layout import (
    Reads,
    changed_input,
    changes_inside,
    missing_stages,
    reads_of,
    recorded_reads,
)
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    QuerySnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
)
from dagster_checkpoints.state.stages_between import replaced_inputs
from dagster_checkpoints.state.views import PipelineView

_OUTPUT_MODE = "output mode "
"""How the text of a plan begins that is not an operator."""
_STATE = "state/"
_SOURCES = "sources/"


class ChainPart(ChainMetadata, frozen=True):
    """A part of a chain that was divided; in memory only.

    Attributes:
        whole: the stages of the recorded chain: their plan as one query shows whether the state still fits.
    """

    whole: tuple[str, ...] = ()


def divided(metadata: CheckpointMetadata, pipeline: PipelineView) -> CheckpointMetadata:
    """The checkpoint with each chain divided where the pipeline needs it, and where its state allows it.

    Args:
        metadata: the checkpoint, in the names of the pipeline's stages.
        pipeline: the pipeline that is to run.
    """
    recorded = {stage.name: stage for stage in metadata.stages}
    reads = _reads_without_stages_between(pipeline, metadata)
    chains: list[ChainMetadata] = []
    for chain in metadata.chains:
        begins = _beginnings(pipeline, reads, chain, recorded)
        chains += _parts(chain, begins) if begins and division_obstacle(chain) is None else [chain]
    if len(chains) == len(metadata.chains):
        return metadata
    return msgspec.structs.replace(metadata, chains=tuple(chains))


def _reads_without_stages_between(pipeline: PipelineView, metadata: CheckpointMetadata) -> Reads:
    """What stages read, without the stages that have come between two of the recorded ones."""
    reads = dict(reads_of(pipeline))
    for stage in metadata.stages:
        replaced = replaced_inputs(stage)
        if replaced:
            reads[stage.name] = [replaced[name].origin if name in replaced else name for name in reads[stage.name]]
    return reads


def _beginnings(
    pipeline: PipelineView, reads: Reads, chain: ChainMetadata, recorded: Mapping[str, StageMetadata]
) -> frozenset[str]:
    """The stages that have to begin a query of their own; empty if there are none, or if a restore refuses the change."""
    missing = missing_stages(pipeline, chain)
    present = tuple(name for name in chain.stages if name not in missing)
    merging = merging_stage(chain.stages, recorded_reads(chain, recorded))
    whole = chain.stages.index(merging) if merging else 0  # this stage and those in front of it stay together
    if len(present) <= whole or set(missing) & set(chain.stages[: whole + 1]):
        return frozenset()
    rest = ChainMetadata(chain.name, present, chain.tasks)
    begins = {name for name, _ in changes_inside(pipeline, reads, rest, recorded)}
    followed_by = dict(links(present, recorded_reads(rest, recorded)))
    read_otherwise = any(
        (edge.target in begins and (edge.input.mode != "stream" or edge.pattern is not EdgePattern.POINTWISE))
        or (edge.source in followed_by and edge.target in recorded and followed_by[edge.source] != edge.target)
        for edge in pipeline.edges
    )
    if read_otherwise or changed_input(reads, rest, recorded) is not None:
        return frozenset()
    # A removed stage, and the one behind it: the operators of the removed one are between those of the others.
    begins.update(name for before, name in pairwise(chain.stages) if (before in missing) != (name in missing))
    return frozenset(begins) if begins <= set(chain.stages[whole + 1 :]) else frozenset()


def division_obstacle(chain: ChainMetadata) -> str | None:
    """Why the state of a recorded chain cannot be divided among its stages; None if it can."""
    for task in chain.tasks.values():
        if task.end_of_data == "drain":
            return (
                "it has reached the end of its data, and waits for its last checkpoint. Restore with the pipeline as it was; "
                "the next checkpoint holds no state of these stages any more"
            )
        held = _operators_with_state(task)
        plans = [snapshot.state_plan for snapshot in task.stages.values()]
        if held and None in plans:
            return "the release that took the checkpoint did not record which stage keeps which state"
        stateful = sum(operator_counts(task, chain.stages))
        if held and held != set(range(stateful)):
            return f"Spark keeps the state of {len(held)} operators, and the stages have {stateful}"
    return None


def _parts(chain: ChainMetadata, begins: frozenset[str]) -> list[ChainMetadata]:
    cuts = [0, *sorted(chain.stages.index(name) for name in begins), len(chain.stages)]
    found: list[ChainMetadata] = []
    for first, end in pairwise(cuts):
        stages = chain.stages[first:end]
        tasks = {index: _part(task, chain.stages, first, end) for index, task in chain.tasks.items()}
        found.append(ChainPart(stages[0], stages, tasks, whole=chain.stages))
    return found


def _part(task: TaskSnapshot, stages: Sequence[str], first: int, end: int) -> TaskSnapshot:
    """The part of a task with the stages from position `first` up to, not including, position `end`."""
    own = {name: task.stages[name] for name in stages[first:end] if name in task.stages}
    counts = operator_counts(task, stages)
    query = _query(task.query, sum(counts[end:]), sum(counts[first:end]), first == 0) if task.query is not None else None
    if first == 0:
        # Its last stage has sent nothing over channels yet.
        return msgspec.structs.replace(task, stages=own, query=query, watermark=None, output_positions={})
    last = end == len(stages)
    return TaskSnapshot(
        stages=own,
        query=query,
        end_of_data=task.end_of_data,
        watermark=task.watermark if last else None,
        output_positions=task.output_positions if last else {},
    )


def _query(query: QuerySnapshot, before: int, count: int, first: bool) -> QuerySnapshot:
    """The query of a part.

    Args:
        before: number of the operators of later stages, which have lower numbers.
        count: number of the part's operators.
        first: whether it is the first part, which reads the sources of the query.
    """
    files: list[StateFile] = []
    for file in query.files:
        if file.path.startswith(_STATE):
            number = _operator_number(file.path)
            if before <= number < before + count:
                rest = file.path.split("/", 2)[2]
                files.append(msgspec.structs.replace(file, path=f"{_STATE}{number - before}/{rest}"))
        elif first or not file.path.startswith(_SOURCES):
            files.append(file)
    if first:
        return msgspec.structs.replace(query, files=tuple(files))
    return QuerySnapshot(query.batch_id, tuple(files), sources=())


def _operators_with_state(task: TaskSnapshot) -> set[int]:
    """The numbers of the operators whose state the task's query holds."""
    files = task.query.files if task.query is not None else ()
    return {_operator_number(file.path) for file in files if file.path.startswith(_STATE)}


def _operator_number(path: str) -> int:
    return int(path.split("/", 2)[1])


def operator_counts(task: TaskSnapshot, stages: Sequence[str]) -> list[int]:
    """By stage, the number of its stateful operators."""
    plans = [(task.stages[name].state_plan or ()) if name in task.stages else () for name in stages]
    return [sum(not text.startswith(_OUTPUT_MODE) for text in plan) for plan in plans]
