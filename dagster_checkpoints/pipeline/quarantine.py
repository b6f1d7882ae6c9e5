"""Rows that a stage's conditions refuse: their definition, `Quarantine`, and the limit of their number.

They go to a table of their own, through a stage of their own (`refused_rows.py`). Must not know how conditions are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.pipeline.checks import CheckEvaluation, CommitCheck, CommitCheckResult
from dagster_checkpoints.pipeline.errors import InvalidQuarantineError
from dagster_checkpoints.pipeline.names import check_name
from dagster_checkpoints.pipeline.setting_values import is_count, is_number

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Condition = str | Callable[["DataFrame"], "Column"]
"""A condition on a row: Spark's SQL, or a function of the rows that returns a column of true and false."""

REFUSED_BY = "refused_by"
"""Column of refused rows: the names of the conditions that they do not meet, in their order, separated by ", "."""
REFUSED_IN_CHECKPOINT = "refused_in_checkpoint"
"""Column of refused rows: id of the checkpoint or savepoint that was the first to hold them."""
CHECK = "quarantine"
"""Name of the check that counts refused rows."""
MOST_CONDITIONS = 62
"""Each condition is one bit of a BIGINT."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Where the rows go that do not meet a stage's conditions, and how many of them may be.

    The rows do not reach the stage's sink, nor the stages that read it. A stage of the pipeline of its own, `<stage>_refused`,
    commits them to `sink`, with the same checkpoint as the rows beside them. They have the columns of the stage, and two more:
    `refused_by`, the names of the conditions that they do not meet, and `refused_in_checkpoint`, the id of the checkpoint or
    savepoint that was the first to hold them.

    Args:
        conditions: By name, the conditions that every row has to meet: Spark's SQL (`"amount > 0"`), or a function from the
            DataFrame of the rows to a Column. A row passes if the condition is true; it is refused if that is false or null.
        sink: Where refused rows are committed to: one without `key=` and `overwrite_partitions=`, since it has to keep each row.
            They have no order.
        most_rows: Largest number of rows that an instance may refuse between two commits; None for no limit. Above it, the
            checkpoint is declined, as by a blocking check: no reader sees the rows, refused or not.
        most_share: Largest share of the rows that may be refused, from 0 to 1, counted in the same way; None for no limit.
        name: Name of the stage of refused rows; by default the stage's name with `_refused`.

    Raises:
        InvalidQuarantineError: There is no condition, or too many; a condition is neither text nor a function; a limit is none.
        InvalidNameError: A name has other characters than letters, digits and underscores.

    Examples:
        >>> quarantine = Quarantine({"amount_is_positive": "amount > 0"}, sink=sink, most_share=0.05)

    Source: expectations of Delta Live Tables (`expect_or_drop`), whose null also fails.
    """

    conditions: Mapping[str, Condition]
    sink: Any
    most_rows: int | None = None
    most_share: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.conditions, Mapping) or not 1 <= len(self.conditions) <= MOST_CONDITIONS:
            raise InvalidQuarantineError(
                f"Quarantine: expected a dict of 1 to {MOST_CONDITIONS} conditions by name, such as "
                f'{{"amount_is_positive": "amount > 0"}}, found {self.conditions!r}.'
            )
        object.__setattr__(self, "conditions", dict(self.conditions))  # the user's dict may be extended for another stage
        for name, condition in self.conditions.items():
            check_name("condition", name)
            if not (isinstance(condition, str) and condition.strip()) and (
                not callable(condition) or isinstance(condition, type)
            ):
                raise InvalidQuarantineError(
                    f"Quarantine: condition {name!r} is {condition!r}; expected Spark's SQL as text, or a function from the "
                    "DataFrame of the rows to a Column (a Column itself belongs to one DataFrame: write `lambda rows: ...`)."
                )
        if self.most_rows is not None and not is_count(self.most_rows):
            raise InvalidQuarantineError(
                f"Quarantine: most_rows={self.most_rows!r}; expected a number of rows, 0 or more, or None."
            )
        if self.most_share is not None and not (is_number(self.most_share) and self.most_share <= 1):
            raise InvalidQuarantineError(f"Quarantine: most_share={self.most_share!r}; expected a share from 0 to 1, or None.")

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self.most_rows is not None or self.most_share is not None


