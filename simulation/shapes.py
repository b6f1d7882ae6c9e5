"""Random pipelines: shipped `Pipeline`s of shipped `Stage`s, chained by `build_chains`, wired once and then shared.

Must not know schedules or faults. Shapes are immutable and cached: a shape costs more to make than a run of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

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
    fused_in,
    links,
    merging_in,
)

SOURCES = ("bounded", "unbounded")
DERIVED = ("map", "map", "map", "window", "totals", "buffer", "union", "broadcast")
KEY_GROUPS = 128
STATE_PARTITIONS = 12  # each number of instances divides it
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
        fan_in: whether the first sources have one instance each, and one stage of one instance reads them.
        regions: number of pipelines, side by side, that make up one.
        split: probability that a source is a split source: of a bounded, and of an unbounded one.
        static: probability that a stage reads a bounded one as a static input.
        refused: probability that a stage refuses rows, which another stage commits.

    Wide pipelines are rare: with 3 or 4 instances a stage, a world has nearly twice as many steps, which find fewer faults.
    """

    stages: tuple[int, ...] = (2, 6, 6, 3, 1)
    instances: tuple[int, ...] = (12, 10, 2, 1)
    bounded: float = 0.6
    derived: tuple[str, ...] = DERIVED
    fan_in: bool = False
    regions: int = 1
    split: tuple[float, float] = (0.25, 0.0)
    static: float = 0.15
    refused: float = 0.0


ANY = Family()
STATEFUL = Family(
    (0, 2, 1), (0, 1, 1), 0.3, ("window", "window", "totals", "totals", "buffer", "buffer", "union", "union", "broadcast")
)
"""Pipelines with state to redistribute, and mostly unbounded sources."""
IN_FLIGHT = Family(
    (0, 2, 2), (0, 1, 1), 0.5, ("map", "window", "totals", "totals", "buffer", "union", "broadcast"), split=(0.2, 0.2), static=0.4
)
"""Pipelines whose channels hold elements at a checkpoint that is restored with other instances."""
ENDING = Family((0, 2, 1), (0, 1, 1), 0.85, ("map", "map", "window", "totals", "buffer", "broadcast", "broadcast"))
"""Pipelines whose instances end one after the other."""
APART = Family(
    (0, 2, 1), (0, 2, 3), 0.9, ("map", "buffer", "buffer", "buffer", "broadcast", "totals", "window"), split=(0.0, 0.0)
)
"""Pipelines whose instances end one after the other, and that are restored with other instances meanwhile."""
FAN_IN = Family((4, 3, 1), (3, 1), 0.6, ("map", "window", "window", "totals", "buffer", "union", "broadcast"), fan_in=True)
"""Pipelines with fused sources, and up to two stages more."""
SPLITS = Family((4, 3, 1), (0, 3, 1), 0.6, ("map", "map", "totals", "buffer"), split=(0.9, 0.9))
"""Small pipelines with split sources."""

REFUSED = Family((0, 4, 3, 1), (4, 3, 1), 0.4, refused=0.6)
"""Pipelines of stages with a quarantine."""
REGIONS = Family((4, 4, 1), (4, 1), 0.4, ("map", "window", "totals", "buffer", "union"), regions=2)
"""Pipelines of two parts that no edge connects."""


class InputSpec(msgspec.Struct, frozen=True):
    """One input of a stage: the number of the stage that it reads, and the shipped input."""

    source: int
    how: StageInput

    @property
    def static(self) -> bool:
        return self.how.mode == "static"

    @property
    def keyed(self) -> bool:
        return self.how.key is not None


class StageSpec(msgspec.Struct, frozen=True):
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
    """Whether it is a split source, whose enumerator assigns splits one at a time."""
    backwards: bool = False
    """Whether the names of its instances are in the opposite order: instances of sources are known by name."""
    apart: bool = False
    """Whether it handles its micro-batches itself, so that its chain ends with it."""
    rerouted: bool = False
    """Whether its rows are routed by key, and were not in earlier versions of the pipeline."""

    def records_of(self, split: int) -> int:
        return max(self.records - 2 * split, 0)

    @property
    def state_partitions(self) -> int | None:
        """Of every second stage by key: the number of its key groups, which are then its state partitions."""
        streams = [each for each in self.inputs if not each.static]
        whole = streams and all(i.keyed for i in streams) and streams[0].source % 2 == 0 and not self.rerouted
        return STATE_PARTITIONS if whole else None

    @property
    def key_groups(self) -> int:
        return self.state_partitions or KEY_GROUPS

    @property
    def names(self) -> list[str]:
        return [str(n) for n in (reversed(range(self.instances)) if self.backwards else range(self.instances))]

    @property
    def is_source(self) -> bool:
        return self.kind in SOURCES


