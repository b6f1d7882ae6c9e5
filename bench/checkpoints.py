"""The cost of a checkpoint: the time of its synchronous and asynchronous parts, its bytes, and pinning very many files."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench import throughput
from bench.environment import Environment
from bench.measures import Measure, below
from bench.variants import chained
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS
from dagster_checkpoints.spark.snapshots.query_snapshots import pin

PART = "Checkpoints"
INTERVAL = 2.0
STATE_FILES = 1_000
SYNC_LIMIT_MS = 100.0


def measure(environment: Environment) -> Iterator[Measure]:
    timed = chained(environment, throughput.input_rows(environment), INTERVAL)
    assert timed.job is not None
    done = timed.job.checkpoints
    note = f"{len(done)} checkpoints of (c), every {INTERVAL:.0f} s; median"
    yield Measure(PART, "trigger to completion", 1000 * median([c.duration for c in done]), "ms", note=note)
    yield Measure(PART, "synchronous part: the slowest task", 1000 * median([c.sync_seconds for c in done]), "ms")
    yield Measure(PART, "asynchronous part: the slowest task", 1000 * median([c.async_seconds for c in done]), "ms")
    yield Measure(PART, "new bytes", median([c.new_bytes for c in done]), "bytes")
    yield Measure(PART, "bytes it refers to", median([c.total_bytes for c in done]), "bytes")
    folder = environment.fresh("many-files")
    batch = state_directory(folder / "checkpoint", STATE_FILES)
    took = [pin_seconds(folder / "checkpoint", batch, folder / f"pinned-{n}") for n in range(5)]
    yield below(PART, f"synchronous part with {STATE_FILES:,} state files", 1000 * median(took), "ms", SYNC_LIMIT_MS)


def state_directory(checkpoint: Path, files: int) -> int:
    """Write a query's checkpoint directory with `files` state files, in RocksDB's layout. Returns its newest batch."""
    batch, partitions = 20, 10
    described = json.dumps({"conf": {STATE_PARTITIONS: str(partitions)}})
    for log, entry in (("offsets", described), ("commits", "{}")):
        (checkpoint / log).mkdir(parents=True)
        for number in range(batch + 1):
            (checkpoint / log / str(number)).write_text(f"v1\n{entry}\n")
    (checkpoint / "metadata").write_text("{}")
    per_partition = files // partitions
    for partition in range(partitions):
        store = checkpoint / "state" / "0" / str(partition)
        (store / "SSTs").mkdir(parents=True)
        names = [f"{version}.changelog" for version in range(2, batch + 2)] + ["1.zip"]
        names += [f"SSTs/{number:06d}.sst" for number in range(per_partition - len(names))]
        for name in names:
            (store / name).write_bytes(os.urandom(512))
        _write_whole_version(store / "1.zip", [name.removeprefix("SSTs/") for name in names if name.endswith(".sst")])
    return batch


def _write_whole_version(file: Path, tables: list[str]) -> None:
    """Write RocksDB's file of a version, which names its tables."""
    named = {"sstFiles": [{"dfsSstFileName": table} for table in tables]}
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("metadata", "v1\n" + json.dumps(named))


def pin_seconds(checkpoint: Path, batch: int, target: Path) -> float:
    began = time.perf_counter()
    pin(checkpoint, batch, target)
    return time.perf_counter() - began
