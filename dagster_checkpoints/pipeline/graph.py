"""A pipeline: stages put together into a directed acyclic graph, checked as a whole.

PROTOCOL section 1. Derives what the graph alone determines: order, edges, boundedness, event-time columns.
Must not know chains, tasks or Spark.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dagster_checkpoints.pipeline.edges import EdgePattern, StageInput
from dagster_checkpoints.pipeline.errors import (
    DuplicateStageError,
    DuplicateUidError,
    EmptyPipelineError,
    InstancesMismatchError,
    InvalidWatermarkError,
    NotAStageError,
    OutputModeError,
    OverlappingSinksError,
    StageCycleError,
    UnboundedSinkError,
    UnboundedStaticInputError,
    UnknownStageError,
    UnusedStageError,
)
from dagster_checkpoints.pipeline.names import check_name, suggestion
from dagster_checkpoints.pipeline.refused_rows import with_refused_rows
from dagster_checkpoints.pipeline.stages import Stage, StageKind


@dataclass(frozen=True)
class StageEdge:
    """One stage reads another.

    Args:
        source: Name of the upstream stage.
        target: Name of the downstream stage.
        input: The options of the target's input.
        pattern: Which instances the edge joins.
        refused: Whether it carries the rows that the source's quarantine refuses, and not those that it passes.
    """

    source: str
    target: str
    input: StageInput
    pattern: EdgePattern
    refused: bool = False


class Pipeline:
    """Stages that run together under one checkpoint.

    Args:
        name: Name of the pipeline: letters, digits and underscores; part of the path of its checkpoints.
        stages: The stages, in any order. The attribute `stages` has them in topological order, with the stages of refused rows
            (:class:`Quarantine`); among stages that do not depend on each other the given order is kept.
        chaining: Whether stages may share a Spark query (DESIGN "Chains").

    Raises:
        PipelineDefinitionError: The graph cannot run; the subclass names the mistake.
    """

    def __init__(self, name: str, stages: Iterable[Stage], chaining: bool = True) -> None:
        self.name = check_name("pipeline", name)
        self.chaining = chaining
        if not isinstance(stages, Iterable):
            raise NotAStageError(f"Pipeline {name!r}: expected a list of stages, such as [history, sales], found {stages!r}.")
        self._by_name = _by_name(name, with_refused_rows(stages))
        self._check_inputs_exist()
        self.stages: tuple[Stage, ...] = _topological_order(self._by_name)
        self.edges: tuple[StageEdge, ...] = tuple(
            _edge(self._by_name[source], target, options) for target in self.stages for source, options in target.inputs.items()
        )
        self._downstream = self._consumers()
        self._bounded: dict[str, bool] = {}
        self._event_time: dict[str, str | None] = {}
        self._lateness_ms: dict[str, int | None] = {}
        for each in self.stages:
            self._derive(each)
        self._check_static_inputs_end()
        for each in self.stages:
            _check_output(each, [name for name in self._downstream[each.name] if not self._by_name[name].takes_refused_rows])
            self._check_bounded_sink(each)
        _check_sinks_apart(self.stages)

    def stage(self, name: str) -> Stage:
        """The stage called `name`.

        Raises:
            UnknownStageError: The pipeline has no stage of this name.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownStageError(f"Pipeline {self.name!r} has no stage {name!r}. {suggestion(name, self._by_name)}") from None

    def upstream(self, name: str) -> tuple[str, ...]:
        """The stages that stage `name` reads, in the order of its inputs."""
        return tuple(self.stage(name).inputs)

    def downstream(self, name: str) -> tuple[str, ...]:
        """The stages that read stage `name`, as streams or as tables, in topological order."""
        return self._downstream[self.stage(name).name]

    def is_bounded(self, name: str) -> bool:
        """Whether stage `name` ends by itself: a bounded source, or all of its inputs are bounded."""
        return self._bounded[self.stage(name).name]

    @property
    def bounded(self) -> bool:
        """Whether the pipeline ends by itself: all of its stages are bounded."""
        return all(self._bounded.values())

    @property
    def unbounded_streams(self) -> int:
        """The number of sources that a query asks for rows until a request ends them; a split source has other queries."""
        return sum(stage.kind is StageKind.UNBOUNDED_SOURCE and stage.split_interval is None for stage in self.stages)

    def event_time(self, name: str) -> str | None:
        """The event-time column of the stage's output; None if it has none.

        For a source it is the watermark's column. For another stage it is the column of `event_time`, else the event-time column
        of the first streaming input that has one.
        """
        return self._event_time[self.stage(name).name]

    def event_time_lateness_ms(self, name: str) -> int | None:
        """Milliseconds by which rows at the stage may be late; None where no watermark reaches it.

        It is the largest lateness of the sources whose watermark reaches the stage over streaming inputs, plus the lateness that
        the stages on the way declare, this one included (`event_time=(column, lateness)`).
        """
        return self._lateness_ms[self.stage(name).name]

    def carries_watermark(self, name: str) -> bool:
        """Whether a watermark declared at some source reaches the stage over streaming inputs."""
        return self.event_time_lateness_ms(name) is not None

    def __repr__(self) -> str:
        return f"<Pipeline {self.name!r} of {', '.join(stage.name for stage in self.stages)}>"

    def _check_inputs_exist(self) -> None:
        for each in self._by_name.values():
            for source in each.inputs:
                if source not in self._by_name:
                    raise UnknownStageError(
                        f"{each.where} reads {source!r}, but pipeline {self.name!r} has no stage of that "
                        f"name. {suggestion(source, self._by_name)} The name of a parameter is the stage that it "
                        f"reads; every stage must be in the pipeline's list."
                    )

    def _consumers(self) -> dict[str, tuple[str, ...]]:
        consumers: dict[str, list[str]] = {stage.name: [] for stage in self.stages}
        for edge in self.edges:
            consumers[edge.source].append(edge.target)
        return {name: tuple(targets) for name, targets in consumers.items()}

    def _derive(self, stage: Stage) -> None:
        """Derive the stage's boundedness, event-time column and lateness from its upstream stages, derived before."""
        if stage.kind.is_source:
            self._bounded[stage.name] = stage.kind is StageKind.BOUNDED_SOURCE
            self._event_time[stage.name] = stage.watermark.column if stage.watermark else None
            self._lateness_ms[stage.name] = stage.watermark.lateness_ms if stage.watermark else None
            return
        # Refused rows have no event time: it may be what is wrong with them.
        streams = [name for name, how in stage.inputs.items() if how.mode == "stream" and not stage.takes_refused_rows]
        columns = [self._event_time[name] for name in streams]
        lateness = [ms for name in streams if (ms := self._lateness_ms[name]) is not None]
        self._bounded[stage.name] = all(self._bounded[name] for name in stage.inputs)
        self._event_time[stage.name] = stage.event_time_column or next(filter(None, columns), None)
        self._lateness_ms[stage.name] = max(lateness) + stage.event_time_lateness_ms if lateness else None
        if stage.event_time_lateness_ms and not lateness:
            raise InvalidWatermarkError(
                f"{stage.where}: event_time={stage.event_time!r} says by how much its rows may be older than the watermark of "
                "its input, but no watermark reaches it. Declare watermark= at a source that it reads as a stream, or leave the "
                "lateness out."
            )

    def _check_static_inputs_end(self) -> None:
        for edge in self.edges:
            if edge.input.mode == "static" and not self._bounded[edge.source]:
                raise UnboundedStaticInputError(
                    f"{self._by_name[edge.target].where} reads {edge.source!r} as a static input, which "
                    f"waits for its end, but {edge.source!r} is "
                    f"unbounded{self._unbounded_because(edge.source)}. Read it with "
                    f'mode="stream", or make it bounded.'
                )

    def _check_bounded_sink(self, stage: Stage) -> None:
        if getattr(stage.sink, "bounded_only", False) and not self._bounded[stage.name]:
            raise UnboundedSinkError(
                f"{stage.where}: its sink {stage.sink} is for a stage that ends, but {stage.name!r} is "
                f"unbounded{self._unbounded_because(stage.name)}. Use another setting of the sink, or make the stage bounded."
            )

    def _unbounded_because(self, name: str) -> str:
        origin = name
        while not self._by_name[origin].kind.is_source:
            origin = next(source for source in self.upstream(origin) if not self._bounded[source])
        return "" if origin == name else f" (it reads the unbounded source {origin!r})"


