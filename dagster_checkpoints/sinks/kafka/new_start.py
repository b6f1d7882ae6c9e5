"""A new start, not a restore: messages that earlier jobs of the stage have sent. Messages of other programs do not count."""

from __future__ import annotations

from typing import Literal

from dagster_checkpoints.sinks.base import SinkContext
from dagster_checkpoints.sinks.kafka.ledger import KafkaLedger
from dagster_checkpoints.sinks.lake.names import job_name
from dagster_checkpoints.systems.errors import SinkHoldsEarlierRows, SinkPathInUse

KafkaAtNewStart = Literal["refuse", "keep"]
"""What a new start does if an earlier job has sent messages: they cannot be removed from a log."""


def check_new_start(ledger: KafkaLedger, context: SinkContext, at_new_start: KafkaAtNewStart, sink: str) -> None:
    """Check whether a new job may write to the topic; see ``KafkaSink.check_new_start``."""
    where = f"Stage {context.stage!r} of pipeline {context.pipeline!r}"
    jobs = sorted(job for job, found in ledger.jobs_of_stage(context).items() if any(each.newest for each in found))
    if job_name(context) in jobs:
        raise SinkPathInUse(
            f"{where}: this run begins job {context.job_id}, and expected no messages of a job of that number in {sink}, found "
            "some. The checkpoint storage counts its jobs from 1 again: was it emptied or exchanged? What two jobs with one "
            "number have sent cannot be distinguished: give the sink another topic"
        )
    if jobs and at_new_start == "refuse":
        raise SinkHoldsEarlierRows(
            f"{where}: this run is a new start, and expected no messages of an earlier job of this stage in {sink}, found "
            f"messages of job {', '.join(jobs)}. Nothing was started. KafkaSink(at_new_start=...) says what a new start does "
            "with them: 'refuse' (the default) stops the run; 'keep' adds the new job's messages, so input that both jobs read "
            "gives its rows twice. Choose 'keep', or another topic; or continue the earlier job from one of its savepoints or "
            "checkpoints (restore_from), which is not a new start"
        )
