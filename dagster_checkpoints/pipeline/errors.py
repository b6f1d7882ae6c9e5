"""The errors of a pipeline's definition: one class for each mistake, all raised before anything starts.

Every text says what was expected, what was found, at which stage (with the file and line of the user's code)
and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

from dagster_checkpoints.errors import DagsterCheckpointsError


class PipelineDefinitionError(DagsterCheckpointsError):
    """The definition of a pipeline, or of one of its stages, is not valid."""

    repeats: ClassVar[bool] = True


class InvalidNameError(PipelineDefinitionError):
    """A pipeline, stage or instance has a name that cannot become part of a path."""


class InvalidInstancesError(PipelineDefinitionError):
    """The instances of a stage are empty, repeated, or not a sequence of names."""


class StageSignatureError(PipelineDefinitionError):
    """The parameters of a stage's function do not say which stages it reads."""


class InvalidStageInputError(PipelineDefinitionError):
    """The options of a stage's input contradict each other, or are not a StageInput."""


class InvalidWatermarkError(PipelineDefinitionError):
    """An event-time column, a lateness or an idle time-out cannot be used."""


class InvalidDurationError(PipelineDefinitionError):
    """A duration is not a number of seconds."""


class SourceWithInputsError(PipelineDefinitionError):
    """A source reads another stage."""


class StageWithoutInputsError(PipelineDefinitionError):
    """A derived stage reads nothing."""


class NotAStageError(PipelineDefinitionError):
    """Something in the list of stages is not a stage."""


class EmptyPipelineError(PipelineDefinitionError):
    """A pipeline has no stages."""


class DuplicateStageError(PipelineDefinitionError):
    """Two stages of a pipeline have the same name."""


class DuplicateUidError(PipelineDefinitionError):
    """Two stages of a pipeline have the same uid, under which checkpoints hold their state."""


class UnknownStageError(PipelineDefinitionError):
    """A name does not belong to any stage of the pipeline."""


class StageCycleError(PipelineDefinitionError):
    """Stages read each other in a cycle."""


class UnboundedStaticInputError(PipelineDefinitionError):
    """A static input waits for the end of a stage that never ends."""


class InstancesMismatchError(PipelineDefinitionError):
    """A POINTWISE edge would join instances with different names."""


class UnusedStageError(PipelineDefinitionError):
    """No stage reads the stage, and it has no sink: its output would be lost."""


class InvalidBatchLimitError(PipelineDefinitionError):
    """A stage's max_rows_per_trigger is no number of rows, or the stage does not read channels."""


class InvalidStatePartitionsError(PipelineDefinitionError):
    """A stage's state_partitions is no number that its instances share evenly, or its rows are not routed by one column."""


class OutputModeError(PipelineDefinitionError):
    """A stage's output mode is unknown, or its sink or a stage that reads it does not support the mode."""


class UnboundedSinkError(PipelineDefinitionError):
    """An unbounded stage has a sink that only a bounded stage can have."""


class InvalidSplitSourceError(PipelineDefinitionError):
    """An argument, or the function, of a split source cannot be used."""


class InvalidSplitError(PipelineDefinitionError):
    """A split is not of the type that its source declares."""


class ChainLayoutError(PipelineDefinitionError):
    """A layout of chains does not cover the pipeline, or joins stages that cannot run in one query."""


class InvalidExecutionGraphError(PipelineDefinitionError):
    """An execution graph is not a directed acyclic graph in topological order."""


class NoInputAssetError(PipelineDefinitionError):
    """A stage asks for a Dagster asset that it does not read, or that was never materialized."""


class InvalidCommitCheckError(PipelineDefinitionError):
    """A check of a stage's commits is no function of the rows, or the stage has no sink, or two checks have the same name."""


class InvalidQuarantineError(PipelineDefinitionError):
    """The conditions or limits of a quarantine cannot be used, or it does not fit its stage."""


class OverlappingSinksError(PipelineDefinitionError):
    """The sinks of two stages write to the same location, or one location contains the other."""
