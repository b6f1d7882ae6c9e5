"""Who owns a savepoint after a pipeline was restored from it.

Must not know: storage, how a savepoint is deleted.

Source: FLIP-193, "Snapshots ownership".
"""

from __future__ import annotations

from enum import Enum


class ClaimMode(Enum):
    """Whether the pipeline may rely upon, and delete, the savepoint that it is restored from.

    The pipeline owns its checkpoints in either mode.
    """

    NO_CLAIM = "no_claim"
    """The default. The user owns the savepoint: it may be moved or deleted as soon as the next checkpoint has
    completed, which names none of its files, and the system never deletes it."""
    CLAIM = "claim"
    """The pipeline owns the savepoint: it is retained like a checkpoint and deleted when newer ones have replaced it. No other
    pipeline may restore from it."""
