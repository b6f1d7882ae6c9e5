"""The errors of the state floor: a checkpoint's metadata that cannot be read, or that does not fit the
pipeline."""

from __future__ import annotations

from typing import ClassVar, Literal

from dagster_checkpoints.errors import DagsterCheckpointsError

RestoreProblem = Literal[
    "unfinished_predecessor",
    "non_restored_state",
    "instances_changed",
    "chain_layout_changed",
    "inputs_changed",
    "input_rows_gone",
    "sink_removed",
    "spark_version_changed",
    "stateful_plan_changed",
    "sources_changed",
    "does_not_fit",
]
"""What does not fit, as a word for programs."""


class StateError(DagsterCheckpointsError):
    """Base of the errors of the state floor."""

    repeats: ClassVar[bool] = True


class CorruptMetadata(StateError):
    """The bytes are truncated, changed, or no checkpoint metadata at all."""


class UnknownMetadataVersion(StateError):
    """The metadata is intact and was written by another release, in a form that this one cannot read."""


class PartlyFinishedUnionState(StateError):
    """A stage with union list state has some, but not all, of its instances finished: no checkpoint of it is
    valid."""


class RestoreError(StateError):
    """The checkpoint does not fit the pipeline.

    Attributes:
        kind: what does not fit.
    """

    kind: ClassVar[RestoreProblem] = "does_not_fit"


class UnfinishedPredecessor(RestoreError):
    """A finished stage would get new input from a stage that has not finished."""

    kind = "unfinished_predecessor"


class NonRestoredState(RestoreError):
    """The checkpoint holds state of a stage that the pipeline no longer has."""

    kind = "non_restored_state"


class InstancesChanged(RestoreError):
    """A stage has other instances than in the checkpoint."""

    kind = "instances_changed"


class ChainLayoutChanged(RestoreError):
    """Stages that shared a query, and so their state, can no longer share it in the same order."""

    kind = "chain_layout_changed"


class SinkRemoved(RestoreError):
    """A stage has no sink any more, and the checkpoint holds rows of it that wait for their commit."""

    kind = "sink_removed"


class InputsChanged(RestoreError):
    """A stage with state reads other stages than in the checkpoint, or reads them in another way."""

    kind = "inputs_changed"


class InputRowsGone(RestoreError):
    """A new stage reads a stage whose rows were emitted before the checkpoint, which does not hold them."""

    kind = "input_rows_gone"


class StatefulPlanChanged(RestoreError):
    """A stage has other stateful operators than those whose state the checkpoint holds."""

    kind = "stateful_plan_changed"


class SourcesChanged(RestoreError):
    """A query has other streaming sources than those whose offsets the checkpoint holds."""

    kind = "sources_changed"


class SparkVersionChanged(RestoreError):
    """The version of Spark that is to restore the checkpoint does not read, exactly, what another version has written."""

    kind = "spark_version_changed"


class InvalidMaxParallelism(StateError):
    """A maximum parallelism is outside its range."""


class MaxParallelismChanged(RestoreError):
    """The checkpoint fixes the number of key groups, and another number is set."""


class StatePartitionsChanged(RestoreError):
    """A stage has another number of state partitions than in the checkpoint, or its key groups were not state partitions."""


class ParallelismTooHigh(RestoreError):
    """A stage has more instances than key groups."""


class UnknownStage(RestoreError):
    """The checkpoint does not hold the stage."""
