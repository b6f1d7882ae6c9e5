"""The progress of a stop with savepoint in the coordinator."""

from __future__ import annotations

import pytest

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties
from dagster_checkpoints.coordination.progress import StopPhase, StopProgress


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_whose_savepoint_is_taken_again_has_no_savepoint_until_then(drain: bool) -> None:
    stop = StopProgress("r", drain, CheckpointProperties.for_savepoint(stops_job=True))
    assert (stop.phase, stop.checkpoint_id) == (StopPhase.WAITING, None)
    stop.triggered(7)
    assert (stop.phase, stop.checkpoint_id) == (StopPhase.PENDING, 7)
    assert not stop.failed(answered=False)
    assert (stop.phase, stop.checkpoint_id) == (StopPhase.WAITING, None)
    stop.triggered(8)
    stop.completed()
    assert (stop.phase, stop.checkpoint_id) == (StopPhase.ENDING, 8)
