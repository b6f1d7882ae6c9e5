"""How an owner's writes change a pipeline's state."""

from __future__ import annotations

import pytest

from dagster_checkpoints.execution import state_changes as changes
from dagster_checkpoints.execution.origin import UNKNOWN_ORIGIN
from dagster_checkpoints.execution.pipeline_state import Job
from tests.execution.storage_scripts import NOW, pointer, state


@pytest.mark.parametrize(("location", "newest", "retained"), [(5, 0, [4]), (4, 5, [5]), (3, 5, [5, 4])])
def test_a_forgotten_checkpoint_is_neither_newest_nor_retained(location: int, newest: int, retained: list[int]) -> None:
    found = changes.forgotten(state(pointer(5), pointer(4)), pointer(location).location)
    assert (found.newest.checkpoint_id if found.newest else 0) == newest
    assert [kept.checkpoint_id for kept in found.retained] == retained


def test_forgetting_without_a_newest_checkpoint_changes_nothing() -> None:
    before = state(pointer(4), newest=None)
    assert changes.forgotten(before, "x") == before


@pytest.mark.parametrize("resume", [True, False])
def test_a_job_that_begins_without_a_lease_names_no_run(resume: bool) -> None:
    before = state(owner=None, job=Job(job_id=1, status="FAILED", run_id="old", begun_by="old"))
    found = changes.begun(before, resume=resume, restored=None, at=NOW, named=True, origin=UNKNOWN_ORIGIN)
    assert (found.job.run_id, found.job.begun_by) == ("", "")
