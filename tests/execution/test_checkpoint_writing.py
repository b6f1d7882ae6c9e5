"""The order in which a checkpoint is written, and what each failure means."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_checkpoints.coordination.checkpoints import CheckpointProperties
from dagster_checkpoints.coordination.events import MetadataOutcomeUnknown, MetadataWriteFailed, MetadataWritten
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import (
    AlreadyExists,
    OutcomeUnknown,
    OwnershipLost,
    StorageError,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.execution.checkpoint_deletion import RemoveMark
from dagster_checkpoints.execution.checkpoint_writing import (
    BuildMetadata,
    CheckStateFiles,
    CompareObject,
    CompleteCheckpoint,
    CreateObject,
    RenewLease,
    ReserveId,
    StoreMetadata,
    StoreSavepoint,
    WriteResult,
    complete_savepoint,
    create_if_absent,
    write_checkpoint,
    write_metadata,
)
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    OperatorState,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from tests.execution.storage_scripts import follow

CHECKPOINT = CheckpointProperties()
SAVEPOINT = CheckpointProperties.for_savepoint()
STOP = CheckpointProperties.for_savepoint(stops_job=True)
METADATA = CheckpointMetadata("flights", 7, (), ())
BUILD = (BuildMetadata(7), METADATA)
UNKNOWN = OutcomeUnknown("no answer")
CREATED = (CreateObject(), None)


def written(properties: CheckpointProperties) -> list[tuple[Any, Any]]:
    """The exchanges of a checkpoint that is written without a fault."""
    steps: list[tuple[Any, Any]] = [BUILD]
    steps += [(ReserveId(7), None), (StoreSavepoint(7), "place")] if properties.is_savepoint else [(StoreMetadata(7), "place")]
    if properties != SAVEPOINT:
        steps.append((CompleteCheckpoint(7, "place", "savepoint" if properties.is_savepoint else "checkpoint"), None))
    return steps


@pytest.mark.parametrize("properties", [CHECKPOINT, SAVEPOINT, STOP])
def test_the_order_of_writes(properties: CheckpointProperties) -> None:
    assert follow(write_checkpoint(7, properties), *written(properties)) == WriteResult(MetadataWritten(7, "place"), keep=True)


@pytest.mark.parametrize("properties", [CHECKPOINT, SAVEPOINT, STOP])
@pytest.mark.parametrize(
    ("error", "outcome", "keep"),
    [
        (UNKNOWN, MetadataOutcomeUnknown(7, "no answer"), True),
        (OwnershipLost("taken over"), MetadataWriteFailed(7, "taken over"), True),
        (StorageUnavailable("away"), MetadataWriteFailed(7, "StorageUnavailable: away"), False),
        (WriteConflict("409"), MetadataWriteFailed(7, "WriteConflict: 409"), False),
        (KeyError("x"), MetadataWriteFailed(7, "KeyError: 'x'"), False),
    ],
)
def test_a_failure_ends_it_wherever_it_comes(
    properties: CheckpointProperties, error: Exception, outcome: Any, keep: bool
) -> None:
    whole = written(properties)
    for n in range(len(whole)):
        assert follow(write_checkpoint(7, properties), *whole[:n], (whole[n][0], error)) == WriteResult(outcome, keep)


def test_union_state_of_a_partly_finished_stage_declines_before_anything_is_written() -> None:
    snapshot = StageInstanceSnapshot(operator_states=(OperatorState(name="counts", kind="union"),))
    stage = StageMetadata("s", 2, ("0", "1"), finished=(0,))
    chain = ChainMetadata("s", ("s",), {1: TaskSnapshot(stages={"s": snapshot})})
    found = follow(write_checkpoint(7, CHECKPOINT), (BuildMetadata(7), CheckpointMetadata("flights", 7, (stage,), (chain,))))
    assert isinstance(found.outcome, MetadataWriteFailed) and found.keep is False
    assert (found.outcome.checkpoint_id, found.outcome.reason) == (7, FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING)
    assert not found.outcome.reason.counts
    assert "'s'" in found.outcome.message


@pytest.mark.parametrize(
    ("outcomes", "created"),
    [
        ([None], True),
        ([AlreadyExists("there")], False),
        ([UNKNOWN, None], True),
        ([UNKNOWN, UNKNOWN, AlreadyExists("it")], False),
    ],
)
def test_an_object_is_created_once(outcomes: list[Any], created: bool) -> None:
    exchanges = [(CreateObject(), outcome) for outcome in outcomes]
    assert follow(create_if_absent(), *exchanges) is created
    compared = [] if created else [(CompareObject(), None)]
    follow(write_metadata(), *exchanges, *compared)


def test_other_metadata_is_an_error() -> None:
    with pytest.raises(AlreadyExists, match="other content"):
        follow(write_metadata(), (CreateObject(), AlreadyExists("there")), (CompareObject(), AlreadyExists("other content")))


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([StorageUnavailable("away")], StorageUnavailable),
        ([WriteConflict("409")], WriteConflict),
        ([UNKNOWN, StorageUnavailable("away")], OutcomeUnknown),
        ([UNKNOWN, UNKNOWN, WriteConflict("409")], OutcomeUnknown),
        ([UNKNOWN, UNKNOWN, UNKNOWN], OutcomeUnknown),
    ],
)
def test_an_object_that_may_have_been_created_is_in_doubt(outcomes: list[Any], expected: type[Exception]) -> None:
    with pytest.raises(expected, match=str(outcomes[-1])) as found:
        follow(create_if_absent(), *[(CreateObject(), outcome) for outcome in outcomes])
    assert type(found.value) is expected


def test_a_savepoint_counts_once_its_owner_is_confirmed() -> None:
    checked = (CheckStateFiles(), None)
    follow(complete_savepoint("url", confirm=True), checked, CREATED, (RenewLease(), True), (RemoveMark(), None))
    follow(complete_savepoint("url", confirm=False), checked, CREATED, (RemoveMark(), None))
    follow(complete_savepoint("url", confirm=False), checked, CREATED, (RemoveMark(), StorageError("stays")))
    with pytest.raises(OutcomeUnknown, match="savepoint url is written, but storage did not answer whether this run still owns"):
        follow(complete_savepoint("url", confirm=True), checked, CREATED, (RenewLease(), False))
    with pytest.raises(OwnershipLost):
        follow(complete_savepoint("url", confirm=True), checked, CREATED, (RenewLease(), OwnershipLost("taken over")))


def test_a_savepoint_that_lacks_a_file_is_never_named() -> None:
    with pytest.raises(StorageError, match="missing"):
        follow(complete_savepoint("url", confirm=True), (CheckStateFiles(), StorageError("missing")))
