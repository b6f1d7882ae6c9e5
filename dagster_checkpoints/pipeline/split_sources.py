"""Split sources: sources that are read in splits, which an enumerator discovers and hands out to the instances.

A split is a piece of input that is read as a whole: a file, a day, a table, a partition. It must not know how splits are handed
out (`execution.splits`), nor how they are read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from dagster_checkpoints.pipeline.checks import CheckFunction, CommitCheck
from dagster_checkpoints.pipeline.context import InputAsset, StageContext
from dagster_checkpoints.pipeline.decorators import OfFunction, with_idle_after
from dagster_checkpoints.pipeline.edges import StageInput
from dagster_checkpoints.pipeline.errors import InvalidSplitError, InvalidSplitSourceError
from dagster_checkpoints.pipeline.event_time import Watermark
from dagster_checkpoints.pipeline.quarantine import Quarantine
from dagster_checkpoints.pipeline.setting_values import no_seconds
from dagster_checkpoints.pipeline.signatures import SourceLocation, locate
from dagster_checkpoints.pipeline.stages import Stage, StageKind

if TYPE_CHECKING:
    import logging

    from pyspark.sql import DataFrame, SparkSession

DISCOVERY_SECONDS = 10.0
"""Seconds between two discoveries of an unbounded split source."""


@dataclass(frozen=True)
class DiscoveryContext:
    """What the discovery of splits needs. It runs in the driver, once for all instances.

    Args:
        spark: Spark session.
        stage: Name of the source.
        log: Logger whose lines Dagster shows with the run.
        assets: The assets that the source reads by `deps=` of `pipeline_assets`, as in :class:`StageContext`.
        bounded: Whether the source is bounded: its splits are discovered once.
    """

    spark: SparkSession
    stage: str
    log: logging.Logger
    assets: Mapping[str, InputAsset] = field(default_factory=dict)
    bounded: bool = True


class SplitSource(Stage):
    """A source that is read in splits; `split_source` makes one of a function, a subclass overrides `discover` and `read`.

    Each instance reads one split after the other. A checkpoint holds the splits that are discovered, assigned and finished: a
    finished split is never read again, and one that was not read to its end is read again from its beginning. If the source is
    bounded, its splits are those of the first complete discovery, and each instance finishes when no split is left for it.

    Args:
        schema: Columns of the rows, as text (`"day DATE, delay INT"`) or as Spark's `StructType`.
        split_type: Type of a split: `str`, or what msgspec encodes as JSON, such as a :class:`msgspec.Struct` or a `date`. Two
            splits are the same if their JSON is.
        bounded: Whether the splits are discovered once. Otherwise they are discovered every `discovery_interval`.
        discovery_interval: Seconds between two discoveries of an unbounded source, at least 0.1.
        options: Further arguments of :class:`Stage`, except `kind` and `inputs`.

    Raises:
        InvalidSplitSourceError: An argument cannot be used.
    """

    schema: Any = None
    split_type: Any = str
    bounded: bool = True
    discovery_interval: float = DISCOVERY_SECONDS

    def __init__(
        self,
        name: str | None = None,
        *,
        schema: Any = None,
        split_type: Any = None,
        bounded: bool | None = None,
        discovery_interval: float | None = None,
        **options: Any,
    ) -> None:
        self.schema = self.schema if schema is None else schema
        self.split_type = self.split_type if split_type is None else split_type
        self.bounded = self.bounded if bounded is None else bounded
        seconds = self.discovery_interval if discovery_interval is None else discovery_interval
        kind = StageKind.BOUNDED_SOURCE if self.bounded else StageKind.UNBOUNDED_SOURCE
        super().__init__(name, kind=kind, **options)
        if self.schema is None:
            raise InvalidSplitSourceError(
                f'{self.where}: expected the columns of its rows, found no schema. Set schema="day DATE, delay INT", or a '
                "StructType: the stages behind the source are planned before the first split is read."
            )
        problem = no_seconds(seconds, least=0.1)
        if problem:
            raise InvalidSplitSourceError(f"{self.where}: discovery_interval: {problem}.")
        self.split_interval = self.discovery_interval = float(seconds)
        try:
            self._decoder = msgspec.json.Decoder(self.split_type)
        except (TypeError, ValueError) as error:
            raise InvalidSplitSourceError(
                f"{self.where}: expected a type of splits that msgspec encodes as JSON, found {self.split_type!r}: {error}."
            ) from None

    def discover(self, context: DiscoveryContext) -> Iterable[Any]:
        """The splits that exist now, in the order in which they are to be read; splits that are known already are ignored.

        Called in the driver, on a thread of its own, on a copy of the stage whose `open` is not called. A list becomes known as a
        whole; of another iterable, splits are read while it still gives others.
        """
        raise NotImplementedError(f"{self.where} does not override discover")

    def read(self, context: StageContext, split: Any) -> DataFrame:
        """The rows of one split, as a batch DataFrame with the columns of `schema`; called by the instance that reads it.

        A split that was not read to its end is read again after a failure: it has to have the same rows then.
        """
        raise NotImplementedError(f"{self.where} does not override read")

    def transform(self, context: StageContext, *args: Any, **inputs: Any) -> DataFrame:
        """No rows, with the columns of `schema`: what the stages behind the source are planned with."""
        return context.spark.createDataFrame([], self.schema)

    def encode_split(self, split: Any) -> str:
        """A split as text, as checkpoints hold it.

        Raises:
            InvalidSplitError: It is not of the type of splits.
        """
        if self.split_type is str:
            if isinstance(split, str):
                return split
            raise InvalidSplitError(f"{self.where}: expected discover to give texts, found {split!r}. Set the type of splits.")
        try:
            text = msgspec.json.encode(split, order="deterministic")  # a set has another order in each process
            self._decoder.decode(text)
        except (TypeError, msgspec.MsgspecError) as error:
            raise InvalidSplitError(
                f"{self.where}: expected discover to give splits of type {self.split_type!r}, found {split!r}: {error}."
            ) from None
        return text.decode()

    def decode_split(self, text: str) -> Any:
        """The split of a text.

        Raises:
            InvalidSplitError: The text is of another type of splits: the checkpoint was taken with another.
        """
        if self.split_type is str:
            return text
        try:
            return self._decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise InvalidSplitError(
                f"{self.where}: expected a split of type {self.split_type!r} in the checkpoint, found {text!r}: {error}. Give a "
                "field that was added a default, or start without the checkpoint."
            ) from None

    def _read_inputs(self, options: Mapping[str, StageInput]) -> Mapping[str, StageInput]:
        return options  # a source has none

    def _location(self) -> SourceLocation:
        return locate(type(self).read)


ReadFunction = Callable[..., Any]
Discovery = Callable[..., Iterable[Any]] | Sequence[Any]
"""A function that gives the splits that exist now, with or without a parameter `context`; or the splits themselves.

