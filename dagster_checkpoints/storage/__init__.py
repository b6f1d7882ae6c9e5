"""Checkpoint storage, in a store of `files`.

Read in this order: :mod:`layout` (names of files),
:mod:`processes` (whether the owner's process is known to have ended), :mod:`acquisition` and :mod:`ownership` (one owner per
pipeline, and the commit point), :mod:`state_files` and :mod:`shared_files` (content-addressed state),
:mod:`savepoints` and :mod:`savepoint_places` (self-contained state), :mod:`checkpoint_metadata`, :mod:`checkpoint_deletion`, and
:mod:`checkpoints`, the interface to all of them. The rules are steps of the execution layer, which these modules perform.
"""

from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

__all__ = ["CheckpointStorage", "open_store"]
