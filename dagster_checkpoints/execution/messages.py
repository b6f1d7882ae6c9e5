"""What a job sends to its tasks; values only.

Most of them are events of the coordination floor, which the task's machines take unchanged.
"""

from __future__ import annotations

import msgspec

from dagster_checkpoints.coordination.barriers.events import TriggerReceived
from dagster_checkpoints.coordination.lifecycle import CheckpointNotice, DrainAnnounced
from dagster_checkpoints.execution.split_events import SplitMessage


class EndInput(msgspec.Struct, frozen=True):
    """A source is to end as if its input were exhausted. Tasks with input channels ignore it: their inputs end by themselves.

    Attributes:
        source: of a task with fused sources, the only one that ends; "" for all of them.
    """

    source: str = ""


TaskMessage = TriggerReceived | CheckpointNotice | DrainAnnounced | EndInput | SplitMessage
