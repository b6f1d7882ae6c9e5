"""What a job sends to its tasks; values only.

Most of it is the coordination floor's own events: the coordinator decides them, and the task's machines take them as they are.
"""

from __future__ import annotations

import msgspec

from dagster_checkpoints.coordination import TriggerReceived
from dagster_checkpoints.coordination.lifecycle import CheckpointNotice, DrainAnnounced


class EndInput(msgspec.Struct, frozen=True):
    """A source ends as if its input were exhausted. Tasks behind channels ignore it: their inputs end by themselves."""


TaskMessage = TriggerReceived | CheckpointNotice | DrainAnnounced | EndInput
