"""What a retry or re-execution begins from when its configuration names a place."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.spark.errors import NothingToRestoreError
from dagster_checkpoints.spark.restoring import is_repeated_start
from dagster_checkpoints.storage import Job, PipelineState


def state(begun_by: str, **job: Any) -> PipelineState:
    return PipelineState(pipeline="x", epoch=1, token="t", job=Job(job_id=3, begun_by=begun_by, **job))


@pytest.mark.parametrize(
    ("restore_from", "begun_by", "repeated"),
    [
        ("42", "root", True),
        ("none", "root", True),  # a new start is not started a second time either
        ("42", "sibling", True),
        ("latest", "root", False),
        ("42", "another", False),  # nothing of this chain has begun it
        ("42", "", False),  # an earlier release did not say
    ],
)
def test_a_start_is_repeated_if_a_run_of_the_chain_has_made_it(restore_from: str, begun_by: str, repeated: bool) -> None:
    chain = {"root", "sibling"}
    assert is_repeated_start(restore_from, chain, state(begun_by, status="FAILED")) is repeated
    assert is_repeated_start(restore_from, chain, state(begun_by, status="FINISHED", ended_by="suspend")) is repeated
    assert is_repeated_start(restore_from, (), state(begun_by, status="FAILED")) is False
    if repeated:
        with pytest.raises(NothingToRestoreError, match="job 3 there, and that job is FINISHED"):
            is_repeated_start(restore_from, chain, state(begun_by, status="FINISHED", ended_by="drain"))
