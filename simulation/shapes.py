"""Random pipelines: shipped `Pipeline`s of shipped `Stage`s, chained by `build_chains`, wired once and then shared.

Must not know schedules or faults. Shapes are immutable and cached: a shape costs more to make than a run of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from dagster_checkpoints.pipeline import (
    Chain,
    ChannelId,
    ExecutionGraph,
    Pipeline,
    Stage,
    StageContext,
    StageInput,
    StageKind,
    TaskId,
    build_chains,
    channel_groups,
    execution_graph,
)

SOURCES = ("bounded", "unbounded")
DERIVED = ("map", "map", "map", "window", "totals", "buffer", "union", "broadcast")
EDGES = 32
"""Upper limit of the number of edges of a pipeline, exclusive."""


@dataclass(frozen=True)
class Family:
    """The distribution of random pipelines.

    Attributes:
        stages: weights of the numbers of stages 1, 2, ...
        instances: weights of the maximum numbers of instances 1, 2, ...
        bounded: probability that a source is bounded.
        derived: the kinds of the other stages, equally probable.
    """

    stages: tuple[int, ...] = (2, 6, 6, 3, 1, 1)
    instances: tuple[int, ...] = (5, 4, 1, 1)
    bounded: float = 0.6
    derived: tuple[str, ...] = DERIVED


ANY = Family()
STATEFUL = Family(
    (0, 2, 1), (0, 1, 1), 0.3, ("window", "window", "totals", "totals", "buffer", "buffer", "union", "union", "broadcast")
)
"""Pipelines with state to redistribute, and mostly unbounded sources."""
ENDING = Family((0, 2, 1), (0, 1, 1), 0.85, ("map", "map", "window", "totals", "buffer", "broadcast", "broadcast"))
"""Pipelines whose instances end one after the other."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a stage: the number of the stage that it reads, and the shipped input."""

    source: int
    how: StageInput

    @property
    def static(self) -> bool:
        return self.how.mode == "static"

    @property
    def keyed(self) -> bool:
        return self.how.key is not None


@dataclass(frozen=True)
class StageSpec:
    """One stage, by its number; `inputs` name earlier ones."""

    kind: str
    instances: int
    inputs: tuple[InputSpec, ...] = ()
    sink: bool = False
    records: int = 0
    """Records of the first split of a source; each further split has two fewer."""
    splits: int = 0
    """Number of splits of a source, which are distributed over its instances."""
    enumerated: bool = False
    """Whether splits are assigned one at a time, to an instance that has none left."""

    def records_of(self, split: int) -> int:
        return max(self.records - 2 * split, 0)

    @property
    def is_source(self) -> bool:
        return self.kind in SOURCES


class _Plain(Stage):
    def transform(self, context: StageContext, **inputs: Any) -> Any:
        raise AssertionError("simulated stages are run by `operators`")


class _Flushing(_Plain):
    def finish(self) -> Any:
        raise AssertionError("simulated stages are run by `operators`")


class _Sink:
    supported_output_modes = frozenset({"append"})


@dataclass(frozen=True)
class ChannelSpec:
    """A channel between two tasks.

    Attributes:
        edge: number of the edge, from 1.
        keyed: whether rows are distributed by key over the channels of the same edge and producer.
    """

    id: ChannelId
    name: str
    edge: int
    producer: TaskId
    consumer: TaskId
    static: bool
    keyed: bool


@dataclass(frozen=True)
class TaskSpec:
    """One task: its stages by number, its channels by number."""

    id: TaskId
    stages: tuple[int, ...]
    edges: tuple[int, ...]
    """For each stage, the number of the edge inside the chain that leads to it; 0 for the first."""
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    """By edge to another task, the channels to its instances."""


@dataclass(frozen=True, eq=False)
class Shape:
    """A pipeline and the values derived from it."""

    stages: tuple[StageSpec, ...]
    pipeline: Pipeline
    chains: tuple[Chain, ...]
    graph: ExecutionGraph
    tasks: tuple[TaskSpec, ...]
    channels: tuple[ChannelSpec, ...]


def name_of(stage: int) -> str:
    return f"s{stage}"


def number_of(name: str) -> int:
    return int(name[1:])


def random_stages(seed: int, family: Family = ANY) -> tuple[StageSpec, ...]:
    """The stages of a pipeline of this family."""
    r = random.Random(seed)
    count, width = (1 + r.choices(range(len(weights)), weights)[0] for weights in (family.stages, family.instances))
    specs: list[StageSpec] = []
    bounded: list[bool] = []
    for number in range(count):
        if number == 0 or r.random() < 0.28:
            specs.append(_source(r, width, family.bounded))
        else:
            specs.append(_derived(r, specs, bounded, width, family.derived))
        bounded.append(specs[-1].kind != "unbounded" and all(bounded[i.source] for i in specs[-1].inputs))
    read = {i.source for spec in specs for i in spec.inputs}
    return tuple(replace(spec, sink=number not in read or r.random() < 0.2) for number, spec in enumerate(specs))


