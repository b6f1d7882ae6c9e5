"""Refuses a pipeline whose name another pipeline already uses on this storage. The comparison of two pipelines is in
:mod:`dagster_checkpoints.execution.origin`.
"""

from __future__ import annotations

from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.execution.origin import Origin, is_same_pipeline

_SHOWN = 5


class PipelineNameTaken(StorageError):
    """The pipeline's directory in storage belongs to another pipeline of the same name."""


def check_origin(pipeline: str, url: str, known: Origin, found: Origin) -> None:
    """Refuse a pipeline whose name another pipeline already uses on this storage.

    Args:
        pipeline: the pipeline's name.
        url: URL of the pipeline's directory, for the error.
        known: the origin recorded in storage.
        found: the origin of this run's pipeline.

    Raises:
        PipelineNameTaken: names where both pipelines are defined, and the remedy.
    """
    if is_same_pipeline(known, found):
        return
    raise PipelineNameTaken(
        f"expected {url} to belong to this run's pipeline {pipeline!r}, {_described(found)}; found that it belongs to another "
        f"pipeline of that name, {_described(known)}. Two pipelines of one name would restore each other's checkpoints. Rename "
        "one of them, or give it another storage (storage= of CheckpointCoordinatorResource). If it is the same pipeline, moved "
        "and restructured at the same time, launch it once with allow_moved_pipeline: true in its run configuration"
    )


def _described(origin: Origin) -> str:
    shown = ", ".join(origin.assets[:_SHOWN]) + (", …" if len(origin.assets) > _SHOWN else "")
    location = f"code location {origin.code_location!r}" if origin.code_location else "an unknown code location"
    instance = f" of Dagster instance {origin.instance}" if origin.instance else ""
    return f"defined in {location}{instance} with the assets {shown}"