class _Plain(Stage):
    def transform(self, context: StageContext, **inputs: Any) -> Any:
        raise AssertionError("simulated stages are run by `operators`")


class _Flushing(_Plain):
    def finish(self) -> Any:
        raise AssertionError("simulated stages are run by `operators`")


class _Split(_Plain):
    split_interval = 5.0


class _Apart(_Plain):
    def process_batch(self, batch: Any, batch_id: int) -> Any:
        raise AssertionError("simulated stages are run by `operators`")


class _Refused(_Plain):
    takes_refused_rows = True


class _Sink:
    supported_output_modes = frozenset({"append"})


class ChannelSpec(msgspec.Struct, frozen=True):
    """A channel between two tasks.

    Attributes:
        edge: number of the edge, from 1.
        keyed: whether rows are distributed by key over the channels of the same edge and producer.
        groups: number of key groups of the stage that reads.
        refused: whether it carries the rows that the producer refuses.
    """

    id: ChannelId
    name: str
    edge: int
    producer: TaskId
    consumer: TaskId
    static: bool
    keyed: bool
    groups: int
    refused: bool = False


class TaskSpec(msgspec.Struct, frozen=True):
    """One task: its stages by number, its channels by number."""

    id: TaskId
    stages: tuple[int, ...]
    fused: int
    """Number of fused sources with which the chain begins."""
    forwards: tuple[tuple[int, int], ...]
    """For each stage but the last: the position in the chain of the stage that reads it, and the number of the edge to it."""
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

    @property
    def instances(self) -> list[tuple[str, ...]]:
        """By stage, the names of its instances."""
        return [stage.instances for stage in self.pipeline.stages]


def name_of(stage: int) -> str:
    return f"s{stage}"


def number_of(name: str) -> int:
    return int(name[1:])


def random_stages(seed: int, family: Family = ANY) -> tuple[StageSpec, ...]:
    """The stages of a pipeline of this family."""
    r = random.Random(seed)
    stages: list[StageSpec] = []
    for _ in range(family.regions):
        first = len(stages)
        for spec in _connected_stages(r, family):
            inputs = tuple([msgspec.structs.replace(i, source=i.source + first) for i in spec.inputs])
            stages.append(msgspec.structs.replace(spec, inputs=inputs) if first else spec)
    return tuple(stages)


def _connected_stages(r: random.Random, family: Family) -> tuple[StageSpec, ...]:
    count, width = (1 + r.choices(range(len(weights)), weights)[0] for weights in (family.stages, family.instances))
    specs: list[StageSpec] = _fan_in(r, family) if family.fan_in else []
    bounded: list[bool] = []
    for spec in specs:
        bounded.append(all(bounded[i.source] for i in spec.inputs) if spec.inputs else spec.kind == "bounded")
    for number in range(len(specs), len(specs) + count - family.fan_in):
        if number == 0 or r.random() < 0.28:
            specs.append(_source(r, width, family))
        else:
            specs.append(_derived(r, specs, bounded, width, family))
        bounded.append(specs[-1].kind != "unbounded" and all(bounded[i.source] for i in specs[-1].inputs))
    read = {i.source for spec in specs for i in spec.inputs}
    specs = [msgspec.structs.replace(spec, sink=number not in read or r.random() < 0.2) for number, spec in enumerate(specs)]
    for number in [number for number in range(len(specs)) if family.refused and r.random() < family.refused]:
        specs.append(StageSpec("refused", specs[number].instances, (InputSpec(number, StageInput()),), sink=True))
    return tuple(specs)


