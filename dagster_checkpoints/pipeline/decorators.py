"""The decorators that turn a function into a stage.

Each can be used bare or with keyword arguments; the function stays callable, so that it can be tested
with DataFrames.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from dagster_checkpoints.pipeline.checks import CheckFunction, CommitCheck
from dagster_checkpoints.pipeline.context import StageContext
from dagster_checkpoints.pipeline.edges import StageInput
from dagster_checkpoints.pipeline.errors import InvalidWatermarkError, StageSignatureError
from dagster_checkpoints.pipeline.event_time import Watermark
from dagster_checkpoints.pipeline.quarantine import Quarantine
from dagster_checkpoints.pipeline.signatures import SourceLocation, function_inputs, locate
from dagster_checkpoints.pipeline.stages import OutputMode, Stage, StageKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

StageFunction = Callable[..., Any]
"""A user's function from the DataFrames of its upstream stages, and optionally `context`, to a DataFrame."""


class OfFunction:
    """What all stages that are made of a function have in common; the function stays callable."""

    function: StageFunction

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly, as a test of it would."""
        return self.function(*args, **kwargs)

    @property
    def description(self) -> str | None:
        """The function's docstring."""
        return self.function.__doc__

    def _default_name(self) -> str:
        return str(getattr(self.function, "__name__", self.function))

    def _location(self) -> SourceLocation:
        return locate(self.function)


class FunctionStage(OfFunction, Stage):
    """A stage whose `transform` is a function; made by the decorators.

    Args:
        function: The user's function; its parameters, except `context`, name the upstream stages.
        name: Name of the stage; by default the function's name.
        options: Further arguments of :class:`Stage`.
    """

    def __init__(self, function: StageFunction, *, name: str | None = None, **options: Any) -> None:
        if not callable(function) or isinstance(function, type | Stage):
            raise StageSignatureError(
                f"{function!r} cannot become a stage: the decorators expect a function. A subclass of Stage "
                f"is instantiated, not decorated."
            )
        self.function = function
        self._wants_context = False
        super().__init__(name, **options)
        functools.update_wrapper(self, function, updated=())

    def transform(self, context: StageContext, *args: Any, **inputs: Any) -> DataFrame:
        """Call the function, with `context` if it has this parameter."""
        frame: DataFrame = self.function(context=context, **inputs) if self._wants_context else self.function(**inputs)
        return frame

    def _read_inputs(self, options: Mapping[str, StageInput]) -> Mapping[str, StageInput]:
        inputs, self._wants_context = function_inputs(self.function, options, self.where)
        return inputs


@overload
def stage(function: StageFunction, /) -> FunctionStage: ...
@overload
def stage(
    *,
    inputs: Mapping[str, StageInput] | None = None,
    sink: Any = None,
    checks: Sequence[CommitCheck | CheckFunction] | None = None,
    quarantine: Quarantine | None = None,
    instances: Sequence[str] | None = None,
    event_time: str | tuple[str, str] | None = None,
    output_mode: OutputMode = "append",
    max_rows_per_trigger: int | None = None,
    state_partitions: int | None = None,
    name: str | None = None,
    uid: str | None = None,
) -> Callable[[StageFunction], FunctionStage]: ...
def stage(
    function: StageFunction | None = None,
    /,
    *,
    inputs: Mapping[str, StageInput] | None = None,
    sink: Any = None,
    checks: Sequence[CommitCheck | CheckFunction] | None = None,
    quarantine: Quarantine | None = None,
    instances: Sequence[str] | None = None,
    event_time: str | tuple[str, str] | None = None,
    output_mode: OutputMode = "append",
    max_rows_per_trigger: int | None = None,
    state_partitions: int | None = None,
    name: str | None = None,
    uid: str | None = None,
) -> FunctionStage | Callable[[StageFunction], FunctionStage]:
    """Make a stage of a function that reads other stages.

    The function's parameter names are the names of its upstream stages, as in Dagster; one called `context`
    receives the :class:`StageContext`.

    Args:
        inputs: Options for some of the inputs, by the upstream stage's name.
        sink: Where the output is committed to; needed where no other stage reads it.
        checks: Checks of the rows that the sink commits, see :func:`commit_check`.
        quarantine: Where rows go that do not meet conditions, see :class:`Quarantine`.
        instances: Names of the parallel instances; one by default.
        event_time: Event-time column of the output, where it is not that of the (first) input that has one; (column,
            lateness) where rows of the output may be older than the input's watermark: the lateness is the largest difference.
        output_mode: Spark's output mode; "update" and "complete" only at a last stage whose sink supports
            them.
        max_rows_per_trigger: Largest number of rows that a micro-batch takes from the upstream stages; None for all that wait.
            See :class:`Stage`.
        state_partitions: Number of partitions of the stage's state over all instances, by which rows are routed to them. See
            :class:`Stage`.
        name: Name of the stage; by default the function's name.
        uid: Identity of the stage in checkpoints; by default its name. See :class:`Stage`.

    Raises:
        PipelineDefinitionError: The definition cannot be used; the subclass names the mistake.

    Examples:
        >>> @stage(inputs={"airlines": StageInput(mode="static")})
        ... def departures(flights, airlines):
        ...     return flights.join(airlines, "carrier")
    """

    def decorate(function: StageFunction) -> FunctionStage:
        return FunctionStage(
            function,
            name=name,
            uid=uid,
            inputs=inputs,
            sink=sink,
            checks=checks,
            quarantine=quarantine,
            instances=instances,
            event_time=event_time,
            output_mode=output_mode,
            max_rows_per_trigger=max_rows_per_trigger,
            state_partitions=state_partitions,
        )

    return decorate if function is None else decorate(function)


