"""The base of every error that this package raises on purpose.

Each floor defines its own subclasses beside the code that raises them; catching
:class:`DagsterCheckpointsError` catches them all.
"""

from __future__ import annotations


class DagsterCheckpointsError(Exception):
    """An error whose text says what was expected, what was found, where, and what to do."""
