"""How long ago a running pipeline's run gave its last sign: the status that it writes, and the lease that it renews.

A rule on values, with the time as an argument, and what this machine knows of the run's process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import msgspec

from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.execution.pipeline_state import Owner, PipelineState
from dagster_checkpoints.storage.processes import is_gone, this_process

SILENT_INTERVALS = 4
"""Reporting intervals after which a status is overdue."""


class LastSign(msgspec.Struct, frozen=True, kw_only=True):
    """The last sign of a run that owns its pipeline, by the reader's clock.

    Args:
        seconds: seconds since its last status, or its last renewal of the lease if that is newer.
        status_seconds: seconds since its last status; None if it has written none.
        lease_ended: seconds since the end of its lease; None while it holds.
        gone: whether its processes, which ran on this machine, have ended.
        overdue: whether the lease or the processes have ended, or the status is overdue. No status is due while the run starts:
            Spark's start and the plans take the thread that writes it.
    """

    seconds: float
    status_seconds: float | None
    lease_ended: float | None
    gone: bool
    overdue: bool

    @property
    def dead(self) -> bool:
        """Whether another run may take the pipeline over: its processes or its lease have ended."""
        return self.gone or self.lease_ended is not None


def owner_is_gone(owner: Owner) -> bool:
    """Whether the processes of a run are known to have ended: False for those of another machine or container."""
    return is_gone(owner, this_process(""))


def last_sign(
    state: PipelineState, status: PipelineStatus | None, now: datetime, is_gone: Callable[[Owner], bool] = owner_is_gone
) -> LastSign | None:
    """The last sign of the run that owns a pipeline; None if no run does.

    Args:
        state: content of `state.json`.
        status: the status that this run wrote; None if it has written none.
        now: the present time.
        is_gone: says whether an owner's processes have ended.
    """
    if state.lease is None:
        return None
    lease = max((now - state.lease.renewed_at).total_seconds(), 0.0)
    written = max((now - status.updated_at).total_seconds(), 0.0) if status is not None else None
    ended = lease - state.lease.seconds if lease > state.lease.seconds else None
    silent = status is not None and written is not None and written > SILENT_INTERVALS * status.interval
    overdue = silent and status is not None and status.phase != "starting"
    seconds = lease if written is None else min(lease, written)
    sign = LastSign(seconds=seconds, status_seconds=written, lease_ended=ended, gone=is_gone(state.lease.owner), overdue=overdue)
    return msgspec.structs.replace(sign, overdue=overdue or sign.dead)
