"""The input channels of a task, and which of them can still deliver a barrier."""

from __future__ import annotations

from collections.abc import Iterable

from dagster_checkpoints.coordination.errors import UnknownChannel


class InputChannels:
    """The channels of a task in the order given.

    Attributes:
        all: every channel, in order.
        open: those that have not ended.
    """

    def __init__(self, channels: Iterable[str], ended: Iterable[str]) -> None:
        self.all = tuple(channels)
        self._known = frozenset(self.all)
        self.open = set(self.all) - set(ended)

    def check(self, channel: str) -> None:
        """Check that the task has this channel.

        Raises:
            UnknownChannel: it has not.
        """
        if channel not in self._known:
            raise UnknownChannel(
                f"Channel {channel!r} is not an input of this task, which has "
                f"{', '.join(self.all) or 'no inputs'}. Feed a handler only the channels it was made with."
            )

    def in_order(self, channels: set[str]) -> tuple[str, ...]:
        return tuple(channel for channel in self.all if channel in channels)
