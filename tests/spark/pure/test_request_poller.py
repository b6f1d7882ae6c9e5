"""The thread that reads requests: no request may end it."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.control import ControlRequest, RequestBox
from dagster_checkpoints.spark.job.job_messages import QueuedRequest
from dagster_checkpoints.spark.job.request_poller import RequestPoller
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.storage import CheckpointStorage, open_store, this_process


@pytest.mark.parametrize(
    ("target", "setting", "value", "text"),
    [
        ("s3://archive/flights", "AWS_PROFILE", "of-another-machine", "ProfileNotFound: .*of-another-machine"),
        ("s3://archive/flights", "AWS_ENDPOINT_URL_S3", "minio", "ValueError: Invalid endpoint: minio"),
        ("/kept\0", "", "", "ValueError: .*null"),
        ("/dev/null/kept", "", "", "cannot write file:///dev/null/kept"),
    ],
)
def test_a_target_that_cannot_be_opened_is_answered_and_the_next_request_is_taken(
    target: str, setting: str, value: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting:
        monkeypatch.setenv(setting, value)
    taken: list[QueuedRequest] = []
    with CheckpointStorage(open_store(str(tmp_path)), "flights") as storage:
        owner = storage.acquire(this_process("run"), 30.0)
        box = RequestBox(storage.store, storage.layout)

        def ask(request_id: str, **what: Any) -> None:
            now = datetime.now(UTC)
            request = ControlRequest(
                request_id=request_id, epoch=owner.epoch, deadline_seconds=60.0, asked_by="a test", asked_at=now, **what
            )
            box.ask(request)

        ask("a", kind="savepoint", target=target)
        ask("b", kind="stop")
        savepoints = SavepointsInProgress(storage)
        poller = RequestPoller(box, owner.epoch, savepoints, taken.append, box.answer, 1.0, logging.getLogger("test"))
        poller.poll()
        assert [queued.request.request_id for queued in taken] == ["b"]
        answer = box.read_answer("a")
        assert answer is not None and (answer.status, answer.reason) == ("failed", "IO_EXCEPTION")
        assert re.search(text, answer.message), answer.message
        owner.release()