def _source(r: random.Random, width: int, bounded: float) -> StageSpec:
    kind = "bounded" if r.random() < bounded else "unbounded"
    instances = _instances(r, width)
    splits = instances + (r.random() < 0.2)
    enumerated = kind == "bounded" and r.random() < 0.25
    if enumerated:
        splits = r.randint(1, 2 * instances)
    return StageSpec(kind, instances, records=r.choice((0, 1, 2, 3, 4, 6, 8)), splits=splits, enumerated=enumerated)


def _derived(
    r: random.Random, specs: Sequence[StageSpec], bounded: Sequence[bool], width: int, kinds: Sequence[str]
) -> StageSpec:
    unread = [n for n in range(len(specs)) if all(i.source != n for s in specs for i in s.inputs)]
    pool = unread if unread and r.random() < 0.8 else list(range(len(specs)))
    sources = r.sample(pool, min(len(pool), r.choices((1, 2, 3), (6, 3, 1))[0]))
    kind = r.choice(kinds)
    instances = specs[sources[0]].instances if r.random() < 0.5 else _instances(r, width)
    keyed = kind in ("window", "totals")
    inputs = []
    for source in sources:
        static = bounded[source] and r.random() < 0.15
        pointwise_fits = specs[source].instances != instances or r.random() < 0.8
        all_to_all = static or keyed or not pointwise_fits or r.random() < 0.3
        if keyed and instances == 1 and r.random() < 0.5:
            all_to_all = False
        if static:
            how = StageInput(mode="static")
        elif keyed and all_to_all:
            how = StageInput(key="key")
        else:
            how = StageInput(edge="all_to_all" if all_to_all else "pointwise")
        inputs.append(InputSpec(source, how))
    return StageSpec(kind, instances, tuple(inputs))


def _instances(r: random.Random, width: int) -> int:
    return width if r.random() < 0.5 else r.randint(1, width)


def rescaled(shape: Shape, seed: int) -> Shape | None:
    """The same pipeline with other numbers of instances, in the same chains; None if the random choice gives none."""
    r = random.Random(seed)
    of: dict[str, int] = {}
    for chain in shape.chains:
        specs = [shape.stages[number_of(name)] for name in chain.stages]
        # A keyed stage with an input that is not keyed can have only one instance.
        alone = any(spec.kind in ("window", "totals") and not all(i.keyed or i.static for i in spec.inputs) for spec in specs)
        of.update(dict.fromkeys(chain.stages, 1 if alone else len(chain.instances) if r.random() < 0.3 else r.randint(1, 4)))
    stages = tuple(replace(spec, instances=of[name_of(number)]) for number, spec in enumerate(shape.stages))
    changed = shape_of(stages, shape.pipeline.chaining)
    same = [chain.stages for chain in changed.chains] == [chain.stages for chain in shape.chains]
    return changed if same and stages != shape.stages else None


@lru_cache(maxsize=4096)
def shape_of(stages: tuple[StageSpec, ...], chaining: bool) -> Shape:
    """Build and wire the pipeline."""
    pipeline = Pipeline("simulated", [_stage(n, spec) for n, spec in enumerate(stages)], chaining=chaining)
    chains = build_chains(pipeline)
    graph = execution_graph(pipeline, chains)
    assert len(pipeline.edges) < EDGES
    numbers = {(edge.source, edge.target): number for number, edge in enumerate(pipeline.edges, 1)}
    channels: list[ChannelSpec] = []
    inputs: dict[TaskId, list[int]] = {task: [] for task in graph.tasks()}
    outputs: dict[TaskId, list[tuple[int, ...]]] = {task: [] for task in inputs}
    for group in channel_groups(pipeline, chains):
        edge, first = numbers[group.edge.source, group.edge.target], len(channels)
        for consumer, identity in group.channels.items():
            inputs[consumer].append(len(channels))
            keyed = group.key is not None
            channels.append(ChannelSpec(identity, str(identity), edge, group.producer, consumer, group.static, keyed))
        outputs[group.producer].append(tuple(range(first, len(channels))))
    tasks = []
    for vertex in graph.vertices:
        own = tuple(map(number_of, vertex.stages))
        edges = (0, *map(numbers.__getitem__, pairwise(vertex.stages)))
        ids = [TaskId(vertex.name, index) for index in range(vertex.parallelism)]
        tasks += [TaskSpec(id, own, edges, tuple(inputs[id]), tuple(outputs[id])) for id in ids]
    return Shape(stages, pipeline, chains, graph, tuple(tasks), tuple(channels))


@lru_cache(maxsize=4096)
def _stage(number: int, spec: StageSpec) -> Stage:
    made = _Flushing if spec.kind in ("totals", "buffer") else _Plain
    return made(
        name_of(number),
        inputs={name_of(i.source): i.how for i in spec.inputs},
        instances=[str(i) for i in range(spec.instances)],
        sink=_Sink() if spec.sink else None,
        kind=StageKind(f"{spec.kind}_source") if spec.is_source else StageKind.DERIVED,
    )
