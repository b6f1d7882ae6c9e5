"""Stages, which users write as functions or as classes.

A stage turns the DataFrames of its upstream stages into one DataFrame. The parameters of its function name the stages that it
reads. A stage must not know the other stages (`graph.py` puts them together), nor how stages are run.

The instances of a stage share its state partitions evenly, and one column routes its rows; how partitions are numbered is
`state.key_groups`.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Self

from dagster_checkpoints.pipeline.checks import CheckFunction, CommitCheck, checked_checks
from dagster_checkpoints.pipeline.context import StageContext
from dagster_checkpoints.pipeline.edges import StageInput
from dagster_checkpoints.pipeline.errors import (
    InvalidBatchLimitError,
    InvalidInstancesError,
    InvalidStatePartitionsError,
    InvalidWatermarkError,
    OutputModeError,
    SourceWithInputsError,
    StageSignatureError,
    StageWithoutInputsError,
)
from dagster_checkpoints.pipeline.event_time import Watermark, read_event_time
from dagster_checkpoints.pipeline.names import check_name
from dagster_checkpoints.pipeline.quarantine import Quarantine, checked_quarantine
from dagster_checkpoints.pipeline.setting_values import is_count
from dagster_checkpoints.pipeline.signatures import SourceLocation, locate, method_inputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


HIGHEST_STATE_PARTITIONS = 32768  # they are key groups, of which there are no more


def check_state_partitions(partitions: object, parallelism: int, inputs: Mapping[str, StageInput], where: str) -> None:
    """Check the argument `state_partitions` of a stage.

    Args:
        partitions: The argument; None if the stage has none.
        parallelism: The number of instances of the stage.
        inputs: Its inputs, by the upstream stage's name.
        where: The stage, for errors.

    Raises:
        InvalidStatePartitionsError: What was expected, and what was found.
    """
    if partitions is None:
        return
    if not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= HIGHEST_STATE_PARTITIONS:
        raise InvalidStatePartitionsError(
            f"{where}: state_partitions={partitions!r}; expected a number of partitions, 1 to {HIGHEST_STATE_PARTITIONS}."
        )
    if partitions % parallelism:
        raise InvalidStatePartitionsError(
            f"{where}: state_partitions={partitions} with {parallelism} instances; expected a multiple of the number of "
            "instances, which share the partitions evenly. The number is fixed with the first checkpoint: choose one that later "
            "numbers of instances divide as well, such as 24 or 120."
        )
    keys = {how.key for how in inputs.values() if how.mode == "stream"}
    if len(keys) != 1 or None in keys:
        raise InvalidStatePartitionsError(
            f"{where}: state_partitions={partitions}; expected inputs whose rows are routed by one column, which is the key of "
            f"the state, found {', '.join(sorted(map(repr, keys))) or 'no stream'}. Name the column for each of them "
            "(StageInput(key=...)), or leave out state_partitions."
        )


OutputMode = Literal["append", "update", "complete"]
OUTPUT_MODES: frozenset[str] = frozenset({"append", "update", "complete"})
DEFAULT_INSTANCES = ("0",)


class StageKind(Enum):
    """Where a stage's rows come from, and whether they end."""

    BOUNDED_SOURCE = "bounded_source"
    """Reads from outside and ends when its input is exhausted."""
    UNBOUNDED_SOURCE = "unbounded_source"
    """Reads from outside until it is stopped."""
    DERIVED = "derived"
    """Reads other stages; bounded if all of these are bounded."""

    @property
    def is_source(self) -> bool:
        """Whether the stage reads from outside the pipeline."""
        return self is not StageKind.DERIVED


