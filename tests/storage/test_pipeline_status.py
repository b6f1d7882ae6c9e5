"""The status that a run writes: encoding and decoding, readable by later releases, clear errors."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.control.status import (
    CheckpointCountsStatus,
    CompletedCheckpointStatus,
    FailureStatus,
    InstanceStatus,
    PendingStatus,
    PipelineStatus,
    StageStatus,
    StopStatus,
    VertexPart,
    decode_status,
    encode_status,
    read_status,
    write_status,
)
from dagster_checkpoints.errors import CorruptStatus
from dagster_checkpoints.storage import CheckpointStorage

NOW = datetime(2025, 1, 1, 12, 30, tzinfo=UTC)
STATUS = PipelineStatus(
    pipeline="flights",
    run_id="run-a",
    epoch=3,
    job_id=2,
    attempt=1,
    phase="stopping",
    sequence=17,
    updated_at=NOW,
    started_at=NOW,
    interval=5.0,
    roots=("live",),
    chains=(("live", "departures"), ("history",)),
    stages=(
        StageStatus(
            name="live",
            finished=False,
            rows=12,
            instances=(InstanceStatus(name="EWR", state="RUNNING", caught_up=True, watermark_ms=1_700_000_000_000),),
        ),
        StageStatus(name="history", finished=True, instances=(InstanceStatus(name="0", state="FINISHED", end_of_data=True),)),
    ),
    pending=(PendingStatus(checkpoint_id=8, kind="savepoint", acknowledged=1, expected=2, seconds=0.5),),
    last_checkpoint=CompletedCheckpointStatus(
        checkpoint_id=7,
        location="checkpoints/chk-7-3",
        completed_at=NOW,
        duration=0.3,
        new_bytes=10,
        total_bytes=20,
        parts=(
            VertexPart(stages=("live", "departures"), acknowledged_after=0.2, sync_seconds=0.1, new_bytes=10, total_bytes=20),
        ),
    ),
    last_failure=FailureStatus(checkpoint_id=6, reason="CHECKPOINT_EXPIRED", message="it took too long", failed_at=NOW),
    checkpoints=CheckpointCountsStatus(triggered=8, completed=6, failed=1, savepoints=1, restored=1, duration_p50=0.3),
    stop=StopStatus(request_id="stop-1", drain=False, state="WAITING_FOR_SAVEPOINT"),
)


def test_a_status_is_encoded_and_decoded(storage: CheckpointStorage, second: CheckpointStorage) -> None:
    assert read_status(second) is None
    write_status(storage, STATUS)
    assert read_status(second) == STATUS
    write_status(storage, PipelineStatus(**{**_fields(STATUS), "sequence": 18, "stop": None}))
    found = read_status(second)
    assert found is not None and (found.sequence, found.stop) == (18, None)


def _fields(status: PipelineStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in status.__struct_fields__}


def test_a_status_of_version_1_stays_readable() -> None:
    examples = Path(__file__).parent / "examples"
    assert STATUS.last_checkpoint is not None
    before = msgspec.structs.replace(
        STATUS,
        last_checkpoint=msgspec.structs.replace(STATUS.last_checkpoint, parts=()),
        last_failure=None,
        checkpoints=None,
    )
    assert decode_status((examples / "status-version-1.json").read_bytes(), "example") == before
    assert decode_status((examples / "status-version-1-statistics.json").read_bytes(), "example") == STATUS


def test_fields_that_a_later_release_adds_are_ignored() -> None:
    data = encode_status(STATUS).replace(b'{"pipeline"', b'{"mood": "good", "pipeline"')
    assert decode_status(data, "here") == STATUS


MOMENT = msgspec.json.encode(NOW)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}', b'{"version": 2}', b"[" * 100_000, encode_status(STATUS)[:-9]),
        *(
            encode_status(STATUS).replace(b'"' + name + b'":' + MOMENT, b'"' + name + b'":"' + moment + b'"')
            for name in (b"updated_at", b"started_at", b"completed_at", b"failed_at")
            for moment in (b"2026-01-01T00:00:00", b"0001-01-01T00:00:00+23:59", b"9999-12-31T23:59:59-00:01")
        ),
    ],
)
def test_a_status_that_cannot_be_read_is_named(storage: CheckpointStorage, content: bytes) -> None:
    storage.store.put("flights/status.json", content)
    with pytest.raises(CorruptStatus, match=f"{storage.store.url}/flights/status.json"):
        read_status(storage)
