"""Steps driven by hand: each request is compared with the one expected, and answered."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Job, Lease, Owner, PipelineState
from dagster_checkpoints.execution.storage_steps import DriverValues, StatePlace, Steps, StoredState, drive

T = TypeVar("T")
NOW = datetime(2026, 5, 1, 12, 30, 15, tzinfo=UTC)
PLACE = StatePlace("flights", "file:///storage", "file:///storage/flights/state.json")
ALICE = Owner(run_id="run-a", host="alpha", pid=1)
BOB = Owner(run_id="run-b", host="beta", pid=2)
LEASE = 30.0


def follow(steps: Steps[T], *exchanges: tuple[Any, Any]) -> T:
    """Run steps that make exactly these requests.

    Args:
        steps: what is tested.
        exchanges: each request, and its answer or the error that it fails with. A type stands for any request of that type.
    """
    left = list(exchanges)

    def perform(request: Any) -> Any:
        assert left, f"nothing more was expected, found {request}"
        expected, answer = left.pop(0)
        if isinstance(expected, type):
            assert isinstance(request, expected), request
        else:
            assert request == expected
        if isinstance(answer, BaseException):
            raise answer
        return answer

    result = drive(steps, perform)
    assert not left, f"never requested: {left}"
    return result


@dataclass
class Clock:
    """The clock and tokens of a driver, set by the test."""

    seconds: float = 1000.0
    tokens: int = 0

    def values(self) -> DriverValues:
        return DriverValues(lambda: self.seconds, lambda: NOW, self._token)

    def _token(self) -> str:
        self.tokens += 1
        return f"token-{self.tokens}"


def pointer(
    checkpoint_id: int, *, kind: str = "checkpoint", epoch: int = 1, job_id: int = 1, claimed: bool = False
) -> CheckpointPointer:
    folder = f"savepoints/savepoint-{checkpoint_id}" if kind == "savepoint" else f"checkpoints/chk-{checkpoint_id}-{epoch}"
    return CheckpointPointer(
        checkpoint_id=checkpoint_id,
        location=folder,
        kind=kind,
        epoch=epoch,
        job_id=job_id,
        completed_at=NOW,
        claimed=claimed,
    )


def state(*retained: CheckpointPointer, epoch: int = 3, owner: Owner | None = ALICE, **fields: Any) -> PipelineState:
    """A pipeline's state; the first of the retained is the newest."""
    lease = Lease(owner=owner, seconds=LEASE, acquired_at=NOW, renewed_at=NOW) if owner is not None else None
    values: dict[str, Any] = {
        "newest": retained[0] if retained else None,
        "highest_checkpoint_id": max((p.checkpoint_id for p in retained), default=0),
        "job": Job(job_id=1, status="RUNNING"),
    }
    return PipelineState(pipeline="flights", epoch=epoch, token="before", lease=lease, retained=retained, **{**values, **fields})


def owned(
    clock: Clock, stored: PipelineState, previous: PipelineState | None = None, values: DriverValues | None = None
) -> OwnershipSteps:
    """The steps of the owner that has just written `stored`."""
    before = previous or msgspec.structs.replace(stored, lease=None, epoch=stored.epoch - 1)
    return OwnershipSteps(StoredState(stored, "v1"), before, clock.seconds + LEASE * 0.9, values or clock.values(), PLACE)
