"""The errors of the coordination floor: the caller sent events in an order that the protocol does not allow."""

from __future__ import annotations

from dagster_checkpoints.errors import DagsterCheckpointsError


class CoordinationError(DagsterCheckpointsError):
    """Base of the errors of the coordination floor."""


class InvalidCheckpointConfig(CoordinationError):
    """A checkpoint or restart setting is outside its range."""


class UnknownTask(CoordinationError):
    """An event names a task that is not in the execution graph."""


class UnknownChannel(CoordinationError):
    """An event names a channel that the task does not have."""


class UnexpectedEvent(CoordinationError):
    """A state machine was given an event that its present state cannot have."""


class CheckpointStillFinalizing(CoordinationError):
    """The job may not restart before it is known whether its newest checkpoint completes."""
