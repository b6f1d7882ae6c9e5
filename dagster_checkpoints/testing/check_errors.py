"""The errors of `check_pipeline`, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.testing.histories import History, Step, simpler

_SHOWN = 10

_NEEDED: Mapping[Step, str] = {
    "crash": "a job that is cancelled, and reads rows that it had processed (state outside of Spark and of `context.state`, or "
    "an effect outside of the sink?)",
    "instances": "other instances of a stage after a restore (state that is not kept by the key of the input?)",
    "restore": "a restore from a savepoint (state outside of Spark and of `context.state`?)",
    "time_zone": "another time zone of the machine or of Spark's session (a day, an hour or a text in local time?)",
    "order": "rows in another order than that of their event time (first, last, limit, a list, or what came last?)",
    "batches": "rows in several micro-batches or partitions (a number or a state per micro-batch or per partition?)",
}
_EACH_TIME = (
    "It is so each time that the stages are evaluated: something is random, reads the clock, or keeps what it has seen outside "
    "of Spark and of `context.state`."
)
_STREAM_DIFFERS = (
    "All rows in one micro-batch, in order of event time, are enough: a stream and a batch differ, as where rows are dropped, or "
    "state is kept outside of Spark and of `context.state`."
)


@dataclass(frozen=True)
class HistoryFailure:
    """How a pipeline fails under a history.

    Attributes:
        stage: The stage with other rows; empty if the run failed.
        missing: Rows that are expected and not found.
        unexpected: Rows that are found and not expected.
        error: The error of the run; None if it did not fail.
    """

    stage: str = ""
    missing: Sequence[Any] = ()
    unexpected: Sequence[Any] = ()
    error: Exception | None = None


class PipelineCheckError(DagsterCheckpointsError, AssertionError):
    """The result of a pipeline depends on more than its rows."""


class StageFindingError(PipelineCheckError):
    """A look at the plans shows that a result depends on more than rows.

    Attributes:
        findings: The text of each finding.
    """

    def __init__(self, text: str, findings: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.findings = tuple(findings)

    @classmethod
    def of(cls, pipeline: str, findings: Sequence[str]) -> Self:
        """The error for some findings in a pipeline of this name."""
        lines = [
            f"Pipeline {pipeline!r}: expected a result that depends on the rows of the sources only, found:",
            *(f"- {text.rstrip('.')}." for text in findings),
            "What is meant to be so is accepted with allow=[a part of its text].",
        ]
        return cls("\n".join(lines), findings)


class HistoryMismatchError(PipelineCheckError):
    """Under some history the rows of a stage are not those that were expected, or the run fails.

    Attributes:
        failure: How it fails.
        history: The smallest history found.
        needs: What the history needs beside its rows.
        rows: The rows of each source's instance that the history reads, by number.
    """

    def __init__(
        self,
        text: str,
        failure: HistoryFailure,
        history: History,
        rows: Mapping[str, Mapping[int, Mapping[str, Any]]],
    ) -> None:
        super().__init__(text)
        self.failure = failure
        self.history = history
        self.needs: tuple[Step, ...] = tuple(name for name, _ in simpler(history))
        self.rows = rows

    @classmethod
    def of(
        cls,
        pipeline: str,
        history: History,
        failure: HistoryFailure,
        rows: Mapping[str, Mapping[int, Mapping[str, Any]]],
        size: str,
    ) -> Self:
        """The error for a failing history.

        Args:
            pipeline: The pipeline's name.
            history: The history.
            failure: How it fails.
            rows: The rows of each source's instance, by number.
            size: The number of rows, in words.
        """
        where = f"Pipeline {pipeline!r}: expected "
        if failure.error is not None:
            lines = [f"{where}that it runs under each history, found one under which it fails: {failure.error}"]
        else:
            lines = [f"{where}the same rows of stage {failure.stage!r} under each history, found one with other rows."]
        lines += _reason(history)
        lines += [f"History ({size}):", *(f"  {line}" for line in history.described()), "Rows:"]
        lines += [f"  {name} {number}: {_as_text(row)}" for name, each in rows.items() for number, row in each.items()]
        for title, different in (("Expected, not found:", failure.missing), ("Found, not expected:", failure.unexpected)):
            lines += [title, *(f"  {row}" for row in islice(different, _SHOWN))] if different else []
            lines += [f"  and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
        return cls("\n".join(lines), failure, history, rows)


def _reason(history: History) -> list[str]:
    needs = [f"- {_NEEDED[name]}" for name, _ in simpler(history)]
    if needs:
        return ["It needs:", *needs]
    return [_EACH_TIME if history.engine == "batch" else _STREAM_DIFFERS]


def _as_text(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.items())
