"""Which offsets go to a consumer group: those of the newest completed checkpoint, in any order of snapshots and answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.execution.offset_commits import OffsetCommits


def offset(number: int) -> dict[str, dict[str, int]]:
    return {"sales": {"0": number, "11": 2 * number}, "returns": {"0": 3 * number}}


@given(st.lists(st.tuples(st.sampled_from(["pin", "nothing read", "complete", "take"]), st.integers(1, 6))))
def test_what_is_due_is_the_newest_checkpoint_that_this_attempt_has_taken(events: list[tuple[str, int]]) -> None:
    """Checkpoints are taken, and complete, in the order of their ids; some fail, some are of an attempt before."""
    commits, pinned, due, taken, done = OffsetCommits(), set(), None, 0, 0
    for event, step in events:
        match event:
            case "pin" | "nothing read":
                taken += step
                commits.pin(taken, offset(taken) if event == "pin" else None)
                pinned |= {taken} if event == "pin" else set()
            case "complete":
                done += step
                commits.complete(done)
                due = done if done in pinned else due
            case "take":
                expected = None if due is None else {("sales", 0): due, ("sales", 11): 2 * due, ("returns", 0): 3 * due}
                assert commits.take() == expected
                due = None


def test_a_failure_is_warned_of_once_and_its_offsets_are_not_tried_again() -> None:
    commits = OffsetCommits()
    for number in (1, 2):
        commits.pin(number, offset(number))
        commits.complete(number)
        assert commits.take() is not None
        assert commits.fail() is (number == 1)
        assert commits.take() is None
