"""A pipeline of numbers below one directory, for tests of its runs in other processes."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq

from dagster_checkpoints.execution.pipeline_state import PipelineState
from dagster_checkpoints.storage import CheckpointStorage, open_store


class PipelineOfNumbers:
    """The files that its source reads, the rows of its sinks, its state in storage, and its runs in Dagster.

    Args:
        home: The directory: `data/input` is read, `data/<sink>` is written, `checkpoints` is the storage.
        instance: Dagster's instance.
        pipeline: The pipeline's name.
    """

    table = "squares"
    """The sink that `committed` reads unless a test names another one."""

    def __init__(self, home: Path, instance: dg.DagsterInstance, pipeline: str) -> None:
        self.home, self.root, self.instance = home, home / "data", instance
        (self.root / "input").mkdir(parents=True, exist_ok=True)
        self.storage = CheckpointStorage(open_store(str(home / "checkpoints")), pipeline)

    def drop(self, name: str, numbers: range | list[int]) -> None:
        """Put a file into the input; readers see all of it or no file."""
        new = self.root / f".{name}"
        new.write_text("".join(json.dumps({"id": number}) + "\n" for number in numbers))
        new.rename(self.root / "input" / f"{name}.json")

    def committed(self, sink: str = "") -> list[int]:
        """The numbers that a sink shows."""
        files = (self.root / (sink or self.table)).glob("checkpoint=*/*.parquet")
        return sorted(number for file in files for number in pq.ParquetFile(file).read().column("id").to_pylist())

    def state(self) -> PipelineState:
        state = self.storage.read_state()
        assert state is not None
        return state

    def status(self, run_id: str) -> dg.DagsterRunStatus:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status
