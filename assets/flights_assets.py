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
    finished = checkpoint_coordinator.job_status(flights, context=context) == "FINISHED"
    if new_start and finished and data.feed_complete.exists():
        context.log.info("The last job has finished: this is a new start, and the feed begins with December 1 again.")
        reset(data)
    yield from checkpoint_coordinator.run(flights, context=context)


class FeedConfig(dg.Config):
    """The pace of the live feed."""

    seconds_per_day: float = 2.0


@dg.op
def feed_december(context: dg.OpExecutionContext, config: FeedConfig) -> None:
    """Copies December's files, day by day, into the directories of the live sources; continues where it was stopped."""
    data = prepare(DATA.root, progress=context.log.info)
    if data.feed_complete.exists():
        context.log.info(
            "All files of December have been copied. When the pipeline has finished, materialize it again: the new start removes "
            "the copies, and this job begins with December 1."
        )
        return
    feed(
        data,
        seconds_per_day=config.seconds_per_day,
        on_day=lambda day, number, days: context.log.info(f"fed {day} ({number} of {days})"),
    )


@dg.job(
    description=(
        "Launch this job second, when the run of flights_job has begun. The live feed: copies the files of December's 31 days to "
        "the pipeline's input. Stopped and launched again, it continues where it was stopped."
    )
)
def feed_job() -> None:
    feed_december()
