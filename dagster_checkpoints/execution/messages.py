"""What a job sends to its tasks; values only.

Most of them are events of the coordination floor, which the task's machines take unchanged.
"""

from __future__ import annotations

import msgspec

from dagster_checkpoints.coordination import TriggerReceived
from dagster_checkpoints.coordination.lifecycle import CheckpointNotice, DrainAnnounced


class EndInput(msgspec.Struct, frozen=True):
    """A source is to end as if its input were exhausted. Tasks with input channels ignore it: their inputs end by themselves."""


TaskMessage = TriggerReceived | CheckpointNotice | DrainAnnounced | EndInput
