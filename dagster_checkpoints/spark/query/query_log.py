"""Reading and writing the logs in a Spark query's checkpoint directory: `offsets/` and `commits/`.

The file format is Spark's own (`HDFSMetadataLog`): a version line, for offsets a line of metadata, then a line per
source. It must not know stages, channels or the coordinator.

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


class QueryLog:
    """The logs of the query whose checkpoint lies at `path`. Cheap to ask often: positions are remembered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._commits = path / "commits"
        self._offsets = path / "offsets"
        self._last_committed = -1

    def last_committed(self) -> int:
        """The id of the newest committed batch, -1 if none. Batches commit one after the other, so it is found by counting up."""
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
        """The watermark (epoch ms) that the committed batch promises for the next one."""
        lines = (self._commits / str(batch_id)).read_text(encoding="utf-8").split("\n")
        return int(json.loads(lines[1]).get("nextBatchWatermarkMs", 0))

    def plan_batch(self, batch_id: int, watermark_ms: int) -> None:
        """Plan batch `batch_id` without new input under a given watermark; the query runs exactly it when it starts next.

        The entry is the one of the batch before with only the watermark changed. A planned, uncommitted batch of that id
        is replaced: it has not run.
        """
        lines = (self._offsets / str(batch_id - 1)).read_text(encoding="utf-8").split("\n")
        lines[1] = json.dumps({**json.loads(lines[1]), "batchWatermarkMs": watermark_ms})
        target = self._offsets / str(batch_id)
        scratch = self._offsets / f".{batch_id}.planned"
        scratch.write_text("\n".join(lines), encoding="utf-8")
        os.replace(scratch, target)
        (self._offsets / f".{batch_id}.crc").unlink(missing_ok=True)

    def plan_due_watermark(self) -> None:
        """Before a restored query starts: plan the batch that its own watermark is due.

        The committed batch may promise a later watermark than it ran under. Without new input nothing would act on it, so
        the due windows get a batch of their own, which the query runs first.
        """
        batch_id = self.last_committed()
        if batch_id >= 0 and self.next_watermark(batch_id) > self.planned(batch_id).watermark_ms:
            self.plan_batch(batch_id + 1, self.next_watermark(batch_id))

    def holds_state(self) -> bool:
        """Whether the query has a stateful operator, as its checkpoint says: also before the first batch of an attempt."""
        state = self.path / "state"
        return state.exists() and any(state.iterdir())

    def forget_planned_after(self, batch_id: int) -> None:
        """Remove the plans of batches later than `batch_id`; they were planned but never committed."""
        for entry in list(self._offsets.iterdir()) if self._offsets.exists() else []:
            if entry.name.isdigit() and int(entry.name) > batch_id:
                entry.unlink()
                (self._offsets / f".{entry.name}.crc").unlink(missing_ok=True)


def channel_positions(batch: PlannedBatch) -> Mapping[str, int]:
    """The end positions of all channels in a batch, from the offsets of its channel sources.

    A stage that uses an input twice has two sources behind one gate, which may have asked at different moments: a channel is
    consumed only as far as both have read it.
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