class Stage:
    """One step of a pipeline; a subclass can override its whole life cycle.

    A subclass overrides `transform`, and other methods if it needs them; class attributes of the same names are the
    defaults of the arguments below. The parameters of `transform` after `context` name the upstream stages,
    unless it takes `**inputs`: then `inputs` names them. The runtime makes a copy per instance (:meth:`for_instance`), so an
    instance may keep its own data in attributes of `self`, created in `open`.

    Args:
        name: Name of the stage: letters, digits and underscores; by default the class's name in snake case.
        uid: Identity of the stage in checkpoints and in the tables of its sink; by default its name. A stage that gets another
            name keeps its state with its earlier name as `uid`. Names and uids have the same characters.
        inputs: Options for some or all of the upstream stages, by their names.
        instances: Names of the stage's parallel instances.
        sink: Where the stage's output is committed to.
        checks: Checks of the rows that the sink commits, see :func:`commit_check`.
        quarantine: Conditions on the rows of the output, and where the rows go that do not meet them; see :class:`Quarantine`.
        watermark: Event time, at a source only: a :class:`Watermark` or (column, lateness).
        event_time: Event-time column of the output where it is not that of the input; (column, lateness) where its rows
            may be older than the input's watermark: the lateness ("10 minutes") is the largest difference.
        output_mode: Spark's output mode; "update" and "complete" need a sink that supports them, and no stage that reads the
            output.
        kind: Bounded source, unbounded source or derived stage.
        max_rows_per_trigger: Largest number of rows that a micro-batch takes from the stages that this one reads, over all of
            them; None for all that wait. The stage begins a chain. The rows of one upstream micro-batch stay together: if they
            are more, they are a micro-batch of their own.
        state_partitions: Number of partitions of the stage's state in Spark, over all instances, which share them evenly: its key
            groups. Rows are routed to the instances by them, so that other instances take whole partitions. The key of all state
            has to be the column of `StageInput(key=...)` alone. None for state that other instances get row by row.

    Raises:
        PipelineDefinitionError: An argument, or the signature of `transform`, cannot be used; the subclass names the
            mistake.

    Examples:
        >>> class Dedup(Stage):
        ...     def transform(self, context, flights):
        ...         return flights.dropDuplicatesWithinWatermark(["flight"])
        >>> dedup = Dedup(instances=["a", "b"])
    """

    name: str = ""
    uid: str = ""
    inputs: Mapping[str, StageInput] = {}
    instances: tuple[str, ...] = DEFAULT_INSTANCES
    sink: Any = None
    checks: tuple[CommitCheck, ...] = ()
    quarantine: Quarantine | None = None
    watermark: Watermark | None = None
    event_time: str | tuple[str, str] | None = None
    output_mode: OutputMode = "append"
    kind: StageKind = StageKind.DERIVED
    max_rows_per_trigger: int | None = None
    state_partitions: int | None = None
    split_interval: float | None = None
    """Of a split source: seconds between two discoveries of splits. None for other stages."""

    takes_refused_rows: bool = False
    """Whether it gets the rows that the quarantine of the stage that it reads refuses, see `refused_rows.py`."""

    event_time_column: str | None = None
    """The column that `event_time` names; None where it names none."""
    event_time_lateness_ms: int = 0
    """Milliseconds by which rows of the output may be older than the watermark of the input, as `event_time` declares."""
    location: SourceLocation
    _defined: bool = False

    def __init__(
        self,
        name: str | None = None,
        *,
        uid: str | None = None,
        inputs: Mapping[str, StageInput] | None = None,
        instances: Sequence[str] | None = None,
        sink: Any = None,
        checks: Sequence[CommitCheck | CheckFunction] | None = None,
        quarantine: Quarantine | None = None,
        watermark: Watermark | tuple[str, str] | None = None,
        event_time: str | tuple[str, str] | None = None,
        output_mode: OutputMode | None = None,
        kind: StageKind | None = None,
        max_rows_per_trigger: int | None = None,
        state_partitions: int | None = None,
    ) -> None:
        self.location = self._location()
        self.name = check_name("stage", self._default_name() if name is None else name, str(self.location))
        if self.name == "context":
            raise StageSignatureError(
                f"{self.where} cannot be called 'context': no stage could read it, because a parameter of "
                f"that name receives the StageContext. Rename it."
            )
        self.uid = check_name("uid", (self.uid or self.name) if uid is None else uid, self.where)
        self.kind = kind or self.kind
        self.inputs = self._read_inputs(self.inputs if inputs is None else inputs)
        self.instances = self._check_instances(self.instances if instances is None else instances)
        self.sink = self.sink if sink is None else sink
        checks = self.checks if checks is None else checks
        self.checks = checked_checks(checks, self.where, has_sink=self.sink is not None)
        self.watermark = self._check_watermark(self.watermark if watermark is None else watermark)
        self.event_time = self.event_time if event_time is None else event_time
        self.event_time_column, self.event_time_lateness_ms = self._check_event_time(self.event_time)
        self.output_mode = self._check_output_mode(self.output_mode if output_mode is None else output_mode)
        quarantine = self.quarantine if quarantine is None else quarantine
        self.quarantine = checked_quarantine(quarantine, self.checks, self.output_mode, self.where)
        if max_rows_per_trigger is not None:
            self.max_rows_per_trigger = max_rows_per_trigger
        self._check_batch_limit()
        if state_partitions is not None:
            self.state_partitions = state_partitions
        check_state_partitions(self.state_partitions, self.parallelism, self.inputs, self.where)
        self._check_kind()

    # The life cycle, in the order in which the runtime calls it.

    def open(self, context: StageContext) -> None:
        """Acquire the resources of this instance; called once, before `transform`, also after a restore."""

    def transform(self, context: StageContext, *args: Any, **inputs: Any) -> DataFrame:
        """Build this instance's output from its inputs (one DataFrame each, by name).

        Called once per start. A source has no inputs. Without an override the stage passes on its only input.
        """
        (only,) = inputs.values()
        frame: DataFrame = only
        return frame

    def process_batch(self, batch: DataFrame, batch_id: int) -> DataFrame | None:
        """Handle one micro-batch of the output; the returned rows are emitted. Spark: `foreachBatch`."""
        return batch

    def end_input(self, name: str) -> None:
        """The upstream stage `name` has no more rows. Flink: `BoundedMultiInput.endInput`."""

    def finish(self) -> DataFrame | None:
        """All inputs have ended: return the rows that were held back. FLIP-147: `StreamOperator.finish`."""
        return None

    def snapshot_state(self, checkpoint_id: int) -> None:
        """Write the data of this instance into `context.state`, which becomes part of checkpoint `checkpoint_id`."""

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Checkpoint `checkpoint_id` is complete: the stage may perform side effects that waited for it."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Checkpoint `checkpoint_id` will never be complete."""

    def close(self) -> None:
        """Release the resources that `open` acquired; called once, also after a failure."""

    # Properties that the other floors read.

    @property
    def overrides_process_batch(self) -> bool:
        """Whether the stage handles its micro-batches itself, which ends its chain."""
        return type(self).process_batch is not Stage.process_batch

    @property
    def overrides_finish(self) -> bool:
        """Whether the stage may hold back rows until the end of its input, which ends its chain."""
        return type(self).finish is not Stage.finish

    @property
    def parallelism(self) -> int:
        """The number of instances."""
        return len(self.instances)

    @property
    def state_partitions_of_instance(self) -> int | None:
        """The number of state partitions of each instance; None for that of the Spark session."""
        return None if self.state_partitions is None else self.state_partitions // self.parallelism

    @property
    def description(self) -> str | None:
        """The docstring of the user's class; None if it has none."""
        return None if type(self) is Stage else type(self).__doc__

    @property
    def where(self) -> str:
        """The stage as errors name it: "Stage 'departures' (assets/flights.py:12)"."""
        return f"Stage {self.name!r} ({self.location})"

    def for_instance(self) -> Self:
        """A shallow copy for one instance, so that instances do not share attributes."""
        return copy.copy(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.kind.value}>"

    # How a definition is read and checked.

    def _default_name(self) -> str:
        return self.name or _snake_case(type(self).__name__)

    def _location(self) -> SourceLocation:
        own = type(self)
        overridden = (method for method in _OVERRIDABLE if getattr(own, method) is not getattr(Stage, method))
        return locate(getattr(own, next(overridden, "transform")))

    def _read_inputs(self, options: Mapping[str, StageInput]) -> Mapping[str, StageInput]:
        own = type(self).transform
        if own is not Stage.transform:
            return method_inputs(own, options, self.where)
        if self.kind.is_source or len(options) > 1:
            raise StageSignatureError(
                f"{self.where} does not override transform(context, ...), which is needed at a source and "
                f"at a stage with several inputs. Define it; its parameters after 'context' name the "
                f"upstream stages."
            )
        return method_inputs(own, options, self.where, reads_rest=True)

    def _check_instances(self, instances: Sequence[str]) -> tuple[str, ...]:
        if isinstance(instances, str) or not isinstance(instances, Sequence):
            raise InvalidInstancesError(
                f'{self.where}: instances={instances!r}; expected a list of names, such as ["EWR", "JFK"].'
            )
        if not instances:
            raise InvalidInstancesError(f"{self.where}: instances is empty; a stage has at least one. Leave it out to have one.")
        names = tuple(check_name("instance", name, self.where) for name in instances)
        repeated = sorted(name for name, count in Counter(names).items() if count > 1)
        if repeated:
            raise InvalidInstancesError(
                f"{self.where}: instances names {', '.join(map(repr, repeated))} more than once; each "
                f"instance needs its own name."
            )
        return names

    def _check_watermark(self, watermark: Watermark | tuple[str, str] | None) -> Watermark | None:
        if watermark is None:
            return None
        if not self.kind.is_source:
            raise InvalidWatermarkError(
                f"{self.where} declares a watermark, but is not a source. Event time is declared at the "
                f"sources, and passed on to the stages behind them; use event_time= if this stage's output has another "
                f"event-time column."
            )
        if isinstance(watermark, Watermark):
            return watermark
        if not isinstance(watermark, tuple | list) or len(watermark) != 2:
            raise InvalidWatermarkError(
                f'{self.where}: watermark={watermark!r}; expected (column, lateness), such as ("ts", "1 hour"), or a Watermark.'
            )
        try:
            return Watermark(*watermark)
        except InvalidWatermarkError as error:
            raise InvalidWatermarkError(f"{self.where}: {error}") from None

    def _check_event_time(self, event_time: object) -> tuple[str | None, int]:
        """The column, and the lateness in milliseconds."""
        if event_time is None:
            return None, 0
        column, lateness_ms = read_event_time(event_time, self.where)
        if not self.kind.is_source:
            return column, lateness_ms
        if column is not event_time:
            raise InvalidWatermarkError(
                f"{self.where}: event_time={event_time!r} at a source, which declares its lateness as watermark={event_time!r}. "
                "Leave out event_time."
            )
        if self.watermark is None:
            raise InvalidWatermarkError(
                f"{self.where}: event_time={event_time!r} without a watermark; a source declares both as "
                f'watermark=({event_time!r}, "1 hour").'
            )
        if self.watermark.column != event_time:
            raise InvalidWatermarkError(
                f"{self.where}: event_time={event_time!r}, but its watermark is on "
                f"{self.watermark.column!r}; a source has one event-time column. Leave out event_time."
            )
        return column, 0

    def _check_output_mode(self, output_mode: OutputMode) -> OutputMode:
        if output_mode not in OUTPUT_MODES:
            raise OutputModeError(f'{self.where}: output_mode={output_mode!r}; expected "append", "update" or "complete".')
        return output_mode

    def _check_batch_limit(self) -> None:
        rows = self.max_rows_per_trigger
        if rows is None:
            return
        if not is_count(rows, least=1):
            raise InvalidBatchLimitError(
                f"{self.where}: max_rows_per_trigger={rows!r}; expected a number of rows, at least 1. Leave it out for no limit."
            )
        if self.kind.is_source:
            raise InvalidBatchLimitError(
                f"{self.where}: max_rows_per_trigger={rows} at a source; it limits what a stage takes from other stages. Use the "
                f"limit of the source itself, such as maxOffsetsPerTrigger or maxFilesPerTrigger."
            )
        if all(how.mode == "static" for how in self.inputs.values()):
            raise InvalidBatchLimitError(
                f"{self.where}: max_rows_per_trigger={rows}, but all its inputs are static, and a static input is read as a "
                f"whole. Leave it out."
            )

    def _check_kind(self) -> None:
        if self.kind.is_source and self.inputs:
            raise SourceWithInputsError(
                f"{self.where} is a source, but reads {', '.join(map(repr, self.inputs))}. A source takes "
                f"only 'context'; a stage that reads others is declared with @stage, or without kind=."
            )
        if not self.kind.is_source and not self.inputs:
            raise StageWithoutInputsError(
                f"{self.where} reads no stage. Name its upstream stages as parameters, or declare a source "
                f"with @bounded_source or @unbounded_source (a subclass: kind=StageKind.BOUNDED_SOURCE)."
            )
        self._defined = True


_OVERRIDABLE = ("transform", "process_batch", "finish", "open", "snapshot_state", "close")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
