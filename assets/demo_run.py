"""The Dagster run of `make run`, in a process of its own: materializes the flights pipeline, tells its parent of events.

Every event is a line of JSON on standard output; logs go to standard error. It drains itself when all of December is
consumed: it knows how many rows that is from the files.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import dagster as dg
import pyarrow.dataset as ds

from assets.flights import DATA, flights
from dagster_checkpoints import CheckpointCoordinatorResource, pipeline_assets
from resources import checkpoint_coordinator as configured

PROGRESS_SECONDS = 5.0


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}, default=str), flush=True)


class Drain:
    """True once, when every row of December has left the live source; tells of progress on the way."""

    def __init__(self) -> None:
        self._december = ds.dataset(DATA.december, format="parquet").count_rows()
        self._told_at = 0.0
        self._draining = False
        self.watermark_ms: int | None = None

    def __call__(self, rows: Mapping[str, int]) -> bool:
        if rows and time.monotonic() - self._told_at > PROGRESS_SECONDS:
            self._told_at = time.monotonic()
            tell("Progress", rows=dict(rows), watermark_ms=self.watermark_ms)
        drain = DATA.feed_complete.exists() and rows.get("flights_live", 0) >= self._december
        if drain and not self._draining:
            self._draining = True
            tell("Draining")
        return drain


drain = Drain()


def on_event(event: Any) -> None:
    fields = asdict(event)
    if "stages" in fields:
        drain.watermark_ms = fields.pop("stages").get("hourly_delays", {}).get("watermark_ms")
    tell(type(event).__name__, **fields)


@pipeline_assets(pipeline=flights)
def flights_assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource) -> Iterator[Any]:
    yield from checkpoint_coordinator.run(flights, context=context, drain_when=drain, on_event=on_event)


def main() -> int:
    settings = configured.model_copy(update={"interval": 5.0, "lease_seconds": 8.0})
    with dg.DagsterInstance.get() as instance:
        result = dg.materialize(
            [flights_assets],
            resources={"checkpoint_coordinator": settings},
            instance=instance,
            raise_on_error=False,
        )
    tell("Result", status="FINISHED" if result.success else "FAILED")
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main())
