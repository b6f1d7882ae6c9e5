"""The base class of every error that this package raises on purpose.

Each floor defines its subclasses beside the code that raises them; catching
:class:`DagsterCheckpointsError` catches them all.
"""

from __future__ import annotations

from typing import ClassVar


class DagsterCheckpointsError(Exception):
    """An error whose text says what was expected, what was found, where, and what to do.

    Attributes:
        repeats: whether another attempt of the job would fail with the same error, as with a wrong plan or a refused path: the
            job fails without a restart.
    """

    repeats: ClassVar[bool] = False


def repeats_by_nature(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way, because the error or one of its causes repeats."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, DagsterCheckpointsError) and cause.repeats:
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False
