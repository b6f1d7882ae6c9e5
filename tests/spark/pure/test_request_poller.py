"""The thread that reads requests: no request may end it."""

from __future__ import annotations

import logging
import queue
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.errors import CorruptAnswer, OutcomeUnknown, StorageError, StorageUnavailable, WriteConflict
from dagster_checkpoints.spark.job.requests import RequestPoller
from dagster_checkpoints.spark.job.runtime import QueuedRequest
from dagster_checkpoints.spark.job.savepoints_in_progress import SavepointsInProgress
from dagster_checkpoints.storage import CheckpointStorage, open_store
from dagster_checkpoints.storage.processes import this_process


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


def test_an_id_that_was_swept_can_be_used_again_in_the_same_run(tmp_path: Path) -> None:
    """A run of several weeks, of which the same savepoint is asked for each week."""
    taken: list[str] = []
    with CheckpointStorage(open_store(str(tmp_path)), "flights") as storage:
        owner = storage.acquire(this_process("run"), 30.0)
        box = RequestBox(storage.store, storage.layout)
        savepoints = SavepointsInProgress(storage)
        poller = RequestPoller(
            box, owner.epoch, savepoints, lambda q: taken.append(q.request.request_id), box.answer, 1.0, logging.getLogger("test")
        )
        for week in (1, 2):
            now = datetime.now(UTC)
            box.ask(
                ControlRequest(
                    request_id="weekly",
                    kind="savepoint",
                    epoch=owner.epoch,
                    deadline_seconds=60.0,
                    asked_by="a test",
                    asked_at=now,
                )
            )
            for _ in range(3):
                poller.poll()
            assert taken == ["weekly"] * week, "once each week"
            box.answer(Answer(request_id="weekly", status="done", answered_at=now))
            poller.poll()
            assert box.sweep(0) == 1
        owner.release()


class Outage(RequestBox):
    """Storage that does not take the first answers."""

    def __init__(self, *errors: StorageError) -> None:
        self._errors = list(errors)
        self.written: list[str] = []

    def answer(self, answer: Answer) -> Answer:
        if self._errors:
            raise self._errors.pop(0)
        self.written.append(answer.request_id)
        return answer


@pytest.mark.parametrize(
    ("errors", "written"),
    [
        ([], ["a", "b"]),
        ([StorageUnavailable("down")], ["b", "a"]),
        ([StorageUnavailable("down"), OutcomeUnknown("no answer"), WriteConflict("409")], ["b", "a"]),
        ([CorruptAnswer("not JSON")], ["b"]),  # of another owner: to write it again is of no use
    ],
)
def test_an_answer_that_storage_does_not_take_is_written_later(errors: list[StorageError], written: list[str]) -> None:
    """A savepoint fails because storage is down, and so does its answer: its requester would wait for ever."""
    box = Outage(*errors)
    savepoints: Any = None
    poller = RequestPoller(box, 1, savepoints, lambda queued: None, box.answer, 1.0, logging.getLogger("test"))
    for request_id in ("a", "b"):
        poller.write(Answer(request_id=request_id, status="failed", answered_at=datetime.now(UTC)))
    for _ in errors:
        poller.write_again()
    assert sorted(box.written) == sorted(written)
    if len(errors) < 2:
        assert box.written == written
    poller.write_again()
    assert len(box.written) == len(written), "each once"


class Strange(RequestBox):
    """Storage whose first listing fails in a way that no one has foreseen."""

    failed = False

    def open_requests(self, epoch: int) -> list[ControlRequest]:
        if not self.failed:
            self.failed = True
            raise ValueError("of a library")
        return list(super().open_requests(epoch))


def test_no_error_ends_the_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken: queue.SimpleQueue[QueuedRequest] = queue.SimpleQueue()
    with CheckpointStorage(open_store(str(tmp_path)), "flights") as storage:
        owner = storage.acquire(this_process("run"), 30.0)
        box = Strange(storage.store, storage.layout)
        now = datetime.now(UTC)
        box.ask(
            ControlRequest(request_id="a", kind="stop", epoch=owner.epoch, deadline_seconds=60.0, asked_by="a test", asked_at=now)
        )
        savepoints = SavepointsInProgress(storage)
        poller = RequestPoller(box, owner.epoch, savepoints, taken.put, box.answer, 0.01, logging.getLogger("test"))
        poller.start()
        assert taken.get(timeout=30).request.request_id == "a"
        poller.stop(30)
        owner.release()
    assert "Control requests cannot be read now: ValueError: of a library" in caplog.text