def _by_name(pipeline: str, stages: Sequence[object]) -> dict[str, Stage]:
    if not stages:
        raise EmptyPipelineError(f"Pipeline {pipeline!r} has no stages; it needs at least one source with a sink.")
    by_name: dict[str, Stage] = {}
    by_uid: dict[str, Stage] = {}
    for number, each in enumerate(stages):
        if not isinstance(each, Stage):
            raise NotAStageError(
                f"Pipeline {pipeline!r}: item {number} of its stages is {each!r}; expected a stage. "
                f"Decorate a function with @stage, @bounded_source or @unbounded_source; instantiate a "
                f"subclass of Stage."
            )
        if not each._defined:
            raise NotAStageError(
                f"Pipeline {pipeline!r}: item {number} of its stages is a {type(each).__qualname__} whose "
                f"__init__ did not call super().__init__(...)."
            )
        if each.name in by_name:
            raise DuplicateStageError(
                f"Pipeline {pipeline!r} has two stages {each.name!r}: at {by_name[each.name].location} and "
                f"at {each.location}. Give one of them another name (name=...)."
            )
        if each.uid in by_uid:
            other = by_uid[each.uid]
            raise DuplicateUidError(
                f"Pipeline {pipeline!r}: {other.where} and {each.where} have one uid, {each.uid!r} (by default a stage's uid is "
                "its name). Checkpoints hold a stage's state under its uid: give one of them another uid=..., which no "
                "checkpoint holds if the stage is to start without state."
            )
        by_name[each.name] = by_uid[each.uid] = each
    return by_name


