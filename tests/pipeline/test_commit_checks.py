"""Definitions of checks: what becomes a check, what is refused by name, and what a check may return."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.pipeline import CommitCheck, CommitCheckResult, Stage, bounded_source, commit_check
from dagster_checkpoints.pipeline.errors import InvalidCommitCheckError, InvalidNameError

SINK: Any = object()


@commit_check
def not_empty(rows: Any) -> bool:
    """There are rows."""
    return bool(rows)


@commit_check(name="few", blocking=True)
def at_most_two(rows: Any) -> CommitCheckResult:
    return CommitCheckResult(len(rows) <= 2, f"{len(rows)} rows", {"rows": len(rows)})


def test_a_function_becomes_a_check_that_can_be_called() -> None:
    assert (not_empty.name, not_empty.blocking, not_empty.description) == ("not_empty", False, "There are rows.")
    assert (at_most_two.name, at_most_two.blocking, at_most_two.description) == ("few", True, None)
    assert repr(at_most_two) == "<CommitCheck 'few' blocking>"
    rows: Any = [1, 2, 3]
    assert not_empty(rows) == CommitCheckResult(True)
    assert at_most_two(rows) == CommitCheckResult(False, "3 rows", {"rows": 3})


def test_a_stage_takes_checks_and_plain_functions() -> None:
    def plain(rows: Any) -> bool:
        return True

    @bounded_source(sink=SINK, checks=[not_empty, plain])
    def sales(context: Any) -> Any: ...

    class WithDefault(Stage):
        sink = SINK
        checks = (at_most_two,)

        def transform(self, context: Any, sales: Any) -> Any: ...

    assert [(check.name, check.blocking) for check in sales.checks] == [("not_empty", False), ("plain", False)]
    assert WithDefault().checks == (at_most_two,)
    assert WithDefault(checks=[]).checks == ()


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (lambda: True, InvalidNameError, "name"),
        ("few", InvalidCommitCheckError, "'few' cannot become a check; expected a function of the rows."),
        (dict, InvalidCommitCheckError, "expected a function of the rows"),
    ],
)
def test_what_is_no_check(function: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        commit_check(function)


def test_a_check_takes_the_rows_and_nothing_else() -> None:
    def without() -> bool:
        return True

    def two(rows: Any, commit: Any) -> bool:
        return True

    with pytest.raises(
        InvalidCommitCheckError, match=r"Check 'without' \(.*test_commit_checks.py:\d+\): expected a function of one"
    ):
        CommitCheck(without)  # type: ignore[arg-type]
    with pytest.raises(InvalidCommitCheckError, match=r"found two\(rows: .*, commit: "):
        CommitCheck(two)  # type: ignore[arg-type]


def test_checks_need_a_sink_and_names_of_their_own() -> None:
    with pytest.raises(InvalidCommitCheckError, match=r"Stage 'sales' .*: found checks \['not_empty'\], but no sink"):

        @bounded_source(checks=[not_empty])
        def sales(context: Any) -> Any: ...

    with pytest.raises(InvalidCommitCheckError, match="expected checks with different names, found 'not_empty' more than once"):

        @bounded_source(sink=SINK, checks=[not_empty, not_empty])
        def more_sales(context: Any) -> Any: ...

    with pytest.raises(InvalidCommitCheckError, match=r"checks=<CommitCheck 'not_empty'.*; expected a list of checks"):
        bounded_source(sink=SINK, checks=not_empty, name="other")(lambda context: None)  # type: ignore[call-overload]


@pytest.mark.parametrize("returned", [None, 1, "yes", CommitCheckResult("yes")])  # type: ignore[arg-type]
def test_a_check_says_true_or_false(returned: Any) -> None:
    @commit_check
    def vague(rows: Any) -> Any:
        return returned

    with pytest.raises(TypeError, match=r"Check 'vague' \(.*\) returned .*; expected True, False or a CommitCheckResult"):
        vague(SINK)