def _fan_in(r: random.Random, family: Family) -> list[StageSpec]:
    """Two or three sources, and the stage that reads them, some through a stage that passes their rows on."""
    specs = [msgspec.structs.replace(_source(r, 1, family), enumerated=False) for _ in range(r.choice((2, 2, 3)))]
    read = []
    for number in range(len(specs)):
        read.append(number)
        while r.random() < 0.3:
            specs.append(StageSpec("map", 1, (InputSpec(read[-1], StageInput()),)))
            read[-1] = len(specs) - 1
    if len(read) > 2 and r.random() < 0.5:
        specs.append(StageSpec("map", 1, tuple(InputSpec(number, StageInput()) for number in read[:2])))
        read[:2] = [len(specs) - 1]
    return [*specs, StageSpec(r.choice(family.derived), 1, tuple(InputSpec(number, StageInput()) for number in read))]


def _source(r: random.Random, width: int, family: Family) -> StageSpec:
    kind = "bounded" if r.random() < family.bounded else "unbounded"
    instances = _instances(r, width)
    splits = instances + (r.random() < 0.2)
    often = family.split[SOURCES.index(kind)]
    enumerated = often > 0 and r.random() < often
    if enumerated:
        splits = r.randint(1, 2 * instances)
    return StageSpec(kind, instances, records=r.choice((0, 1, 2, 3, 4, 5, 6)), splits=splits, enumerated=enumerated)


def _derived(r: random.Random, specs: Sequence[StageSpec], bounded: Sequence[bool], width: int, family: Family) -> StageSpec:
    unread = [n for n in range(len(specs)) if all(i.source != n for s in specs for i in s.inputs)]
    pool = unread if unread and r.random() < 0.8 else list(range(len(specs)))
    sources = r.sample(pool, min(len(pool), r.choices((1, 2, 3), (6, 3, 1))[0]))
    kind = r.choice(family.derived)
    instances = specs[sources[0]].instances if r.random() < 0.5 else _instances(r, width)
    keyed = kind in ("window", "totals")
    inputs = []
    for source in sources:
        static = bounded[source] and r.random() < family.static
        pointwise_fits = specs[source].instances != instances or r.random() < 0.8
        all_to_all = static or keyed or not pointwise_fits or r.random() < 0.3
        if keyed and instances == 1 and r.random() < 0.5:
            all_to_all = False
        if static:
            how = StageInput(mode="static")
        elif keyed and all_to_all:
            how = StageInput(key="key")
        else:
            # Several sources in one query are what the family of fan-ins is for.
            how = StageInput(edge="all_to_all" if all_to_all else "pointwise", fuse=False if len(sources) > 1 else None)
        inputs.append(InputSpec(source, how))
    return StageSpec(kind, instances, tuple(inputs))


def _instances(r: random.Random, width: int) -> int:
    return width if r.random() < 0.5 else r.randint(1, width)


def rescaled(shape: Shape, seed: int, same_sources: float = 0.0) -> Shape | None:
    """The same pipeline with other numbers of instances, in the same chains; None if the random choice gives none.

    Args:
        shape: the pipeline.
        seed: the seed of the choice.
        same_sources: probability that a source keeps its instances.
    """
    r = random.Random(seed)
    of: dict[str, int] = {}
    backwards = r.random() < 0.3
    for chain in shape.chains:
        specs = [shape.stages[number_of(name)] for name in chain.stages]
        # A keyed stage with an input that is not keyed can have only one instance.
        alone = any(spec.kind in ("window", "totals") and not all(i.keyed or i.static for i in spec.inputs) for spec in specs)
        alone = alone or bool(fused_in(shape.pipeline, chain.stages))
        before = len(chain.instances)
        instances = 1 if alone else before if r.random() < (0.1 if same_sources else 0.3) else r.randint(1, 3)
        if specs[0].is_source and not specs[0].enumerated and r.random() < 0.8:
            instances = max(instances, before)  # a restore refuses to leave out an instance that reads
        if specs[0].is_source and same_sources and r.random() < same_sources:
            instances = before
        of.update(dict.fromkeys(chain.stages, instances))
    stages = tuple(
        msgspec.structs.replace(spec, instances=of[name_of(number)], backwards=backwards)
        for number, spec in enumerate(shape.stages)
    )
    changed = shape_of(stages, shape.pipeline.chaining)
    same = [chain.stages for chain in changed.chains] == [chain.stages for chain in shape.chains]
    return changed if same and stages != shape.stages else None


