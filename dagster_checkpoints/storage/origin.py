"""Which pipeline a directory of the checkpoint storage belongs to, where two pipelines have the same name.

A pipeline changes: its stages are renamed, its code location moves, Dagster's database is made again. So no single fact says
that it is another one; the rule here needs two of them. Values and the rule only: nothing here reads or writes.
"""

from __future__ import annotations

import msgspec

from dagster_checkpoints.storage.errors import StorageError

_SHOWN = 5


class PipelineNameTaken(StorageError):
    """The pipeline's directory in storage belongs to another pipeline of the same name."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pipeline is defined, as its latest run knew it; what it did not know is empty.

    Args:
        code_location: name of Dagster's code location.
        instance: id of the Dagster instance.
        assets: keys of the stages' assets, sorted.
    """

    code_location: str = ""
    instance: str = ""
    assets: tuple[str, ...] = ()

    def then(self, later: Origin) -> Origin:
        """What is known after a later run; what that run did not know is kept."""
        return Origin(
            code_location=later.code_location or self.code_location,
            instance=later.instance or self.instance,
            assets=later.assets or self.assets,
        )


UNKNOWN_ORIGIN = Origin()


def is_same_pipeline(known: Origin, found: Origin) -> bool:
    """Whether two origins may be those of one pipeline.

    They are not if the pipelines come from different places (another code location, or another Dagster instance) **and** have
    fewer than half of their asset keys in common, counted from the smaller pipeline. So one that is renamed, restructured or
    given another key prefix where it is remains itself, and so does one that is moved elsewhere with its keys. What is not
    known counts as equal.
    """
    if not known.assets or not found.assets:
        return True
    places = ((known.code_location, found.code_location), (known.instance, found.instance))
    if all(one == other or not one or not other for one, other in places):
        return True
    return 2 * len(set(known.assets) & set(found.assets)) >= min(len(known.assets), len(found.assets))


def check_origin(pipeline: str, url: str, known: Origin, found: Origin) -> None:
    """Refuse a pipeline whose name another one has taken on this storage.

    Args:
        pipeline: its name.
        url: of its directory, for the error.
        known: what the storage says.
        found: of the run.

    Raises:
        PipelineNameTaken: says where both are defined, and the remedy.
    """
    if is_same_pipeline(known, found):
        return
    raise PipelineNameTaken(
        f"expected {url} to belong to this run's pipeline {pipeline!r}, {_described(found)}; found that it belongs to another "
        f"one of that name, {_described(known)}. Two pipelines of one name would restore each other's checkpoints. Rename one of "
        "them, or give it another storage (storage= of CheckpointCoordinatorResource). If it is the same pipeline, moved and "
        "restructured at the same time, launch it once with allow_moved_pipeline: true in its run configuration"
    )


def _described(origin: Origin) -> str:
    shown = ", ".join(origin.assets[:_SHOWN]) + (", …" if len(origin.assets) > _SHOWN else "")
    location = f"code location {origin.code_location!r}" if origin.code_location else "an unknown code location"
    instance = f" of Dagster instance {origin.instance}" if origin.instance else ""
    return f"defined in {location}{instance} with the assets {shown}"
