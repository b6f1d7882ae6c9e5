"""The flights pipeline as Dagster assets, and the feeder of its live sources as a job."""

# Without `from __future__ import annotations`: Dagster reads the types of an op's parameters.

from collections.abc import Iterator
from typing import Any

import dagster as dg

from assets.feeder import feed, reset
from assets.flights import DATA, flights
from assets.flights_data import prepare
from dagster_checkpoints import CheckpointCoordinatorResource, PipelineRunConfig, pipeline_assets


@pipeline_assets(pipeline=flights, group_name="flights")
def flights_assets(
    context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource
) -> Iterator[dg.MaterializeResult[Any]]:
    """The flights of 2013: a backfill and three live feeds under one checkpoint; the drain sensor ends it."""
    data = prepare(DATA.root, progress=context.log.info)
    new_start = PipelineRunConfig.of(context.op_execution_context.op_config).restore_from in ("latest", "none")
    over = checkpoint_coordinator.job_status(flights, context=context) == "FINISHED"
    if new_start and over and data.feed_complete.exists():
        context.log.info("The last job has finished: this is a new start, and the feed begins with December 1 again.")
        reset(data)
    yield from checkpoint_coordinator.run(flights, context=context)


class FeedConfig(dg.Config):
    """How fast December passes."""

    seconds_per_day: float = 2.0


@dg.op
def feed_december(context: dg.OpExecutionContext, config: FeedConfig) -> None:
    """Drops December's files, day by day, for the live sources to find; goes on where it was stopped."""
    data = prepare(DATA.root, progress=context.log.info)
    if data.feed_complete.exists():
        context.log.info(
            "All of December has been dropped. Once the pipeline has finished, materialize it again: that is a new start, which "
            "takes the files back, and this job begins with December 1."
        )
        return
    feed(
        data,
        seconds_per_day=config.seconds_per_day,
        on_day=lambda day, number, days: context.log.info(f"fed {day} ({number} of {days})"),
    )


@dg.job(
    description=(
        "Launch this one second, when the run of flights_job has begun. The live feed: drops the files of December's 31 days for "
        "the pipeline to find. Stopped and launched again, it continues where it was stopped."
    )
)
def feed_job() -> None:
    feed_december()
