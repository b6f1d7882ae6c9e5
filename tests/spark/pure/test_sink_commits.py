"""The commits of a stage's instances as commits of the stage; no Spark is started."""

from __future__ import annotations

from dataclasses import replace

from dagster_checkpoints.pipeline import CheckEvaluation, CommitCheckResult
from dagster_checkpoints.sinks import SinkCommit, merged
from dagster_checkpoints.spark.job.events import SinkCommitted
from dagster_checkpoints.spark.job.reporting import FINISHED, SinkCommits
from dagster_checkpoints.spark.tasks.commit_checks import CheckedRows
from dagster_checkpoints.spark.tasks.messages import TaskCommitted


def by(
    instance: str, checkpoint: int, new: int | None, rows: int, watermark: int | None = None, last: bool = False
) -> TaskCommitted:
    """The commit of an instance with this number of new rows in one file, or with nothing to commit."""
    commit = None if new is None else SinkCommit(new, 100 * new, 1 if new else 0, f"v{checkpoint}")
    return TaskCommitted("sales", instance, checkpoint, commit, rows, watermark, last)


def begun(**rows: int) -> SinkCommits:
    commits = SinkCommits()
    commits.attempt_began({"sales": rows})
    return commits


def test_all_instances_of_a_checkpoint_are_one_commit() -> None:
    commits = begun(left=10, right=20)
    assert commits.take(by("left", 5, 3, rows=13, watermark=700)) is None
    assert commits.take(by("right", 5, 4, rows=24, watermark=500)) == SinkCommitted(
        "sales", 5, SinkCommit(7, 700, 2, "v5"), rows=37, watermark_ms=500
    )
    assert commits.take(by("right", 6, 1, rows=25, watermark=600)) is None
    seen = commits.take(by("left", 6, None, rows=13))
    assert seen is not None and (seen.commit.rows, seen.rows) == (1, 38)
    assert seen.watermark_ms is None, "one of the instances has none"


def test_an_instance_that_is_ahead_does_not_hold_the_others_back() -> None:
    commits = begun(fast=0, slow=0)
    seen = [
        commits.take(by(name, checkpoint, 1, rows=checkpoint))
        for name, checkpoint in [("fast", 1), ("fast", 2), ("slow", 1), ("fast", 3), ("slow", 2), ("slow", 3)]
    ]
    assert [one and (one.checkpoint_id, one.commit.rows, one.rows) for one in seen] == [
        None, None, (1, 2, 2), None, (2, 2, 4), (3, 2, 6),
    ]  # fmt: skip


def test_a_commit_has_the_checks_of_all_instances_and_a_sample_of_one() -> None:
    def checked(instance: str, *sample: int) -> TaskCommitted:
        found = CheckEvaluation("few", instance, 5, False, CommitCheckResult(passed=instance == "left"))
        rows = tuple({"id": number} for number in sample)
        return replace(by(instance, 5, 1, rows=1), checked=CheckedRows((found,), rows))

    commits = begun(left=0, right=0)
    commits.take(checked("left", 7))
    seen = commits.take(checked("right"))
    assert seen is not None and seen.sample == ({"id": 7},)
    assert [(one.instance, one.result.passed) for one in seen.checks] == [("left", True), ("right", False)]


def test_a_commit_without_rows_is_none() -> None:
    commits = begun(left=0)
    assert commits.take(by("left", 5, None, rows=0)) is None
    assert commits.take(by("left", 6, 0, rows=0)) is None
    unknown = TaskCommitted("sales", "left", 7, SinkCommit(), 10, None, last=False)
    seen = commits.take(unknown)
    assert seen is not None and seen.commit == SinkCommit(), "a sink that reports nothing may have committed rows"


def test_instances_that_have_ended_are_not_waited_for_and_the_last_one_ends_the_stage() -> None:
    commits = begun(left=0, right=0)
    commits.take(by("left", 5, 3, rows=3, last=True))
    seen = commits.take(by("right", 5, 4, rows=4))
    assert seen is not None and not seen.last
    seen = commits.take(by("right", 6, 5, rows=9))
    assert seen is not None and (seen.rows, seen.last) == (12, False)
    seen = commits.take(by("right", 7, 1, rows=10, last=True))
    assert seen is not None and (seen.rows, seen.last) == (13, True)


def test_a_commit_that_an_attempt_left_behind_joins_the_next_one() -> None:
    commits = begun(left=0, right=0)
    assert commits.take(by("left", 5, 3, rows=3)) is None  # the attempt fails; the restore commits right's rows
    commits.attempt_began({"sales": {FINISHED: 0, "left": 3, "right": 4}})
    assert commits.take(by("right", 6, 1, rows=5)) is None
    seen = commits.take(by("left", 6, 2, rows=5))
    assert seen is not None
    assert seen.commit is not None
    assert (seen.checkpoint_id, seen.commit.rows) == (6, 6), "the restore's commit is not reported"
    assert seen.rows == 10, "but counted"


def test_the_first_commit_after_a_restore_is_reported_even_if_it_is_empty() -> None:
    commits = begun(left=3, right=4)
    assert commits.take(by("left", 6, None, rows=3)) is None
    assert commits.take(by("right", 6, 0, rows=4, watermark=9)) == SinkCommitted("sales", 6, None, rows=7)
    assert commits.take(by("left", 7, None, rows=3)) is None
    assert commits.take(by("right", 7, None, rows=4)) is None
    new = begun(left=0)
    assert new.take(by("left", 1, None, rows=0)) is None


def test_instances_that_had_finished_before_are_counted() -> None:
    commits = begun(**{FINISHED: 1000, "right": 5})
    late = commits.take(by("left", 5, 3, rows=900, last=True))  # of an earlier attempt, in which it finished
    assert late is None
    seen = commits.take(by("right", 6, 1, rows=6))
    assert seen is not None and seen.rows == 1006


def test_what_one_commit_does_not_know_the_sum_does_not_know() -> None:
    known, unknown = SinkCommit(1, 10, 1, "v1"), SinkCommit(2, None, 2)
    assert merged([known, unknown, known]) == SinkCommit(4, None, 4, "v1")
    assert merged([unknown, known]).version == merged([known, unknown]).version == "v1"
