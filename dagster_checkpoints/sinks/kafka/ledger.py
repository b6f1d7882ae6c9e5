"""What a KafkaSink records in its ledger topic: by key, values that are written in one Kafka transaction with the messages.

::

    ["owner", "flights", "delays", 0]          the newest owner of an instance (see KafkaOwner)
    ["job", "flights", "delays", 0, "1.h1"]    what that instance has committed in a job (see KafkaJobLedger)

A transaction is committed if and only if its branch (see :mod:`branches`) has recorded its checkpoint or a later one: on one
branch an instance commits in the order of ids. So the ledger does not grow with the number of checkpoints.

Values only; must not know topics or messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dagster_checkpoints.sinks.base import SinkContext
from dagster_checkpoints.sinks.branches import Branches


class KafkaOwner(msgspec.Struct, frozen=True):
    """The newest owner of an instance. Epochs of two histories cannot be compared."""

    epoch: int
    history: str = ""
    version: int = 1

    def is_newer_than(self, context: SinkContext) -> bool:
        """Whether the instance's owner must change nothing any more."""
        return bool(context.epoch) and self.history == context.history and self.epoch > context.epoch


class KafkaJobLedger(msgspec.Struct, frozen=True):
    """What one instance has committed in one job.

    Args:
        branches: the branches of the job's checkpoints.
        newest: id of the newest committed checkpoint of each branch, by the branch's first checkpoint ("0": the first branch).
        written_again: by branch likewise: commits up to this id whose rows the job may write a second time, as configured.
    """

    branches: Branches = Branches()
    newest: dict[str, int] = {}
    written_again: dict[str, int] = {}
    version: int = 1

    def is_committed(self, branch: int, checkpoint_id: int) -> bool:
        """Whether the transaction of a checkpoint is committed.

        Args:
            branch: the first checkpoint of the branch that it is on, as :meth:`Branches.branch_of` gives it.
            checkpoint_id: the checkpoint that it was pre-committed for.
        """
        return self.newest.get(str(branch), -1) >= checkpoint_id

    def committed(self, branch: int, checkpoint_id: int) -> KafkaJobLedger:
        """The ledger after the commit of a transaction."""
        return msgspec.structs.replace(self, newest={**self.newest, str(branch): checkpoint_id})

    def begun(self, restored: int, first: int) -> KafkaJobLedger:
        """The ledger when the job takes its first checkpoint after a restore; see :meth:`Branches.begun`."""
        return msgspec.structs.replace(self, branches=self.branches.begun(restored, first))

    def not_on_the_way(self, restored: int) -> dict[str, int]:
        """Commits that are not part of the checkpoint `restored`, and were not known to be left behind: newest id by branch."""
        return {
            branch: newest
            for branch, newest in self.newest.items()
            if not self.branches.is_ancestor(newest, restored) and self.written_again.get(branch, -1) < newest
        }

    def writing_again(self, commits: Mapping[str, int]) -> KafkaJobLedger:
        """The ledger after a restore that leaves these commits behind."""
        return msgspec.structs.replace(self, written_again={**self.written_again, **commits})


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_OWNER = msgspec.json.Decoder(KafkaOwner)
_JOB = msgspec.json.Decoder(KafkaJobLedger)


@dataclass(frozen=True, slots=True)
class KafkaLedger:
    """The newest values of a ledger topic.

    Args:
        values: the encoded values, by encoded key.
    """

    values: Mapping[bytes, bytes] = field(default_factory=dict)

    def owner(self, context: SinkContext) -> KafkaOwner | None:
        value = self.values.get(owner_key(context))
        return None if value is None else _OWNER.decode(value)

    def instances_of_stage(self, context: SinkContext) -> set[int]:
        """The instances of the stage that have ever been opened."""
        found: set[int] = set()
        for key in self.values:
            match msgspec.json.decode(key):
                case ["owner", context.pipeline, context.stage, int(index)]:
                    found.add(index)
        return found

    def job(self, context: SinkContext, job: str) -> KafkaJobLedger | None:
        """What the instance has committed in a job; None if the job never began with this ledger."""
        value = self.values.get(job_key(context, job))
        return None if value is None else _JOB.decode(value)

    def jobs_of_stage(self, context: SinkContext) -> dict[str, list[KafkaJobLedger]]:
        """What the stage's instances have committed, by job."""
        found: dict[str, list[KafkaJobLedger]] = {}
        for key, value in self.values.items():
            match msgspec.json.decode(key):
                case ["job", context.pipeline, context.stage, _, str(job)]:
                    found.setdefault(job, []).append(_JOB.decode(value))
        return found


def owner_key(context: SinkContext) -> bytes:
    """The key of the newest owner of an instance."""
    return msgspec.json.encode(["owner", context.pipeline, context.stage, context.index])


def job_key(context: SinkContext, job: str) -> bytes:
    """The key of what an instance has committed in a job."""
    return msgspec.json.encode(["job", context.pipeline, context.stage, context.index, job])