An object that is called may have an attribute `bounded_only`: a text that says why an unbounded source cannot have it.
"""


class FunctionSplitSource(OfFunction, SplitSource):
    """A split source whose `read` is a function; made by :func:`split_source`.

    Args:
        function: The user's function, with the parameter `split`, and `context` if it needs it.
        discovery: Gives the splits.
        options: Further arguments of :class:`SplitSource`.
    """

    def __init__(self, function: ReadFunction, discovery: Discovery, **options: Any) -> None:
        self.function = function
        self._discovery = discovery
        super().__init__(**options)
        parameters = set(inspect.signature(function).parameters)
        if "split" not in parameters or not parameters <= {"context", "split"}:
            raise InvalidSplitSourceError(
                f"{self.where}: expected the parameters 'split' and, if it is needed, 'context'; found {sorted(parameters)}."
            )
        self._wants_context = "context" in parameters
        if isinstance(discovery, str) or not (callable(discovery) or isinstance(discovery, Sequence)):
            raise InvalidSplitSourceError(
                f"{self.where}: expected discover to be a function that gives splits, or a list of splits, found {discovery!r}."
            )
        if not self.bounded and not callable(discovery):
            raise InvalidSplitSourceError(
                f"{self.where}: a list of splits does not grow: expected bounded=True, or discover to be a function."
            )
        bounded_only = getattr(discovery, "bounded_only", None)
        if not self.bounded and bounded_only is not None:
            raise InvalidSplitSourceError(f"{self.where}: expected bounded=True, found bounded=False: {bounded_only}.")
        functools.update_wrapper(self, function, updated=())

    def discover(self, context: DiscoveryContext) -> Iterable[Any]:
        """Call the discovery, with `context` if it has this parameter."""
        if not callable(self._discovery):
            return self._discovery
        if "context" in inspect.signature(self._discovery).parameters:
            return self._discovery(context=context)
        return self._discovery()

    def read(self, context: StageContext, split: Any) -> DataFrame:
        """Call the function."""
        frame: DataFrame = self.function(context=context, split=split) if self._wants_context else self.function(split=split)
        return frame

    @property
    def code(self) -> list[Any]:
        """The user's functions; of an object that discovers the splits its class."""
        discovery = self._discovery if inspect.isroutine(self._discovery) else type(self._discovery)
        return [self.function, *([discovery] if callable(self._discovery) else [])]


