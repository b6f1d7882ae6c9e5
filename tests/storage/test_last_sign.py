"""The age of a run's last sign, from its status and its lease."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from dagster_checkpoints.control.last_sign import last_sign
from dagster_checkpoints.control.status import Phase, PipelineStatus
from dagster_checkpoints.execution.pipeline_state import Lease, Owner, PipelineState

BEHIND_THE_START: tuple[Phase, ...] = ("running", "restarting", "stopping")
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("phase", "status", "renewed", "seconds", "ended", "overdue"),
    [
        ("running", 2.0, 5.0, 2.0, None, False),  # runs
        ("running", 19.0, 9.0, 9.0, None, False),  # one report is late
        *((phase, 21.0, 9.0, 9.0, None, True) for phase in BEHIND_THE_START),  # renews its lease, and reports nothing: busy
        *((phase, 41.0, 38.0, 38.0, 8.0, True) for phase in ("starting", *BEHIND_THE_START)),  # killed 40 s ago
        ("starting", None, 5.0, 5.0, None, False),  # starts
        ("starting", None, 31.0, 31.0, 1.0, True),  # killed while it started
        ("starting", 21.0, 3.0, 3.0, None, False),  # Spark starts
        ("starting", 145.0, 4.0, 4.0, None, False),  # it takes minutes
        ("starting", 29.0, 30.0, 29.0, None, False),  # the lease still holds
        ("running", 4.0, 31.0, 4.0, 1.0, True),  # reports, but does not renew its lease
        ("running", -3.0, -3.0, 0.0, None, False),  # the owner's clock is ahead
    ],
)
def test_the_last_sign_of_a_run(
    phase: Phase, status: float | None, renewed: float, seconds: float, ended: float | None, overdue: bool
) -> None:
    owner = Owner(run_id="run-1", host="here", pid=7)
    lease = Lease(owner=owner, seconds=30.0, acquired_at=ago(100), renewed_at=ago(renewed))
    state = msgspec.structs.replace(PipelineState(pipeline="p", epoch=1, token="t"), lease=lease)
    written = None
    if status is not None:
        written = PipelineStatus(
            pipeline="p", run_id="run-1", epoch=1, phase=phase, sequence=1, updated_at=ago(status), started_at=ago(90)
        )
    sign = last_sign(state, written, NOW)
    assert sign is not None
    assert (sign.seconds, sign.lease_ended, sign.overdue, sign.dead) == (seconds, ended, overdue, ended is not None)
    gone = last_sign(state, written, NOW, is_gone=lambda known: known is owner)
    assert gone == msgspec.structs.replace(sign, gone=True, overdue=True)
    assert gone is not None and gone.dead


def test_a_pipeline_that_does_not_run_gives_no_sign() -> None:
    assert last_sign(PipelineState(pipeline="p", epoch=1, token="t"), None, NOW) is None
