"""The request queue and the retained checkpoints against the plainest model of each, in any order of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dagster_checkpoints.coordination.checkpoints import CheckpointKind, CheckpointProperties, CompletedCheckpoint
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.coordination.requests import CheckpointRequest, Dropped, RequestQueue
from dagster_checkpoints.coordination.retention import CompletedCheckpoints, JobStatus

KINDS = {
    "user": CheckpointProperties(),
    "forced": CheckpointProperties(forced=True),
    "periodic": CheckpointProperties.for_periodic(),
    "savepoint": CheckpointProperties.for_savepoint(),
    "unforced savepoint": CheckpointProperties(kind=CheckpointKind.SAVEPOINT),
}


class Queue(RuleBasedStateMachine):
    @initialize(concurrent=st.integers(1, 2), pause=st.sampled_from([0.0, 5.0]), limit=st.integers(1, 4))
    def start(self, concurrent: int, pause: float, limit: int) -> None:
        self.queue = RequestQueue(max_concurrent=concurrent, min_pause=pause, max_queued=limit)
        self.concurrent, self.pause, self.limit = concurrent, pause, limit
        self.model: list[CheckpointRequest] = []
        self.ids = 0

    def ordered(self) -> list[CheckpointRequest]:
        def rank(request: CheckpointRequest) -> tuple[bool, bool, bool, float]:
            kind = request.properties
            return (not kind.is_savepoint, not kind.forced, kind.periodic, request.requested_at)

        # Sorting is stable: equals stay in the order in which they came.
        return sorted(self.model, key=rank)

    @rule(kind=st.sampled_from(list(KINDS)), at=st.integers(0, 3), for_end=st.booleans())
    def adds(self, kind: str, at: float, for_end: bool) -> None:
        self.ids += 1
        request = CheckpointRequest(KINDS[kind], at, str(self.ids), for_end_of_data=for_end and kind == "user")
        self.model.append(request)
        dropped = self.queue.add(request)
        if len(self.model) <= self.limit:
            assert dropped is None
        else:
            worst = self.ordered()[-1]
            self.model.remove(worst)
            assert dropped == Dropped(worst, FailureReason.TOO_MANY_CHECKPOINT_REQUESTS)

    @rule(pending=st.integers(0, 2), last=st.sampled_from([None, 0.0]), now=st.sampled_from([4.0, 5.0]))
    def chooses(self, pending: int, last: float | None, now: float) -> None:
        chosen = self.queue.choose(pending=pending, last_completion=last, now=now)
        best = self.ordered()[0] if self.model else None
        if best is None or (pending >= self.concurrent and not best.properties.forced):
            assert chosen is None
            return
        self.model.remove(best)
        if best.properties.periodic and last is not None and now < last + self.pause:
            assert chosen == Dropped(best, FailureReason.MINIMUM_TIME_BETWEEN_CHECKPOINTS, last + self.pause)
        else:
            assert chosen is best

    @rule(back=st.integers(0, 4))
    def withdraws(self, back: int) -> None:
        request_id = str(self.ids - back)
        known = [request for request in self.model if request.request_id == request_id]
        assert self.queue.withdraw(request_id) == bool(known)
        self.model = [request for request in self.model if request not in known]

    @rule()
    def withdraws_periodic(self) -> None:
        self.queue.withdraw_periodic()
        self.model = [request for request in self.model if not request.properties.periodic]

    @rule()
    def withdraws_end_of_data(self) -> None:
        self.queue.withdraw_end_of_data()
        self.model = [request for request in self.model if not request.for_end_of_data]

    @rule()
    def drains(self) -> None:
        assert self.queue.drain() == self.ordered()
        self.model = []

    @invariant()
    def its_properties_match_the_model(self) -> None:
        assert len(self.queue) == len(self.model) <= self.limit
        assert self.queue.has_periodic == any(request.properties.periodic for request in self.model)
        assert self.queue.has_end_of_data == any(request.for_end_of_data for request in self.model)


class Retention(RuleBasedStateMachine):
    @initialize(retained=st.integers(1, 4), restored=st.integers(0, 3), status=st.sampled_from(JobStatus), keep=st.booleans())
    def start(self, retained: int, restored: int, status: JobStatus, keep: bool) -> None:
        found = [CompletedCheckpoint(i, f"chk-{i}") for i in range(1, restored + 1)]
        self.store = CompletedCheckpoints(retained, reversed(found))
        self.retained, self.status, self.keep = retained, status, keep
        self.next_id = restored + 1
        self.added = dict(enumerate(found, start=1))
        """Everything that was ever in the list."""
        self.given_up: list[int] = []

    @property
    def kept(self) -> list[int]:
        return [checkpoint.checkpoint_id for checkpoint in self.store.all]

    @rule(skipped=st.integers(0, 2))
    def a_savepoint_completes(self, skipped: int) -> None:
        """A savepoint is the user's: it is not in the list and subsumes nothing."""
        before = self.store.all
        self.next_id += skipped + 1
        savepoint = CompletedCheckpoint(self.next_id - 1, "savepoint", CheckpointProperties.for_savepoint())
        assert (self.store.add(savepoint), self.store.all) == ([], before)

    @rule(stops_job=st.sampled_from([False, False, True]), skipped=st.integers(0, 2))
    def completes(self, stops_job: bool, skipped: int) -> None:
        self.next_id += skipped + 1
        properties = CheckpointProperties.for_savepoint(stops_job=True) if stops_job else CheckpointProperties()
        checkpoint = CompletedCheckpoint(self.next_id - 1, f"chk-{self.next_id - 1}", properties)
        candidates = [*self.kept, checkpoint.checkpoint_id]
        self.added[checkpoint.checkpoint_id] = checkpoint
        self.give_up(self.store.add(checkpoint))
        assert self.store.latest == checkpoint
        # As many as `retained` says, but always the newest of all and the newest checkpoint.
        checkpoints = [i for i in candidates if not self.added[i].is_savepoint]
        protected = {max(candidates), max(checkpoints, default=0)} - {0}
        assert protected <= set(self.kept) <= set(candidates)
        assert len(self.kept) == min(len(candidates), max(self.retained, len(protected)))
        # The oldest leave the list.
        left = set(candidates) - set(self.kept)
        assert all(gone < other for gone in left for other in set(self.kept) - protected)

    def give_up(self, checkpoints: list[CompletedCheckpoint]) -> None:
        for checkpoint in checkpoints:
            assert not checkpoint.is_savepoint, "a savepoint is never deleted by the system"
            assert checkpoint.checkpoint_id not in self.given_up, "twice"
            assert self.added[checkpoint.checkpoint_id] == checkpoint
            self.given_up.append(checkpoint.checkpoint_id)
        assert [c.checkpoint_id for c in checkpoints] == sorted(c.checkpoint_id for c in checkpoints)

    @invariant()
    def no_checkpoint_is_lost(self) -> None:
        assert self.kept == sorted(self.kept)
        assert self.store.latest_id == max(self.kept, default=0)
        checkpoints = {i for i, checkpoint in self.added.items() if not checkpoint.is_savepoint}
        assert checkpoints == {i for i in self.kept if i in checkpoints} | set(self.given_up)
        assert not set(self.kept) & set(self.given_up)

    def teardown(self) -> None:
        """The job ends."""
        if not hasattr(self, "store"):
            return
        before = self.kept
        given_up = self.store.shut_down(self.status, self.keep)
        self.give_up(given_up)
        if self.status is JobStatus.FINISHED and not self.keep:
            assert all(checkpoint.is_savepoint for checkpoint in self.store.all)
            assert sorted([*self.kept, *(c.checkpoint_id for c in given_up)]) == before
        else:
            assert (given_up, self.kept) == ([], before)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestRetention = Retention.TestCase
TestRetention.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
