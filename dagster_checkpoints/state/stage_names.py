"""Stages are stored under their uids, and run under their names: the two forms of a checkpoint's metadata.

A stage that was renamed keeps its uid, and with it its state. So storage holds uids only: a driver translates metadata before it
stores them, and after it has read them; between the two everything speaks of names. The names of channels are made of uids in
both forms, because the offsets of Spark's queries hold them, too. Must not know: storage, Spark, tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.metadata import ChainMetadata, CheckpointMetadata, StageMetadata, TaskSnapshot
from dagster_checkpoints.state.views import PipelineView

_Translation = Callable[[str], str]


def with_uids(metadata: CheckpointMetadata, pipeline: PipelineView) -> CheckpointMetadata:
    """The form that is stored.

    Args:
        metadata: metadata that speak of the names of the pipeline's stages.
        pipeline: the pipeline that has taken the checkpoint.
    """
    uids = {stage.name: stage.uid for stage in pipeline.stages if stage.uid != stage.name}
    return _translated(metadata, lambda name: uids.get(name, name)) if uids else metadata


def with_names(checkpoint: FittedCheckpoint) -> FittedCheckpoint | None:
    """The form that the other rules of a restore read; the first rule.

    A stage that the pipeline does not have keeps its uid as its name. If another stage has that name now, it is called
    "uid …", which is no name of a stage: two stages of one name are not mixed up.
    """
    names = {uid: name for name, uid in checkpoint.uids.items()}
    metadata = with_names_of(checkpoint.metadata, names)
    if metadata is checkpoint.metadata:
        return None
    known = [(uid, name) for uid, name in names.items() if uid != name and uid in checkpoint.recorded]
    return checkpoint.changed("by uid", (f"{name!r} is {uid!r} in the checkpoint" for uid, name in known), metadata)


def with_names_of(metadata: CheckpointMetadata, names: Mapping[str, str]) -> CheckpointMetadata:
    """As :func:`with_names`, for stages whose names are known by their uids.

    Args:
        metadata: stored metadata, which speak of uids.
        names: the names of stages by their uids.
    """
    if all(uid == name for uid, name in names.items()):
        return metadata
    taken = set(names.values())
    return _translated(metadata, lambda uid: names.get(uid) or (f"uid {uid}" if uid in taken else uid))


def _translated(metadata: CheckpointMetadata, to: _Translation) -> CheckpointMetadata:
    return msgspec.structs.replace(
        metadata,
        stages=tuple(_stage(stage, to) for stage in metadata.stages),
        chains=tuple(_chain(chain, to) for chain in metadata.chains),
    )


def _stage(stage: StageMetadata, to: _Translation) -> StageMetadata:
    inputs = stage.inputs
    if inputs is not None:
        inputs = tuple(msgspec.structs.replace(each, stage=to(each.stage)) for each in inputs)
    return msgspec.structs.replace(stage, name=to(stage.name), inputs=inputs)


def _chain(chain: ChainMetadata, to: _Translation) -> ChainMetadata:
    tasks = {index: _task(task, to) for index, task in chain.tasks.items()}
    return ChainMetadata(to(chain.name), tuple(to(name) for name in chain.stages), tasks)


def _task(task: TaskSnapshot, to: _Translation) -> TaskSnapshot:
    return msgspec.structs.replace(
        task,
        stages={to(name): stage for name, stage in task.stages.items()},
        static=tuple(msgspec.structs.replace(table, input=to(table.input)) for table in task.static),
        fused=tuple(msgspec.structs.replace(source, source=to(source.source)) for source in task.fused),
    )