def _topological_order(by_name: Mapping[str, Stage]) -> tuple[Stage, ...]:
    """Upstream stages first; among independent stages the first defined one first. Kahn's algorithm."""
    position = {name: number for number, name in enumerate(by_name)}
    missing = {name: len(stage.inputs) for name, stage in by_name.items()}
    consumers: dict[str, list[str]] = {name: [] for name in by_name}
    for name, stage in by_name.items():
        for source in stage.inputs:
            consumers[source].append(name)
    ready = [position[name] for name, count in missing.items() if count == 0]  # ascending: already a heap
    names = list(by_name)
    ordered: list[Stage] = []
    while ready:
        name = names[heapq.heappop(ready)]
        ordered.append(by_name[name])
        for consumer in consumers[name]:
            missing[consumer] -= 1
            if missing[consumer] == 0:
                heapq.heappush(ready, position[consumer])
    if len(ordered) < len(by_name):
        raise _cycle(by_name, {name for name, count in missing.items() if count > 0})
    return tuple(ordered)


def _cycle(by_name: Mapping[str, Stage], blocked: set[str]) -> StageCycleError:
    """The error for a cycle: follows inputs among the blocked stages until a stage repeats."""
    walk: list[str] = []
    name = next(name for name in by_name if name in blocked)
    while name not in walk:
        walk.append(name)
        name = next(source for source in by_name[name].inputs if source in blocked)
    circle = walk[walk.index(name) :][::-1]
    begin = circle.index(next(name for name in by_name if name in circle))
    circle = circle[begin:] + circle[:begin]
    first = by_name[circle[0]]
    return StageCycleError(
        f"These stages read each other in a circle: {' -> '.join([*circle, circle[0]])}. A pipeline has no "
        f"cycles; remove one of these inputs, for instance {circle[-1]!r} from {first.where}."
    )


def _edge(source: Stage, target: Stage, options: StageInput) -> StageEdge:
    if options.mode == "static" or options.key is not None or options.edge == "all_to_all":
        return StageEdge(source.name, target.name, options, EdgePattern.ALL_TO_ALL, target.takes_refused_rows)
    # One instance on each side cannot be confused, so their names may differ.
    if source.parallelism == target.parallelism > 1 and source.instances != target.instances:
        pairs = zip(source.instances, target.instances, strict=True)
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise InstancesMismatchError(
            f"{target.where} reads {source.name!r} over a POINTWISE edge, instance by instance, which would "
            f"lead {one!r} into {other!r}: {source.name!r} has {list(source.instances)}, {target.name!r} has "
            f"{list(target.instances)}. Give both the same instances in the same order, or distribute the "
            f'rows with StageInput(edge="all_to_all") or StageInput(key=...).'
        )
    return StageEdge(source.name, target.name, options, EdgePattern.POINTWISE, target.takes_refused_rows)


def _check_output(stage: Stage, consumers: Sequence[str]) -> None:
    if stage.sink is None and not consumers:
        raise UnusedStageError(
            f"{stage.where} is read by no stage and has no sink: its output would be lost. Give it a sink, "
            f"name it as a parameter of another stage, or remove it."
        )
    if stage.output_mode == "append":
        return
    if consumers:
        raise OutputModeError(
            f'{stage.where}: output_mode="{stage.output_mode}", but {", ".join(map(repr, consumers))} reads '
            f'it; rows that replace earlier ones can only go into a sink. Use output_mode="append".'
        )
    supported: frozenset[str] = getattr(stage.sink, "supported_output_modes", frozenset({"append"}))
    if stage.output_mode not in supported:
        raise OutputModeError(
            f'{stage.where}: output_mode="{stage.output_mode}", but its sink {type(stage.sink).__name__} '
            f"supports {', '.join(sorted(supported))} only. Use a sink that upserts or overwrites, or "
            f'output_mode="append".'
        )


def _check_sinks_apart(stages: Iterable[Stage]) -> None:
    """Refuse two sinks with the same location, or one location inside the other: readers and a new start would mix their rows.

    The `location` of a sink is a path whose parts are separated by "/". A sink without one is not checked.
    """
    located = [(tuple(str(at).rstrip("/").split("/")), s) for s in stages if (at := getattr(s.sink, "location", None))]
    located.sort(key=lambda pair: pair[0])
    for (outer, one), (inner, other) in pairwise(located):
        if inner[: len(outer)] == outer:  # sorted: a location inside another one directly follows it
            inside = f"{'/'.join(inner)}, which is {'the same location' if inner == outer else 'inside the other'}"
            raise OverlappingSinksError(
                f"expected sinks in separate locations, found that the sink of {one.where} writes to {'/'.join(outer)}, and "
                f"that of {other.where} to {inside}. Readers of one would also read the other's rows. Give each sink its own "
                "path, outside of the other's."
            )