def checked_quarantine(
    quarantine: Quarantine | None, checks: tuple[CommitCheck, ...], output_mode: str, where: str
) -> Quarantine | None:
    """The quarantine of a stage.

    Args:
        quarantine: What the user has declared.
        checks: The stage's checks.
        output_mode: Spark's output mode of the stage.
        where: The stage, for errors.

    Raises:
        InvalidQuarantineError: It is no Quarantine, or does not fit the stage.
    """
    if quarantine is None:
        return None
    if not isinstance(quarantine, Quarantine):
        raise InvalidQuarantineError(f"{where}: quarantine={quarantine!r}; expected a Quarantine.")
    if output_mode != "append":
        raise InvalidQuarantineError(
            f'{where}: expected output_mode="append" beside quarantine=, found {output_mode!r}: a row that replaces an earlier '
            "one could be refused when the earlier one was not, and both tables would hold it. Put the conditions on the "
            "rows in front of the aggregation, at the stage that this one reads."
        )
    if getattr(quarantine.sink, "replaces_by_key", False):
        raise InvalidQuarantineError(
            f"{where}: expected a sink for refused rows that keeps each of them, found {quarantine.sink!r} with key=: of two "
            "refused rows with one key it keeps one, and which one is not known: refused rows have no order. Leave out key=."
        )
    if getattr(quarantine.sink, "overwrite_partitions", False):
        raise InvalidQuarantineError(
            f"{where}: expected a sink for refused rows that keeps each of them, found {quarantine.sink!r}: where a later job "
            "refuses rows, those of earlier jobs vanish from the partition; where it refuses none, they stay. "
            "Leave out overwrite_partitions=."
        )
    if any(check.name == CHECK for check in checks):
        raise InvalidQuarantineError(
            f"{where}: expected no check {CHECK!r} beside quarantine=, whose own result has this name. Rename the check."
        )
    return quarantine


class RefusedRowLimit:
    """Counts the rows that one instance has passed and refused since its last commit, and holds their limit.

    All numbers are totals since the instance's attempt began.

    Args:
        quarantine: The stage's quarantine.
        instance: Name of the instance.
    """

    def __init__(self, quarantine: Quarantine, instance: str) -> None:
        self._quarantine = quarantine
        self._instance = instance
        self._at_snapshots: dict[int, tuple[int, int]] = {}
        self._committed = (0, 0)

    def evaluate(self, checkpoint_id: int, passed: int, refused: int) -> tuple[CheckEvaluation, ...]:
        """The result for the rows that are not committed; none without rows.

        Args:
            checkpoint_id: The checkpoint or savepoint that is being taken.
            passed: The number of rows that were passed on.
            refused: The number of rows that were refused.
        """
        self._at_snapshots[checkpoint_id] = (passed, refused)
        rows, bad = passed + refused - sum(self._committed), refused - self._committed[1]
        if not rows:
            return ()
        limits = self._quarantine
        found = f"{bad} of {rows} rows since the last commit were refused"
        exceeded = [
            f"expected most_rows={limits.most_rows}" if limits.most_rows is not None and bad > limits.most_rows else "",
            f"expected most_share={limits.most_share}"
            if limits.most_share is not None and bad / rows > limits.most_share  # 0.29 * 100 is less than 29
            else "",
        ]
        broken = " and ".join(filter(None, exceeded))
        text = f"{broken}, found that {found}: correct the source of these rows, or raise the limit" if broken else found
        result = CommitCheckResult(not broken, text, {"refused_rows": bad, "rows": rows})
        return (CheckEvaluation(CHECK, self._instance, checkpoint_id, limits.limited, result),)

    def committed(self, checkpoint_id: int) -> None:
        """All rows up to a checkpoint are committed."""
        for taken in sorted(taken for taken in self._at_snapshots if taken <= checkpoint_id):
            self._committed = self._at_snapshots.pop(taken)
