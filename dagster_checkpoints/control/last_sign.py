"""How long ago a running pipeline's run gave its last sign: the status that it writes, and the lease that it renews.

A rule on values, with the time as an argument.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from dagster_checkpoints.control.status import PipelineStatus
from dagster_checkpoints.storage import PipelineState

SILENT_INTERVALS = 4
"""Reporting intervals after which a status is overdue."""


class LastSign(msgspec.Struct, frozen=True, kw_only=True):
    """The last sign of a run that owns its pipeline, by the reader's clock.

    Args:
        seconds: seconds since its last status, or its last renewal of the lease if that is newer.
        status_seconds: seconds since its last status; None if it has written none.
        lease_ended: seconds since the end of its lease; None while it holds.
        overdue: whether the status is overdue, or the lease has ended.
    """

    seconds: float
    status_seconds: float | None
    lease_ended: float | None
    overdue: bool


def last_sign(state: PipelineState, status: PipelineStatus | None, now: datetime) -> LastSign | None:
    """The last sign of the run that owns a pipeline; None if no run does.

    Args:
        state: content of `state.json`.
        status: the status that this run wrote; None if it has written none.
        now: the present time.
    """
    if state.lease is None:
        return None
    lease = max((now - state.lease.renewed_at).total_seconds(), 0.0)
    written = max((now - status.updated_at).total_seconds(), 0.0) if status is not None else None
    ended = lease - state.lease.seconds if lease > state.lease.seconds else None
    overdue = status is not None and written is not None and written > SILENT_INTERVALS * status.interval
    seconds = lease if written is None else min(lease, written)
    return LastSign(seconds=seconds, status_seconds=written, lease_ended=ended, overdue=overdue or ended is not None)
