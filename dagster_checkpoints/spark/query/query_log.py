"""Reads and writes the logs in a Spark query's checkpoint directory: `offsets/` and `commits/`.

The file format is Spark's (`HDFSMetadataLog`): a version line, for offsets a line of metadata, then a line per
source. Must not know stages, channels or the coordinator.

Source: Spark's `OffsetSeqLog` and `CommitLog`; https://spark.apache.org/docs/latest/streaming/
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PlannedBatch:
    """One entry of the offset log: a batch id, the watermark it runs under (epoch ms) and each source's end offset."""

    batch_id: int
    watermark_ms: int
    sources: tuple[Any, ...]

    @property
    def offsets(self) -> str:
        """The end offsets as JSON, for display; a source that has none yet is left out."""
        return ", ".join(json.dumps(source, separators=(",", ":")) for source in self.sources if source is not None)


class QueryLog:
    """The logs of the query whose checkpoint directory is `path`. Cheap to call often: positions are cached."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._commits = path / "commits"
        self._offsets = path / "offsets"
        self._last_committed = -1

    def last_committed(self) -> int:
        """The id of the newest committed batch, -1 if none. Batches commit in order, so this counts up from the cached id."""
        if self._last_committed < 0:
            self._last_committed = _largest(self._commits)
        while (self._commits / str(self._last_committed + 1)).exists():
            self._last_committed += 1
        return self._last_committed

    def is_committed(self, batch_id: int) -> bool:
        return (self._commits / str(batch_id)).exists()

    def has_planned(self, batch_id: int) -> bool:
        return (self._offsets / str(batch_id)).exists()

    def planned(self, batch_id: int) -> PlannedBatch:
        """The offset log's entry for `batch_id`. Raises FileNotFoundError if there is none."""
        lines = (self._offsets / str(batch_id)).read_text(encoding="utf-8").split("\n")
        metadata = json.loads(lines[1])
        sources = tuple(None if line == "-" else json.loads(line) for line in lines[2:] if line)
        return PlannedBatch(batch_id, int(metadata["batchWatermarkMs"]), sources)

    def next_watermark(self, batch_id: int) -> int:
        """The watermark (epoch ms) that the committed batch records for the next batch."""
        lines = (self._commits / str(batch_id)).read_text(encoding="utf-8").split("\n")
        return int(json.loads(lines[1]).get("nextBatchWatermarkMs", 0))

    def plan_batch(self, batch_id: int, watermark_ms: int) -> None:
        """Plan batch `batch_id` without new input under a given watermark; the query runs exactly this batch at its next start.

        The entry is that of the previous batch, with another watermark. A planned, uncommitted batch with this id is replaced:
        it has not run.
        """
        lines = (self._offsets / str(batch_id - 1)).read_text(encoding="utf-8").split("\n")
        lines[1] = json.dumps({**json.loads(lines[1]), "batchWatermarkMs": watermark_ms})
        target = self._offsets / str(batch_id)
        scratch = self._offsets / f".{batch_id}.planned"
        scratch.write_text("\n".join(lines), encoding="utf-8")
        os.replace(scratch, target)
        (self._offsets / f".{batch_id}.crc").unlink(missing_ok=True)

    def plan_due_watermark(self) -> None:
        """Before a restored query starts: plan a batch for its own watermark, if that has advanced.

        The committed batch may record a later watermark for the next batch than it ran under. Without new input no batch would
        run under it, so the windows that are due get an extra batch, which the query runs first.
        """
        batch_id = self.last_committed()
        if batch_id >= 0 and self.next_watermark(batch_id) > self.planned(batch_id).watermark_ms:
            self.plan_batch(batch_id + 1, self.next_watermark(batch_id))

    def holds_state(self) -> bool:
        """Whether the query's checkpoint directory holds operator state; known also before the first batch of an attempt."""
        state = self.path / "state"
        return state.exists() and any(state.iterdir())

    def forget_planned_after(self, batch_id: int) -> None:
        """Remove the entries of batches later than `batch_id`, which were planned but never committed."""
        for entry in list(self._offsets.iterdir()) if self._offsets.exists() else []:
            if entry.name.isdigit() and int(entry.name) > batch_id:
                entry.unlink()
                (self._offsets / f".{entry.name}.crc").unlink(missing_ok=True)


def channel_positions(batch: PlannedBatch) -> Mapping[str, int]:
    """The end positions of all channels in a batch, from the offsets of its channel sources.

    A stage that uses an input twice has two sources with one gate, which may have read it at different times: a channel is
    consumed only up to the position that both have read.
    """
    positions: dict[str, int] = {}
    for source in batch.sources:
        if isinstance(source, dict) and "attempt" not in source and "logOffset" not in source:
            for channel, position in source.items():
                if "->" in channel:
                    positions[channel] = min(position, positions.get(channel, position))
    return positions


def _largest(folder: Path) -> int:
    if not folder.exists():
        return -1
    return max((int(name) for name in os.listdir(folder) if name.isdigit()), default=-1)
