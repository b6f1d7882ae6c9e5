"""The time to write and read a checkpoint's metadata, and to redistribute state to other instances, by size."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

from bench.environment import BenchFailed, Environment
from bench.measures import Measure, below
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    OperatorState,
    QuerySnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.rescaled_instances import redistribute_lists
from dagster_checkpoints.state.restore import validate_restore

METADATA = "Metadata of a checkpoint"
REDISTRIBUTION = "Redistribution of state"
SIZES = ((10, 100), (100, 100), (100, 1_000))  # stages, instances of each
LIMIT_MS = 1_000.0
LINEAR = 20.0  # ten times the instances may take twice as long per instance: caches are finite
ITEMS = 100_000

T = TypeVar("T")


def measure_metadata(environment: Environment) -> Iterator[Measure]:
    """Encoding and decoding, in memory; each instance with two state files, a channel, a list state, a transaction."""
    took: dict[str, list[float]] = {"written": [], "read": []}
    for stages, instances in SIZES:
        metadata = checkpoint(stages, instances)
        size = f"{stages * instances:,} instances ({stages:,} x {instances:,})"
        limit = LIMIT_MS if (stages, instances) == SIZES[-1] else None
        data, written = _timed(partial(encode, metadata))
        decoded, read = _timed(partial(decode, data, "the bench"))
        if decoded != metadata:
            raise BenchFailed("the metadata that was read differs from the metadata that was written")
        for done, seconds in (("written", written), ("read", read)):
            took[done].append(seconds)
            yield _within(METADATA, f"{size} {done}", seconds, limit, f"{len(data) / 1e6:.1f} MB")
        _, checked = _timed(partial(validate_restore, _View(metadata), metadata))
        yield _within(METADATA, f"{size} validated", checked, None)
    for done, seconds_by_size in took.items():
        ratio = seconds_by_size[-1] / seconds_by_size[-2]
        yield below(METADATA, f"time with 10 times the instances / time, {done}", ratio, "", LINEAR)


def measure_redistribution(environment: Environment) -> Iterator[Measure]:
    """List items, from 300 instances to 450 and to 200."""
    lists = [{"a": list(range(i, ITEMS, 600)), "b": list(range(300 + i, ITEMS, 600))} for i in range(300)]
    for parallelism in (450, 200):
        items, seconds = _timed(partial(redistribute_lists, lists, parallelism))
        if sum(len(state) for states in items for state in states.values()) != ITEMS:
            raise BenchFailed("list items were lost")
        yield _within(REDISTRIBUTION, f"{ITEMS:,} list items, 300 -> {parallelism} instances", seconds, LIMIT_MS)


def checkpoint(stages: int, instances: int) -> CheckpointMetadata:
    """Metadata of a line of stages, every instance with state."""
    names = tuple(str(i) for i in range(instances))
    return CheckpointMetadata(
        "bench",
        7,
        stages=tuple(StageMetadata(f"stage_{s}", instances, names) for s in range(stages)),
        chains=tuple(
            ChainMetadata(f"stage_{s}", (f"stage_{s}",), {i: _task(s, i) for i in range(instances)}) for s in range(stages)
        ),
    )


def _task(stage: int, index: int) -> TaskSnapshot:
    name = f"stage_{stage}"
    state = StageInstanceSnapshot((OperatorState("seen", "list", (b"an item",)),), (f'{{"staging":"{name}/{index}"}}',), index)
    files = tuple(
        StateFile(f"state/0/{part}/42.zip", hashlib.sha256(b"%d %d %d" % (stage, index, part)).hexdigest(), 4_096, 3)
        for part in (0, 1)
    )
    channel = ChannelSnapshot(f"stage_{stage - 1}[{index}]->{name}[{index}]", 42, watermark=1_385_856_000_000)
    return TaskSnapshot({name: state}, QuerySnapshot(41, files), (channel,), watermark=1_385_856_000_000)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of a checkpoint's pipeline."""

    name: str
    uid: str
    instances: tuple[str, ...]
    split_interval: float | None = None
    state_partitions: int | None = None


class _View:
    """The pipeline of a checkpoint, without edges."""

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self.name = metadata.pipeline
        self.stages = [_Stage(stage.name, stage.name, stage.instances) for stage in metadata.stages]
        self.edges = ()


def _within(part: str, what: str, seconds: float, limit: float | None, note: str = "") -> Measure:
    milliseconds = 1000 * seconds
    return (
        Measure(part, what, milliseconds, "ms", note=note)
        if limit is None
        else below(part, what, milliseconds, "ms", limit, note)
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work`, and the median duration of three calls in seconds."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - began)
    return result, median(times)
