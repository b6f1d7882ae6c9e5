"""The coordinator's independent rules: which request is next, which failures count, what is retained."""

from __future__ import annotations

from itertools import permutations

import pytest
from msgspec.structs import replace

from dagster_checkpoints.coordination.checkpoints import CheckpointKind, CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.coordination.failures import FailureCounter, FailureReason
from dagster_checkpoints.coordination.requests import CheckpointRequest, Dropped, RequestQueue
from dagster_checkpoints.coordination.retention import CompletedCheckpoints, JobStatus

USER = CheckpointProperties()
FORCED = CheckpointProperties(forced=True)
PERIODIC = CheckpointProperties.for_periodic()
SAVEPOINT = CheckpointProperties.for_savepoint()
UNFORCED_SAVEPOINT = CheckpointProperties(kind=CheckpointKind.SAVEPOINT)


def queue(max_concurrent: int = 1, min_pause: float = 0, max_queued: int = 10) -> RequestQueue:
    return RequestQueue(max_concurrent=max_concurrent, min_pause=min_pause, max_queued=max_queued)


def test_the_order_of_requests() -> None:
    best_first = [
        CheckpointRequest(SAVEPOINT, 5, "savepoint"),
        CheckpointRequest(UNFORCED_SAVEPOINT, 4, "savepoint, not forced"),
        CheckpointRequest(FORCED, 3, "forced"),
        CheckpointRequest(USER, 1, "user, early"),
        CheckpointRequest(USER, 2, "user, late"),
        CheckpointRequest(PERIODIC, 0),
    ]
    for order in permutations(best_first):
        requests = queue()
        for request in order:
            assert requests.add(request) is None
        chosen = [requests.choose(pending=0, last_completion=None, now=9) for _ in order]
        assert chosen == best_first


def test_equal_requests_run_in_the_order_in_which_they_came() -> None:
    requests = queue()
    for name in "abc":
        requests.add(CheckpointRequest(USER, 1, name))
    chosen = [requests.choose(pending=0, last_completion=None, now=1) for _ in "abc"]
    assert [c.request_id for c in chosen if isinstance(c, CheckpointRequest)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("properties", "pending", "now", "outcome"),
    [
        (USER, 0, 0, "runs"),
        (USER, 1, 0, "waits"),
        (PERIODIC, 1, 100, "waits"),
        (SAVEPOINT, 7, 0, "runs"),
        (UNFORCED_SAVEPOINT, 1, 0, "waits"),
        (FORCED, 1, 0, "runs"),
        # The last one completed at 0, the pause is 5.
        (PERIODIC, 0, 4.9, "dropped"),
        (PERIODIC, 0, 5, "runs"),
        (USER, 0, 4.9, "runs"),
        (SAVEPOINT, 0, 4.9, "runs"),
    ],
)
def test_which_requests_may_run(properties: CheckpointProperties, pending: int, now: float, outcome: str) -> None:
    requests = queue(min_pause=5)
    request = CheckpointRequest(properties, 0)
    requests.add(request)
    chosen = requests.choose(pending=pending, last_completion=0, now=now)
    expected = {
        "runs": request,
        "waits": None,
        "dropped": Dropped(request, FailureReason.MINIMUM_TIME_BETWEEN_CHECKPOINTS, retry_at=5),
    }
    assert chosen == expected[outcome]
    assert len(requests) == (outcome == "waits")


def test_a_full_queue_drops_its_lowest_entry() -> None:
    requests = queue(max_queued=2)
    requests.add(CheckpointRequest(PERIODIC, 0))
    requests.add(CheckpointRequest(USER, 1, "u"))
    dropped = requests.add(CheckpointRequest(SAVEPOINT, 2, "s"))
    assert dropped == Dropped(CheckpointRequest(PERIODIC, 0), FailureReason.TOO_MANY_CHECKPOINT_REQUESTS)
    itself = CheckpointRequest(PERIODIC, 3)
    assert requests.add(itself) == Dropped(itself, FailureReason.TOO_MANY_CHECKPOINT_REQUESTS)
    assert [r.request_id for r in requests.drain()] == ["s", "u"]
    assert len(requests) == 0


@pytest.mark.parametrize(
    ("requests", "periodic", "end_of_data"),
    [
        # p: periodic, u: a user's, e: for the end of the data; x: the best one runs. The queue holds two.
        ("", False, False),
        ("p", True, False),
        ("e", False, True),
        ("u", False, False),
        ("p u", True, False),
        ("e u", False, True),
        ("p e", True, True),
        ("p x", False, False),
        ("p u x", True, False),
        ("p e x", True, False),
        # Dropped: the last in the queue, or the new one.
        ("u p u", False, False),
        ("p p p", True, False),
        ("p p p x", True, False),
        ("p p p x x", False, False),
        ("u u e", False, False),
        ("e e e x", False, True),
    ],
)
def test_the_queued_requests_can_be_read(requests: str, periodic: bool, end_of_data: bool) -> None:
    waiting = queue(max_queued=2)
    for now, word in enumerate(requests.split()):
        if word == "x":
            waiting.choose(pending=0, last_completion=None, now=now)
        else:
            waiting.add(CheckpointRequest(PERIODIC if word == "p" else USER, now, for_end_of_data=word == "e"))
    assert (waiting.has_periodic, waiting.has_end_of_data) == (periodic, end_of_data)