def split_source(
    *,
    schema: Any,
    discover: Discovery,
    split_type: Any = str,
    bounded: bool = True,
    discovery_interval: float = DISCOVERY_SECONDS,
    watermark: Watermark | tuple[str, str] | None = None,
    idle_after: float | None = None,
    instances: Sequence[str] | None = None,
    sink: Any = None,
    checks: Sequence[CommitCheck | CheckFunction] | None = None,
    quarantine: Quarantine | None = None,
    name: str | None = None,
    uid: str | None = None,
) -> Callable[[ReadFunction], FunctionSplitSource]:
    """Make a split source of a function that reads one split; see :class:`SplitSource`.

    Args:
        schema: Columns of the rows, as text or as Spark's `StructType`.
        discover: The splits; or a function that gives those that exist now, with or without a parameter `context`, a
            :class:`DiscoveryContext`.
        split_type: Type of a split.
        bounded: Whether the splits are discovered once.
        discovery_interval: Seconds between two discoveries of an unbounded source.
        watermark: Event-time column and allowed lateness, such as ("ts", "1 hour").
        idle_after: Seconds without a split after which an instance no longer holds back the watermark.
        instances: Names of the parallel instances.
        sink: Where the output is committed to.
        checks: Checks of the rows that the sink commits, see :func:`commit_check`.
        quarantine: Where rows go that do not meet conditions, see :class:`Quarantine`.
        name: Name of the stage; by default the function's name.
        uid: Identity of the stage in checkpoints; by default its name. See :class:`Stage`.

    Raises:
        PipelineDefinitionError: The definition cannot be used; the subclass names the mistake.

    Examples:
        >>> @split_source(schema="day DATE, delay INT", discover=["2026-01-01", "2026-01-02"], instances=["a", "b"])
        ... def flights(context, split):
        ...     return context.spark.read.parquet(f"/data/flights/{split}")
    """

    def decorate(function: ReadFunction) -> FunctionSplitSource:
        return FunctionSplitSource(
            function,
            discover,
            name=name,
            uid=uid,
            schema=schema,
            split_type=split_type,
            bounded=bounded,
            discovery_interval=discovery_interval,
            watermark=with_idle_after(watermark, idle_after, function),
            instances=instances,
            sink=sink,
            checks=checks,
            quarantine=quarantine,
        )

    return decorate