@overload
def bounded_source(function: StageFunction, /) -> FunctionStage: ...
@overload
def bounded_source(
    *,
    watermark: Watermark | tuple[str, str] | None = None,
    idle_after: float | None = None,
    instances: Sequence[str] | None = None,
    sink: Any = None,
    checks: Sequence[CommitCheck | CheckFunction] | None = None,
    quarantine: Quarantine | None = None,
    event_time: str | None = None,
    name: str | None = None,
    uid: str | None = None,
) -> Callable[[StageFunction], FunctionStage]: ...
def bounded_source(
    function: StageFunction | None = None,
    /,
    *,
    watermark: Watermark | tuple[str, str] | None = None,
    idle_after: float | None = None,
    instances: Sequence[str] | None = None,
    sink: Any = None,
    checks: Sequence[CommitCheck | CheckFunction] | None = None,
    quarantine: Quarantine | None = None,
    event_time: str | None = None,
    name: str | None = None,
    uid: str | None = None,
) -> FunctionStage | Callable[[StageFunction], FunctionStage]:
    """Make a source of a function whose rows end: a stream over existing input, or a batch DataFrame.

    Args:
        watermark: Event-time column and allowed lateness, such as ("ts", "1 hour").
        idle_after: Seconds without a row after which an instance no longer holds back the watermark.
        instances: Names of the parallel instances; `context.instance` is the one that calls the function.
        sink: Where the output is committed to.
        checks: Checks of the rows that the sink commits, see :func:`commit_check`.
        quarantine: Where rows go that do not meet conditions, see :class:`Quarantine`.
        event_time: The watermark's column, if given; no other is allowed.
        name: Name of the stage; by default the function's name.
        uid: Identity of the stage in checkpoints; by default its name. See :class:`Stage`.

    Raises:
        PipelineDefinitionError: The definition cannot be used; the subclass names the mistake.

    Examples:
        >>> @bounded_source(watermark=("ts", "1 hour"))
        ... def flights_history(context):
        ...     return context.spark.readStream.schema(FLIGHTS).option("maxFileAge", "36500d").parquet(HISTORY)
    """
    return _source(
        StageKind.BOUNDED_SOURCE, function, watermark, idle_after, instances, sink, checks, quarantine, event_time, name, uid
    )


@overload
def unbounded_source(function: StageFunction, /) -> FunctionStage: ...
@overload
def unbounded_source(
    *,
    watermark: Watermark | tuple[str, str] | None = None,
    idle_after: float | None = None,
    instances: Sequence[str] | None = None,
    sink: Any = None,
    checks: Sequence[CommitCheck | CheckFunction] | None = None,
    quarantine: Quarantine | None = None,
    event_time: str | None = None,
    name: str | None = None,
    uid: str | None = None,
) -> Callable[[StageFunction], FunctionStage]: ...
def unbounded_source(
    function: StageFunction | None = None,
    /,
    *,
    watermark: Watermark | tuple[str, str] | None = None,
    idle_after: float | None = None,
    instances: Sequence[str] | None = None,
    sink: Any = None,
    checks: Sequence[CommitCheck | CheckFunction] | None = None,
    quarantine: Quarantine | None = None,
    event_time: str | None = None,
    name: str | None = None,
    uid: str | None = None,
) -> FunctionStage | Callable[[StageFunction], FunctionStage]:
    """Make a source of a function that reads until it is stopped; arguments as of :func:`bounded_source`."""
    return _source(
        StageKind.UNBOUNDED_SOURCE, function, watermark, idle_after, instances, sink, checks, quarantine, event_time, name, uid
    )


def _source(
    kind: StageKind,
    function: StageFunction | None,
    watermark: Watermark | tuple[str, str] | None,
    idle_after: float | None,
    instances: Sequence[str] | None,
    sink: Any,
    checks: Sequence[CommitCheck | CheckFunction] | None,
    quarantine: Quarantine | None,
    event_time: str | None,
    name: str | None,
    uid: str | None,
) -> FunctionStage | Callable[[StageFunction], FunctionStage]:
    def decorate(function: StageFunction) -> FunctionStage:
        declared = with_idle_after(watermark, idle_after, function)
        return FunctionStage(
            function,
            name=name,
            uid=uid,
            kind=kind,
            watermark=declared,
            instances=instances,
            sink=sink,
            checks=checks,
            quarantine=quarantine,
            event_time=event_time,
        )

    return decorate if function is None else decorate(function)


def with_idle_after(watermark: Any, idle_after: float | None, function: StageFunction) -> Any:
    """The watermark that a source declares, with the idle time-out of its decorator."""
    if idle_after is None:
        return watermark
    where = f"Source {getattr(function, '__name__', function)!r} ({locate(function)})"
    if watermark is None:
        raise InvalidWatermarkError(
            f"{where}: idle_after={idle_after!r} without a watermark; only a source that declares event "
            f'time, watermark=("ts", "1 hour"), can hold back the watermark of other sources.'
        )
    if isinstance(watermark, Watermark):
        watermark = (watermark.column, watermark.lateness)
    if not isinstance(watermark, tuple | list) or len(watermark) != 2:
        return watermark  # Stage refuses it with an error
    try:
        return Watermark(watermark[0], watermark[1], idle_after)
    except InvalidWatermarkError as error:
        raise InvalidWatermarkError(f"{where}: {error}") from None
