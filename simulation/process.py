"""One simulated process: from acquiring the pipeline to saying how it ended.

Mirrors the job execution: attempts under a restart strategy. A crash loses everything in here; `storage` and `sinks` survive it.
Read `machine`, `writing` and `loop` first.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

from dagster_checkpoints.coordination import (
    CheckpointCoordinator,
    DiscardCheckpoint,
    DiscardStates,
    GiveUp,
    JobRestarting,
    Shutdown,
    TaskState,
    TaskStateChanged,
)
from dagster_checkpoints.coordination import JobStatus as CoordinatorStatus
from dagster_checkpoints.state import RestoreError
from dagster_checkpoints.storage.pipeline_state import JobStatus
from simulation.control import Control, Request, StopFailed
from simulation.deployment import deploy
from simulation.loop import AttemptFailed, Canceled, FetchFailed, JobFailed, Loop
from simulation.machine import LEASE, TURN
from simulation.restoring import (
    From,
    NothingToRestore,
    Restored,
    StartPoint,
    choose_start,
    completed_checkpoint,
    job_is_over,
    read_restored,
)
from simulation.storage import (
    OK,
    PAUSE,
    PUT,
    WAIT,
    OutcomeUnknown,
    OwnershipLost,
    Steps,
    StorageError,
    StorageUnavailable,
    acquire,
)
from simulation.violations import check

if TYPE_CHECKING:
    from simulation.world import World


_ENDS = (Canceled, AttemptFailed, JobFailed, StopFailed, StorageError)


class Process(Loop):
    """See the module's text."""

    def __init__(self, world: World, number: int, start: From) -> None:
        super().__init__(world, number, start)
        self.control = Control(self)

    def ended(self) -> None:
        self.world.process_ended(self)

    def _run(self) -> Generator[str, str, None]:
        try:
            self.ownership = ownership = yield from acquire(
                self.world.store, str(self.number), LEASE, lambda: self.world.now, self._sleep, self._knows_gone
            )
        except StorageError:
            self.status = "REFUSED"
            return
        self.count("take-overs" if ownership.previous.lease is not None else "acquisitions")
        status = "before it began"
        try:
            start = yield from self._choose()
            status = "FAILED"
            error = yield from self._execute(start)
            status = "FINISHED" if error is None else "CANCELED" if isinstance(error, Canceled) else "FAILED"
        except (StorageError, NothingToRestore, RestoreError) as error:
            self.world.note(f"process {self.number} does not start: {error!r}")
        begun: JobStatus | None = None if self._start is None else status  # type: ignore[assignment]
        self.status = status
        self.ended_by = self._how if status == "FINISHED" else ""
        with suppress(StorageError):
            yield from ownership.release(begun)
        self.control.over(status, [item for item in self.queue if isinstance(item, Request)])

    def _knows_gone(self, owner: str) -> bool:
        """Whether an owner has crashed, and had run on this process's machine: two processes in turn run on the same one."""
        gone = self.world.processes[int(owner)].crashed and int(owner) // 2 == self.number // 2
        if gone:
            self.count("take-overs at once")
        return gone

    def _sleep(self, seconds: float) -> None:
        self._sleeping_until, self._waits_for = self.now + seconds, None

    def _choose(self) -> Steps[StartPoint]:
        ownership = self.ownership
        assert ownership is not None
        yield from self._read()
        if self.superseded:
            raise OwnershipLost  # what it would begin from may be gone
        if job_is_over(ownership.previous) and ownership.previous.newest is not None:
            self.dirty = True  # its end could not be said: what is left is swept once the newest is named no more
        start = choose_start(self.world.store, ownership, self.asked_start, self.world.shapes, self.number)
        for pointer in ownership.retained:
            if pointer.kind != "savepoint":
                self.registry.register(pointer.location, self.world.store.check_whole(pointer.location).files)
        if start.restored is not None and not start.restored.savepoint:
            self.registry.register(start.restored.location, start.restored.metadata.files)
        return start

    @staticmethod
    def _read() -> Steps[None]:
        """Storage is asked for something, and may be away."""
        if (yield PUT) not in (None, OK):
            raise StorageUnavailable

    def _begin(self, start: StartPoint) -> Steps[None]:
        """Say that the job runs from there: only once all of its state is here."""
        ownership = self.ownership
        assert ownership is not None
        before = ownership.previous.job
        self.job_id = yield from ownership.begin_job(resume=start.resume, restored=start.pointer)
        self._start = start
        self._set_lineage(start, before.job_id)
        if start.claimed and start.pointer is not None:
            yield from ownership.claim(start.pointer)

    def _set_lineage(self, start: StartPoint, before: int) -> None:
        restored = start.restored
        if restored is None:
            self.lineage = ((self.job_id, None),)
        elif start.resume:
            check(self.job_id == before, "a resumed job has another id")
            self.lineage = restored.metadata.lineage
        else:
            parents = tuple(
                (job, restored.metadata.checkpoint_id if upto is None else upto) for job, upto in restored.metadata.lineage
            )
            self.lineage = (*parents, (self.job_id, None))

    def _execute(self, start: StartPoint) -> Steps[BaseException | None]:
        self.io.append(self._sweep)
        restored = start.restored
        self.count("restores" if restored is not None else "new starts")
        self.restored = restored
        status: JobStatus = "FAILED"
        ended: BaseException | None
        yield from self._fetch(restored)
        yield from self._begin(start)
        self._deploy(restored)
        self.coordinator = CheckpointCoordinator(
            self.shape.graph,
            self.config,
            next_checkpoint_id=start.next_checkpoint_id,
            finished=self.finished,
            completed=start.retained,
        )
        self._passed_over = tuple(DiscardCheckpoint(checkpoint) for checkpoint in start.passed_over)
        error = yield from self._one_attempt()
        while True:
            if error is None:
                status, ended = "FINISHED", None
                break
            ended = yield from self._restart(error)
            if ended is not None:
                status = "CANCELED" if isinstance(ended, Canceled) else "FAILED"
                break
            try:
                yield from self._fetch(self.restored)
            except StorageUnavailable:
                self.count("failed fetches")
                error = FetchFailed()
                continue
            except StorageError as lost:
                ended = lost
                break
            self._deploy(self.restored)
            error = yield from self._one_attempt()
        yield from self._shut_down(status)
        self.uploads.clear()
        self._sleeping_until, self._waits_for = 0.0, lambda: not self.io_ready()
        while self.io_ready():
            yield WAIT
        return ended

    def _fetch(self, restored: Restored | None) -> Steps[None]:
        """The files that the checkpoint names."""
        yield PAUSE
        if restored is None:
            return
        yield from self._read()
        if self.superseded:
            raise OwnershipLost  # what it was to fetch may have been deleted by the new owner
        self.world.store.check_whole(restored.location)

    def _deploy(self, restored: Restored | None) -> None:
        self.attempt += 1
        deploy(self, restored, self._start)
        if restored is not None and not restored.savepoint:
            self.known(restored)

    def _one_attempt(self) -> Steps[BaseException | None]:
        self.restarting = False
        self.count("attempts")
        try:
            yield from self._confirm_ownership()
            while len(self.finished) < self.shape.graph.instance_count:
                yield TURN
                self._turn()
            while self.coordinator.finalizing is not None:
                # Its outcome must be known before the job is over: else it lands in a finished job, and stays for ever.
                yield TURN
                self._turn()
            self.control.all_finished()
            return None
        except _ENDS as error:
            return error
        finally:
            self.tasks_stopped()

    def _confirm_ownership(self) -> Steps[None]:
        """Building a deployment takes a while: before it touches the sinks it must be known that nobody else does by now."""
        assert self.ownership is not None
        while True:
            try:
                yield from self.ownership.confirm()
                return
            except (StorageUnavailable, OutcomeUnknown):
                if self.queue:
                    self._take(self.queue.popleft())

    def tasks_stopped(self) -> None:
        """Those that had not finished are cancelled."""
        for task in self.running:
            if not task.done:
                task.done = True
                task.close()
        self.running = []

    def _restart(self, error: BaseException) -> Steps[BaseException | None]:
        if isinstance(error, Canceled | StorageError):
            return error
        self.restarting = True
        try:
            self.control.attempt_failed(str(error))
            decision = self.strategy.on_failure(self.now)
            if isinstance(decision, GiveUp):
                return JobFailed(decision.reason)
            self.count("restarts")
            until = self.now + decision.delay
            self._tasks_are_gone(error)
            while self.coordinator.finalizing is not None or self.now < until:
                self._sleeping_until = until
                self._waits_for = None
                if self.queue:
                    yield PAUSE
                    self._take(self.queue.popleft())
                elif self.coordinator.finalizing is not None:
                    self._sleeping_until, self._waits_for = 0.0, lambda: bool(self.queue)
                    yield WAIT
                else:
                    yield WAIT
            self.control.attempt_failed(str(error))
            latest = yield from self._latest()
        except (Canceled, StorageError, JobFailed) as ended:
            return ended
        at_start = self._start.restored if self._start is not None else None
        if latest is None:
            self.handle(JobRestarting())
        else:
            # It may be news: one that has landed although nobody heard of it.
            newest = self.ownership.state.newest if self.ownership is not None and latest is not at_start else None
            known = completed_checkpoint(newest) if newest is not None else None
            self.handle(JobRestarting(frozenset(latest.plan.finished), known))
        if self.control.stop is None:
            self.drain_if_wanted()  # asked during the stop that has failed over
        self.restored = latest
        return None

    def _tasks_are_gone(self, error: BaseException) -> None:
        failed = error.args[1] if isinstance(error, AttemptFailed) else None
        for task in self.tasks:
            if task not in self.finished:
                self.handle(TaskStateChanged(task, TaskState.FAILED if task == failed else TaskState.CANCELED))

    def _latest(self) -> Steps[Restored | None]:
        """What to restart from, as storage has it."""
        ownership = self.ownership
        assert ownership is not None
        while True:
            try:
                yield from ownership.confirm()
                newest = ownership.state.newest
                at_start = self._start.restored if self._start is not None else None
                if newest is None or newest.epoch != self.epoch:
                    return at_start
                yield from self._read()
                if self.superseded:
                    raise OwnershipLost
                return read_restored(self.world.store, newest.location, self.world.shapes)
            except (StorageUnavailable, OutcomeUnknown):
                if self.queue:
                    self._take(self.queue.popleft())

    @property
    def _how(self) -> str:
        stopped = self.control.stopped
        if stopped is not None:
            return "drain" if stopped.drain else "suspend"
        return "drain" if self._draining else "end_of_data"

    def _shut_down(self, status: JobStatus) -> Steps[None]:
        self.shut_down = True
        actions = self.coordinator.handle(Shutdown(CoordinatorStatus[status]), self.now)
        if status == "FINISHED":
            ownership = self.ownership
            assert ownership is not None
            keep = not any(isinstance(action, DiscardCheckpoint) for action in actions)
            try:
                dropped = yield from ownership.end_job(status, keep=keep, ended_by=self._how)  # type: ignore[arg-type]
            except StorageError:
                return
            known = {action.checkpoint.location for action in actions if isinstance(action, DiscardCheckpoint)}
            for location in dropped:
                if location not in known:
                    self.io.append(lambda location=location: self._delete(location))  # type: ignore[misc]
        for action in actions:
            if isinstance(action, DiscardCheckpoint | DiscardStates):
                self.perform(action)
