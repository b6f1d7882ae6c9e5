"""The resources of the flights code location: Spark, storage and the checkpoint coordinator."""

from __future__ import annotations

from resources.checkpoints import checkpoint_coordinator, coordinator_with

__all__ = ["checkpoint_coordinator", "coordinator_with"]
