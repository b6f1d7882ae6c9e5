"""Results of checks on their way to Dagster: of instances together, and of commits that are not reported yet."""

from __future__ import annotations

import dagster as dg

from dagster_checkpoints.pipeline import CheckEvaluation, CommitCheckResult
from dagster_checkpoints.plugin.commit_checks import HeldChecks, evaluation_event, of_all_instances


def found(passed: bool, instance: str = "left", checkpoint: int = 1, check: str = "few", **rows: int) -> CheckEvaluation:
    text = None if passed else f"too many at {checkpoint}"
    return CheckEvaluation(check, instance, checkpoint, True, CommitCheckResult(passed, text, rows))


def test_a_check_passes_if_the_rows_of_every_instance_pass() -> None:
    alone = found(True, rows=1)
    assert of_all_instances([alone]) == [alone]
    both = of_all_instances([found(True, "left", 3, rows=1), found(False, "right", 4, rows=9), found(True, check="other")])
    together = CommitCheckResult(False, "right: too many at 4", {"left: rows": 1, "right: rows": 9})
    assert both == [CheckEvaluation("few", "", 4, True, together), found(True, check="other")]
    # Of an instance that has committed twice the newest result counts: it has seen all rows.
    assert of_all_instances([found(False, checkpoint=1), found(True, checkpoint=2)]) == [found(True, checkpoint=2)]


def test_a_failure_is_held_until_it_is_reported() -> None:
    held = HeldChecks()
    held.add("sales", [found(True, checkpoint=1)])
    held.add("sales", [found(False, checkpoint=2)])
    held.add("sales", [found(True, checkpoint=3)])
    held.add("returns", [found(True, checkpoint=9)])
    assert held.take("sales") == [found(False, checkpoint=2)]
    assert held.take("sales") == []
    held.add("sales", [found(True, checkpoint=4)])
    held.add("sales", [found(True, checkpoint=5)])
    assert held.take("sales") == [found(True, checkpoint=5)]
    assert held.take("returns") == [found(True, checkpoint=9)]


def test_a_stage_ends_with_the_newest_result_of_each_check() -> None:
    held = HeldChecks()
    held.add("sales", [found(True, checkpoint=1)])
    held.take("sales")
    assert held.end("sales") == ([], [found(True, checkpoint=1)]), "though it was reported"
    held.add("sales", [found(False, checkpoint=2)])
    held.add("sales", [found(True, checkpoint=3)])
    assert held.end("sales") == ([found(False, checkpoint=2)], [found(True, checkpoint=3)])
    assert held.end("sales") == held.end("returns") == ([], [])


def test_the_event_of_a_result() -> None:
    event = evaluation_event(dg.AssetKey("sales"), found(False, checkpoint=7, rows=3))
    assert (event.asset_check_key, event.passed, event.description) == (
        dg.AssetCheckKey(dg.AssetKey("sales"), "few"),
        False,
        "too many at 7",
    )
    assert {name: value.value for name, value in event.metadata.items()} == {"rows": 3, "checkpoint": 7}
    assert (event.severity, event.blocking) == (dg.AssetCheckSeverity.ERROR, True)
