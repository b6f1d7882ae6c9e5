"""Checks of the rows that a stage's sink commits: `@commit_check`.

Dagster's own asset checks read a table after it was written. These see the rows of each commit, before any reader does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from dagster_checkpoints.pipeline.errors import InvalidCommitCheckError
from dagster_checkpoints.pipeline.names import check_name
from dagster_checkpoints.pipeline.signatures import locate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class CommitCheckResult:
    """What a check has found.

    Args:
        passed: Whether the rows are as they should be.
        description: A text for people: what was expected, and what was found.
        metadata: Further values, which Dagster shows with the result: numbers, texts, booleans, lists and dicts of them.
    """

    passed: bool
    description: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


CheckFunction = Callable[["DataFrame"], bool | CommitCheckResult]
"""A user's function from the rows of a commit to whether they pass."""


class CommitCheck:
    """A check of the rows that a stage is about to commit; made by :func:`commit_check`.

    Args:
        function: The user's function.
        name: Name of the check; by default the function's name.
        blocking: Whether rows that do not pass are kept back: the checkpoint that would commit them is declined.

    Raises:
        InvalidCommitCheckError: The function does not take exactly one argument, the rows.
        InvalidNameError: The name has other characters than letters, digits and underscores.
    """

    def __init__(self, function: CheckFunction, *, name: str | None = None, blocking: bool = False) -> None:
        if not callable(function) or isinstance(function, type):
            raise InvalidCommitCheckError(f"{function!r} cannot become a check; expected a function of the rows.")
        self.name = check_name("check", name if name is not None else getattr(function, "__name__", ""), str(locate(function)))
        self.function = function
        self.blocking = blocking
        try:
            inspect.signature(function).bind(object())
        except TypeError as error:
            raise InvalidCommitCheckError(
                f"Check {self.name!r} ({locate(function)}): expected a function of one argument, the DataFrame of the rows that "
                f"are committed, found {self.name}{inspect.signature(function)} ({error})."
            ) from None
        functools.update_wrapper(self, function, updated=())

    @property
    def description(self) -> str | None:
        """The function's docstring."""
        return self.function.__doc__

    def __call__(self, rows: DataFrame) -> CommitCheckResult:
        """Call the function.

        Raises:
            TypeError: The function returned neither a bool nor a CommitCheckResult.
        """
        found = self.function(rows)
        if isinstance(found, bool):
            return CommitCheckResult(found)
        if isinstance(found, CommitCheckResult) and isinstance(found.passed, bool):
            return found
        raise TypeError(
            f"Check {self.name!r} ({locate(self.function)}) returned {found!r}; expected True, False or a CommitCheckResult."
        )

    def __repr__(self) -> str:
        return f"<CommitCheck {self.name!r}{' blocking' if self.blocking else ''}>"


@overload
def commit_check(function: CheckFunction, /) -> CommitCheck: ...
@overload
def commit_check(*, name: str | None = None, blocking: bool = False) -> Callable[[CheckFunction], CommitCheck]: ...
def commit_check(
    function: CheckFunction | None = None, /, *, name: str | None = None, blocking: bool = False
) -> CommitCheck | Callable[[CheckFunction], CommitCheck]:
    """Make a check of a function of the rows that a stage is about to commit.

    The function is called in the synchronous part of each checkpoint and savepoint with the rows that the instance has written
    since its last commit, if there are any. It may run Spark queries over them; the checkpoint waits for it. Dagster shows the
    result as an asset check of the stage.

    Args:
        name: Name of the check; by default the function's name.
        blocking: Whether rows that do not pass are kept back: the checkpoint or savepoint is declined, and no reader sees the
            rows. The next checkpoint checks them again, with the rows that have come since. After `tolerable_failed_checkpoints`
            the job fails and restarts, as its restart strategy says.

    Raises:
        InvalidCommitCheckError: The function does not take exactly one argument.

    Examples:
        >>> @commit_check(blocking=True)
        ... def amounts_are_positive(rows):
        ...     wrong = rows.filter("amount <= 0").count()
        ...     return CommitCheckResult(wrong == 0, metadata={"wrong": wrong})
        >>> amounts_are_positive
        <CommitCheck 'amounts_are_positive' blocking>
    """

    def decorate(function: CheckFunction) -> CommitCheck:
        return CommitCheck(function, name=name, blocking=blocking)

    return decorate if function is None else decorate(function)


@dataclass(frozen=True, slots=True)
class CheckEvaluation:
    """The result of a check for the rows of one instance, or of several as one.

    Attributes:
        check: Name of the check.
        instance: Name of the instance; empty for several instances together.
        checkpoint_id: The checkpoint or savepoint.
        blocking: Whether the check is blocking.
        result: The result.
    """

    check: str
    instance: str
    checkpoint_id: int
    blocking: bool
    result: CommitCheckResult


def checked_checks(checks: Iterable[CommitCheck | CheckFunction], where: str, *, has_sink: bool) -> tuple[CommitCheck, ...]:
    """The checks of a stage; plain functions become checks that do not block.

    Args:
        checks: What the user has declared.
        where: The stage, for errors.
        has_sink: Whether the stage has a sink.

    Raises:
        InvalidCommitCheckError: There is no sink, two checks have one name, or a value is no function.
    """
    if not isinstance(checks, Iterable):
        raise InvalidCommitCheckError(f"{where}: checks={checks!r}; expected a list of checks, such as checks=[not_empty].")
    declared = tuple(check if isinstance(check, CommitCheck) else CommitCheck(check) for check in checks)
    if declared and not has_sink:
        raise InvalidCommitCheckError(
            f"{where}: found checks {[check.name for check in declared]}, but no sink. Checks see the rows that a sink commits: "
            "give the stage a sink, or remove them."
        )
    names = [check.name for check in declared]
    for name in names:
        if names.count(name) > 1:
            raise InvalidCommitCheckError(f"{where}: expected checks with different names, found {name!r} more than once.")
    return declared
