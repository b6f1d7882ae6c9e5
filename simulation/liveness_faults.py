"""Deliberate faults after which nothing wrong is written, but something waits for ever: a stop, a task, a requester.

A job of such a world may still reach its end, because its user asks again in another way.
"""

from __future__ import annotations

from dagster_checkpoints.coordination.lifecycle import TaskLifecycle
from dagster_checkpoints.coordination.pending_checkpoints import PendingCheckpoints
from dagster_checkpoints.coordination.progress import StopProgress
from dagster_checkpoints.execution.job_requests import JobRequests
from simulation.injection import Fault

LIVENESS_FAULTS = (
    Fault(
        "the savepoint of a stop is not triggered once a task has finished",
        PendingCheckpoints.trigger,
        "for task in plan.trigger",
        "for task in plan.trigger if not (properties.stops_job and plan.finished)",
        "ends",
    ),
    Fault(
        "a suspend waits for the end of all data if some of it has ended",
        StopProgress.plan,
        "self.drain and not tasks.all_at_end_of_data",
        "(self.drain or tasks._at_end) and not tasks.all_at_end_of_data",
        "ends",
    ),
    Fault(
        "a suspend fails if a task is just ending",
        StopProgress.plan,
        "if busy and tasks.any_left:",
        'if tasks.any_finishing and not self.drain:\n        return Obstacle("a task is just ending")\n'
        "    if busy and tasks.any_left:",
        "stops",
    ),
    Fault(
        "a task does not end with the first checkpoint behind its end of data",
        TaskLifecycle._completed,
        "any(taken <= checkpoint_id for taken in self._after_finish)",
        "any(taken < checkpoint_id for taken in self._after_finish)",
    ),
    Fault(
        "requests that are open when a job fails are not answered",
        JobRequests.close,
        "for request_id in tuple(self._open):",
        "for request_id in tuple(self._open) if status is JobStatus.FINISHED else ():",
    ),
)
