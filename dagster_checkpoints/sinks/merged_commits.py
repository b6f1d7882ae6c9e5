"""Several commits of a sink as one: of several transactions, of a stage's instances, or of several checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from dagster_checkpoints.sinks.base import SinkCommit


def merged(commits: Iterable[SinkCommit]) -> SinkCommit:
    """One commit that has made visible what all of them have.

    Args:
        commits: the commits, oldest first; at least one.

    Returns:
        Rows, bytes and files are summed; each is None if one of the commits does not know it. The version is the last known one.
    """
    total, *more = commits
    for commit in more:
        total = SinkCommit(
            rows=_sum(total.rows, commit.rows),
            bytes=_sum(total.bytes, commit.bytes),
            files=_sum(total.files, commit.files),
            version=commit.version if commit.version is not None else total.version,
        )
    return total


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second