def divided(shape: Shape, seed: int) -> Shape | None:
    """The same pipeline, so that a restore divides some of its chains; None if none can be.

    Stages inside a chain end it. Or sources are not to be fused any more, and then the stage at which they meet may also have
    several instances, to which rows are routed by key.
    """
    r = random.Random(seed)
    inside = [name for chain in shape.chains for name in chain.stages[:-1] if not shape.stages[number_of(name)].enumerated]
    if not inside:
        return None
    ends = set(r.sample(inside, r.randint(1, len(inside))))
    stages = [msgspec.structs.replace(spec, apart=name_of(n) in ends) for n, spec in enumerate(shape.stages)]
    for chain in shape.chains:
        if fused_in(shape.pipeline, chain.stages) and r.random() < 0.6:
            _meet_behind_channels(r, shape, chain, stages)
    found = shape_of(tuple(stages), shape.pipeline.chaining)
    # With other instances, a stage may fit into the chain in front of it, which it has not shared: a restore joins none.
    joined = any(not any(set(part.stages) <= set(chain.stages) for chain in shape.chains) for part in found.chains)
    return None if joined else found


def _meet_behind_channels(r: random.Random, shape: Shape, chain: Chain, stages: list[StageSpec]) -> None:
    merging = merging_in(shape.pipeline, chain.stages)
    assert merging is not None
    first, *others = [number_of(name) for name in chain.stages[chain.stages.index(merging) :]]
    stateful = any(stages[number].kind in ("window", "totals") for number in others)  # by key, of a stage without one
    instances = 1 if stateful else r.choice((1, 2, 3))
    how = StageInput(fuse=False) if instances == 1 else StageInput(key="key")
    inputs = tuple(msgspec.structs.replace(each, how=how) for each in stages[first].inputs)
    stages[first] = msgspec.structs.replace(stages[first], inputs=inputs, rerouted=instances > 1)
    for number in (first, *others):
        stages[number] = msgspec.structs.replace(stages[number], instances=instances)


def with_instances_of(shape: Shape, before: Shape) -> Shape:
    """A pipeline whose chains are divided, with the instances that it had before."""
    if shape.instances == before.instances:
        return shape
    stages = []
    for spec, old in zip(shape.stages, before.stages, strict=True):
        how = StageInput(fuse=False)
        inputs = tuple(msgspec.structs.replace(each, how=how) for each in old.inputs) if spec.rerouted else spec.inputs
        stages.append(
            msgspec.structs.replace(spec, instances=old.instances, backwards=old.backwards, inputs=inputs, rerouted=False)
        )
    return shape_of(tuple(stages), shape.pipeline.chaining)


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
            groups = stages[number_of(group.edge.target)].key_groups
            refused = group.edge.refused
            spec = ChannelSpec(identity, str(identity), edge, group.producer, consumer, group.static, keyed, groups, refused)
            channels.append(spec)
        outputs[group.producer].append(tuple(range(first, len(channels))))
    tasks = []
    for vertex in graph.vertices:
        own = tuple(map(number_of, vertex.stages))
        inside = links(vertex.stages, {name: pipeline.upstream(name) for name in vertex.stages[1:]})
        forwards = tuple((vertex.stages.index(reader), numbers[source, reader]) for source, reader in inside)
        ids = [TaskId(vertex.name, index) for index in range(vertex.parallelism)]
        tasks += [TaskSpec(id, own, vertex.fused, forwards, tuple(inputs[id]), tuple(outputs[id])) for id in ids]
    return Shape(stages, pipeline, chains, graph, tuple(tasks), tuple(channels))


_MADE: dict[str, type[Stage]] = {"totals": _Flushing, "buffer": _Flushing, "refused": _Refused}


@lru_cache(maxsize=4096)
def _stage(number: int, spec: StageSpec) -> Stage:
    made = _Split if spec.enumerated else _Apart if spec.apart else _MADE.get(spec.kind, _Plain)
    return made(
        name_of(number),
        uid=f"u{number}" if number % 2 else None,  # as if the stage had been renamed
        inputs={name_of(i.source): i.how for i in spec.inputs},
        instances=spec.names,
        sink=_Sink() if spec.sink else None,
        watermark=("ts", "1 second") if spec.is_source else None,
        state_partitions=spec.state_partitions,
        kind=StageKind(f"{spec.kind}_source") if spec.is_source else StageKind.DERIVED,
    )
