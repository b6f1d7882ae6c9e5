"""A Dagster run of `make run`, in its own process: materializes the flights pipeline and reports its events to the parent.

Every event is a line of JSON on standard output; logs go to standard error. The run lasts until it is stopped or killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import dagster as dg

from assets.flights import flights
from dagster_checkpoints import CheckpointCoordinatorResource, pipeline_assets
from dagster_checkpoints.spark.job.events import JobEvent
from resources import coordinator_with


def report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}, default=str), flush=True)


def on_event(event: JobEvent) -> None:
    report(type(event).__name__, **asdict(event))


@pipeline_assets(pipeline=flights)
def flights_assets(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource) -> Iterator[Any]:
    yield from checkpoint_coordinator.run(flights, context=context, on_event=on_event)


def main() -> int:
    settings = coordinator_with(interval=5.0, lease_seconds=8.0, status_seconds=2.0)
    with dg.DagsterInstance.get() as instance:
        result = dg.materialize(
            [flights_assets],
            resources={"checkpoint_coordinator": settings},
            instance=instance,
            raise_on_error=False,
        )
        with settings.checkpoint_storage(flights, instance=instance) as storage:
            state = storage.read_state()
    report("Result", status="FINISHED" if result.success else "FAILED", ended_by=state.job.ended_by if state else None)
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main())
