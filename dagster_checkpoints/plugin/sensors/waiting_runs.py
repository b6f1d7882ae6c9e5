"""What the recovery sensor does about the run that owned a pipeline while a newer run waits behind it.

The newer run waits in the run queue, for a slot of a pool or for the lease. It continues the job by itself, unless a dead owner
holds what it waits for. This module must not know Dagster's storage, nor the pipeline's.
"""

from __future__ import annotations

from enum import Enum, auto

import dagster as dg

_STOPPED = (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_ENDED = (*_STOPPED, dg.DagsterRunStatus.SUCCESS)


class OwnerAction(Enum):
    """What to do about the owner."""

    LEAVE = auto()
    """Nothing, at this tick."""
    WATCH = auto()
    """Dagster takes it for alive: mark it as failed if its silence lasts."""
    FREE_POOLS = auto()
    """It has failed or was cancelled, and its process is dead: give back the slots that it holds in pools."""


def owner_action(owner: dg.DagsterRunStatus, waiting: dg.DagsterRunStatus, *, renews: bool) -> OwnerAction:
    """What to do about a run that owns the pipeline, or owned it last, and is not its newest run.

    Args:
        owner: The owner's status.
        waiting: The status of the pipeline's newest run.
        renews: Whether the owner may still renew its lease.
    """
    if waiting in _ENDED:
        return OwnerAction.LEAVE
    if owner is dg.DagsterRunStatus.STARTED:
        return OwnerAction.WATCH
    return OwnerAction.FREE_POOLS if owner in _STOPPED and not renews else OwnerAction.LEAVE
