"""Lines that are logged once in a run, although the plans that they are about are built for each attempt."""

from __future__ import annotations

import logging


class OnceLog:
    """Logs each text once.

    Args:
        log: Receives the texts.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self._said: set[str] = set()

    def __call__(self, level: int, text: str) -> None:
        """Log a text, if it was not logged before."""
        if text not in self._said:
            self._said.add(text)
            self.log.log(level, "%s", text)
