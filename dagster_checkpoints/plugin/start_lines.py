"""The lines of a run's log between its launch and its first checkpoint: one line per event of the start.

Texts only. It must not know where they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.spark.job.events import (
    AttemptBuilding,
    FirstBatch,
    JobEndedBefore,
    JobStarted,
    LeaseWatched,
    PipelineAcquired,
    QueryEvent,
    QueryStarted,
    QueryWaiting,
    SparkStarted,
    SparkStarting,
    StartChosen,
    StartEvent,
)


def start_line(event: StartEvent | JobStarted | QueryEvent, pipeline: Pipeline, interval: float | None) -> str:
    """The line of the run's log for an event of the start.

    Args:
        event: The event.
        pipeline: The pipeline that starts.
        interval: Seconds between periodic checkpoints; None for no periodic checkpoints.
    """
    match event:
        case LeaseWatched(owner, 0.0):
            return (
                f"Pipeline {pipeline.name!r} is {owner}. That process and all processes that it had started have ended: this run "
                "takes the pipeline over at once."
            )
        case LeaseWatched(owner, seconds):
            return (
                f"Pipeline {pipeline.name!r} is {owner}. This run watches the lease and takes the pipeline over within "
                f"{seconds:g} s, unless that run renews the lease: then this run is refused."
            )
        case PipelineAcquired(storage, epoch, seconds):
            return f"This run owns pipeline {pipeline.name!r} in {storage} (epoch {epoch}), after {seconds:.1f} s."
        case JobEndedBefore(job_id, run_id, str()):
            return (
                f"Run {run_id}, which this run repeats, had suspended job {job_id}, because it was asked to or had caught up: no "
                "stage runs again. To continue the job, launch a new run."
            )
        case JobEndedBefore(job_id, run_id):
            return (
                f"Run {run_id}, which this run repeats, has brought job {job_id} to its end: all its rows are committed, and no "
                "stage runs again. To run the pipeline again, launch a new run."
            )
        case StartChosen():
            return "\n".join((f"{_start(event)}.", *event.changes))
        case SparkStarting():
            return "Spark is starting."
        case SparkStarted(version, master, application, web_ui, seconds):
            interface = f"; its user interface: {web_ui}" if web_ui else ""
            return f"Spark {version} runs at {master} (application {application}), after {seconds:.1f} s{interface}."
        case AttemptBuilding(_, stages, restored):
            state = f", and fetching the state of checkpoint {restored}" if restored is not None else ""
            return f"Building the plans of {_count(len(stages), 'stage')}{state}: {', '.join(stages)}."
        case JobStarted():
            return _job_started(event, interval)
        case QueryWaiting(stages, inputs):
            return f"Query {query_name(stages)} waits until its static inputs have been read: {', '.join(inputs)}."
        case QueryStarted(stages, instances, number, total, seconds):
            several = f" ({instances} instances)" if instances > 1 else ""
            return f"Query {number} of {total} has started: {query_name(stages)}{several}, after {seconds:.1f} s."
        case FirstBatch(stages, instance, rows, seconds, rows_read):
            of = query_name(stages)
            which = f" (instance {instance})" if pipeline.stage(stages[-1]).parallelism > 1 else ""
            if not rows:
                emitted = "no rows emitted yet" if rows_read is None else f"{_count(rows_read, 'row')} read, none emitted yet"
                return f"First batch of query {of}{which} in {seconds:.1f} s: {emitted}."
            return f"First rows of query {of}{which}: {_count(rows, 'row')} from {stages[-1]} in {seconds:.1f} s."


def query_name(stages: Sequence[str]) -> str:
    """The name of a query: its stages, in order."""
    return " > ".join(stages)


def _start(event: StartChosen) -> str:
    if event.restored_checkpoint is None:
        return "A new start: no checkpoint is restored"
    before = f"; finished before: {', '.join(event.finished_stages)}" if event.finished_stages else ""
    return f"Continues from checkpoint {event.restored_checkpoint} ({event.restored_location}){before}"


def _job_started(event: JobStarted, interval: float | None) -> str:
    chains = [chain for chain in event.chains if not set(chain) <= set(event.finished_stages)]
    if event.restarted:
        chains = [chain for chain in chains if chain[0] in event.restarted]
    restored = "" if event.restored_checkpoint is None else f", from checkpoint {event.restored_checkpoint}"
    first = "there are no periodic checkpoints" if interval is None else f"the first checkpoint is due {interval:g} s after that"
    return (
        f"Job {event.job_id}, attempt {event.attempt}{restored}: plans built in {event.seconds:.1f} s. "
        f"{_count(len(chains), 'query', 'queries')} will start: {'; '.join(query_name(chain) for chain in chains)}; {first}."
    )


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
