"""What a KafkaSink records in its ledger topic: the ledger of each instance, in one Kafka transaction with the messages.

::

    ["ledger", "flights", "delays", 0]    the ledger of instance 0 (see sinks/ledger.py)

Values only; must not know topics or messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.ledger import Ledger, stored_ledger

_FORMER = ("owner", "job")
"""The kinds of keys in the format of earlier releases."""


@dataclass(frozen=True, slots=True)
class LedgerValues:
    """The newest values of a ledger topic.

    Args:
        values: the encoded values, by encoded key.
        topic: the topic's name, for errors.
    """

    values: Mapping[bytes, bytes] = field(default_factory=dict)
    topic: str = ""

    def ledger(self, scope: SinkScope) -> Ledger | None:
        """The instance's ledger; None if it was never opened with this topic. Raises SinkPathInUse."""
        value = self.values.get(ledger_key(scope))
        return None if value is None else self._decoded(value)

    def of_stage(self, scope: SinkScope) -> dict[int, Ledger]:
        """The ledgers of the stage's instances, by index. Raises SinkPathInUse."""
        found: dict[int, Ledger] = {}
        for key, value in self.values.items():
            match msgspec.json.decode(key):
                case ["ledger", scope.pipeline, scope.stage, int(index)]:
                    found[index] = self._decoded(value)
        return found

    def _decoded(self, value: bytes) -> Ledger:
        return stored_ledger(value, f"the topic {self.topic!r}")

    def is_of_earlier_release(self, scope: SinkScope) -> bool:
        """Whether an earlier release has recorded something of the stage."""
        keys = (msgspec.json.decode(key) for key in self.values)
        return any(key[0] in _FORMER and key[1:3] == [scope.pipeline, scope.stage] for key in keys)


def ledger_key(scope: SinkScope) -> bytes:
    """The key of an instance's ledger."""
    return msgspec.json.encode(["ledger", scope.pipeline, scope.stage, scope.index])
