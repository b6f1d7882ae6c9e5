"""Lines that are logged once in a run, although the plans that they are about are built for each attempt."""

from __future__ import annotations

import logging

from dagster_checkpoints.spark.query.source_checks import SourceWarning


class OnceLog:
    """Logs each text once, and what is true of several sources at length of the first of them only.

    Args:
        log: Receives the texts.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self._said: set[str | SourceWarning] = set()
        self._explained: set[tuple[str, str]] = set()

    def __call__(self, level: int, text: str | SourceWarning) -> None:
        """Log a text, if it was not logged before."""
        if text not in self._said:
            self._said.add(text)
            self.log.log(level, "%s", self._shortened(text) if isinstance(text, SourceWarning) else text)

    def _shortened(self, warning: SourceWarning) -> str:
        explanation = (warning.found, warning.advice)
        if explanation in self._explained:
            return f"{warning.source} {warning.found}, see above."
        self._explained.add(explanation)
        return str(warning)