def test_a_request_that_is_not_queued_cannot_be_withdrawn() -> None:
    requests = queue()
    assert not requests.withdraw("a")
    for name in "abc":
        requests.add(CheckpointRequest(USER, 1, name))
    assert not requests.withdraw("d")
    assert requests.withdraw("b")
    assert [request.request_id for request in requests.drain()] == ["a", "c"]


# Failures

COUNTED = {
    FailureReason.IO_EXCEPTION,
    FailureReason.CHECKPOINT_ASYNC_EXCEPTION,
    FailureReason.CHECKPOINT_DECLINED,
    FailureReason.CHECKPOINT_EXPIRED,
    FailureReason.FINALIZE_CHECKPOINT_FAILURE,
}
PRE_FLIGHT = {
    FailureReason.PERIODIC_SCHEDULER_SHUTDOWN,
    FailureReason.TOO_MANY_CHECKPOINT_REQUESTS,
    FailureReason.MINIMUM_TIME_BETWEEN_CHECKPOINTS,
    FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING,
    FailureReason.IO_EXCEPTION,
}


@pytest.mark.parametrize("reason", list(FailureReason))
def test_which_failures_count_and_which_are_pre_flight(reason: FailureReason) -> None:
    assert FailureCounter(0).failed(1, reason) == (reason in COUNTED) == reason.counts
    assert reason.pre_flight == (reason in PRE_FLIGHT)


@pytest.mark.parametrize(
    ("events", "fails_at"),
    [
        # Failed ids; c7 completes 7. Two are tolerable.
        ("1 2", None),
        ("1 2 3", 2),
        ("1 1 1 2 2", None),
        ("1 2 c3 4 5", None),
        ("1 2 c3 4 5 6", 5),
        ("c5 3 4 1 2", None),
        ("2 c1 3 4", None),
        ("c5 c3 6 7 8", 4),
        # A late failure of the id that completed last.
        ("c5 5 6 7", None),
        ("4 5 c5 5 6 7", None),
        ("4 5 c5 5 6 7 8", 6),
        # The count restarts at 0 once it has failed the job.
        ("1 2 3 4 5", 2),
    ],
)
def test_consecutive_failures(events: str, fails_at: int | None) -> None:
    counter = FailureCounter(2)
    fails = []
    for step, event in enumerate(events.split()):
        if event.startswith("c"):
            counter.completed(int(event[1:]))
        elif counter.failed(int(event), FailureReason.CHECKPOINT_EXPIRED):
            fails.append(step)
    assert fails == ([] if fails_at is None else [fails_at])


# Retention


@pytest.mark.parametrize(
    ("retained", "added", "kept", "given_up"),
    [
        # 3: a checkpoint, s3: a savepoint, x3: a savepoint that stopped the job.
        (1, "1", "1", ""),
        (1, "1 2 3", "3", "1 2"),
        (2, "1 2 3", "2 3", "1"),
        (1, "1 s2", "1", ""),
        (1, "1 s2 3", "3", "1"),
        # The newest checkpoint survives even where a stopping savepoint is newer.
        (1, "1 x2", "1 2", ""),
        (2, "1 2 x3", "2 3", "1"),
        (3, "1 2 x3", "1 2 3", ""),
        # A savepoint leaves the list undeleted.
        (1, "1 x2 3", "3", "1"),
        (1, "x1", "1", ""),
        (1, "x1 x2", "2", ""),
        (1, "x1 x2 3 x4", "3 4", ""),
    ],
)
def test_retention(retained: int, added: str, kept: str, given_up: str) -> None:
    store = CompletedCheckpoints(retained)
    discarded = []
    for text in added.split():
        kind = {"s": SAVEPOINT, "x": CheckpointProperties.for_savepoint(stops_job=True)}.get(text[0], USER)
        discarded += store.add(CompletedCheckpoint(int(text.lstrip("sx")), text, kind))
    assert [str(c.checkpoint_id) for c in discarded] == given_up.split()
    assert not any(c.is_savepoint for c in discarded)
    assert [str(c.checkpoint_id) for c in store.all] == kept.split()


def test_a_savepoint_has_a_target_only_if_it_is_given_one() -> None:
    assert SAVEPOINT.request_id == "" == CheckpointProperties().request_id
    assert CheckpointProperties.for_savepoint(request_id="asked") == replace(SAVEPOINT, request_id="asked")


def test_a_finished_job_never_deletes_a_savepoint() -> None:
    stopping = CheckpointProperties.for_savepoint(stops_job=True)
    store = CompletedCheckpoints(3, [CompletedCheckpoint(2, "sp", stopping), CompletedCheckpoint(1, "c")])
    assert store.latest is not None and store.latest.location == "sp"
    assert [c.location for c in store.shut_down(JobStatus.FINISHED)] == ["c"]
    assert [c.location for c in store.all] == ["sp"]
