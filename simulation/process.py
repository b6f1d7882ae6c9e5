"""One simulated process: from acquiring the pipeline to its release; the second driver of `execution.job_machine`.

Performs the actions that stop in front of writes, one step at a time. Everything in here is lost in a crash; `storage` and
`sinks` are not. Read `machine`, `writing` and `loop` first.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dagster_checkpoints.coordination import CompletedCheckpoint
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.job_actions import JobAction
from dagster_checkpoints.execution.job_events import Failure, JobBeginning, JobEvent, RestorePoint
from dagster_checkpoints.execution.job_machine import JobMachine, JobPhase
from dagster_checkpoints.execution.job_requests import RequestReceived, SourceInstance
from dagster_checkpoints.execution.start_point import NothingToRestoreError, completed_checkpoint, is_job_over
from dagster_checkpoints.state import RestoreError
from simulation.deployment import deploy
from simulation.loop import Loop
from simulation.machine import LEASE, TURN
from simulation.restoring import (
    Restored,
    StartPoint,
    choose_start,
    read_restored,
)
from simulation.shapes import name_of
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
from simulation.violations import Violation, check

if TYPE_CHECKING:
    pass


class Process(Loop):
    """See the module's text."""

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
        self.job = JobMachine("simulated", self.config, self.settings.restart, ownership.epoch)
        self.hand_in((yield from self._guarded(self._choose())))
        while self.job.phase is not JobPhase.OVER:
            if self._slow:
                yield from self._perform_slowly(self._slow.popleft())
            else:
                yield TURN
                self.hand_in(self._next())
        yield from self._perform_slowly(self._slow.popleft())

    def _knows_gone(self, owner: str) -> bool:
        """Whether an owner has crashed, and had run on this process's machine: two processes in turn run on the same one."""
        gone = self.world.processes[int(owner)].crashed and int(owner) // 2 == self.number // 2
        if gone:
            self.count("take-overs at once")
        return gone

    def _sleep(self, seconds: float) -> None:
        self._sleeping_until, self._waits_for = self.now + seconds, None

    def _guarded(self, act: Steps[Any]) -> Steps[JobEvent]:
        """Perform an action; what storage refuses is an event, too."""
        try:
            return (yield from act)  # type: ignore[no-any-return]
        except (StorageError, NothingToRestoreError, RestoreError) as error:
            return on.FatalError(Failure(repr(error)))

    def _perform_slowly(self, action: JobAction) -> Steps[None]:
        """Perform an action that is answered with an event, or the last one."""
        match action:
            case do.Deploy():
                event: JobEvent = yield from self._guarded(self._deploy(action))
            case do.BeginJob():
                event = yield from self._guarded(self._begin())
            case do.ClaimSavepoint():
                event = yield from self._guarded(self._claim())
            case do.ConfirmOwnership():
                event = yield from self._guarded(self._confirm())
            case do.ReadNewest(checkpoint):
                event = yield from self._guarded(self._read_checkpoint(checkpoint))
            case do.StopTasks():
                self._stop_tasks()
                event = on.TasksStopped()
            case do.EndJob():
                event = yield from self._end_job(action)
            case do.FinishWork():
                event = yield from self._finish_work()
            case do.Release():
                return (yield from self._release(action))
            case _:
                raise Violation(f"nothing performs {action}")
        self.hand_in(event)

    # The start

    def _choose(self) -> Steps[on.StartChosen]:
        ownership = self.ownership
        assert ownership is not None
        yield from self._read()
        if self.superseded:
            raise OwnershipLost  # what it would begin from may be gone
        if is_job_over(ownership.previous) and ownership.previous.newest is not None:
            self.dirty = True  # its end could not be said: what is left is swept once the newest is named no more
        self._start = start = choose_start(
            self.world.store, self.registry, ownership, self.asked_start, self.world.shapes, self.number
        )
        self.count("restores" if start.restored is not None else "new starts")
        self.job_id = ownership.previous.job.job_id + (not start.resume)
        self._set_lineage(start)
        restored = restore_point(start.restored) if start.restored is not None else None
        claims = start.claimed and start.pointer is not None
        return on.StartChosen(JobBeginning(restored, start.next_checkpoint_id, start.retained, start.passed_over, claims))

    def _set_lineage(self, start: StartPoint) -> None:
        restored = start.restored
        if restored is None:
            self.lineage = ((self.job_id, None),)
        elif start.resume:
            self.lineage = restored.metadata.lineage
        else:
            parents = tuple(
                (job, restored.metadata.checkpoint_id if upto is None else upto) for job, upto in restored.metadata.lineage
            )
            self.lineage = (*parents, (self.job_id, None))

    @staticmethod
    def _read() -> Steps[None]:
        """Storage is asked for something, and may be away."""
        if (yield PUT) not in (None, OK):
            raise StorageUnavailable

    def _begin(self) -> Steps[on.JobBegun]:
        assert self.ownership is not None and self._start is not None
        begun = self.ownership.steps.begin_job(resume=self._start.resume, restored=self._start.pointer)
        job_id = yield from self.ownership.perform(begun)
        check(job_id == self.job_id, "the job has another id than its tasks were told")
        return on.JobBegun()

    def _claim(self) -> Steps[on.SavepointClaimed]:
        assert self.ownership is not None and self._start is not None and self._start.pointer is not None
        yield from self.ownership.claim(self._start.pointer)
        return on.SavepointClaimed()

    # Attempts

    def _deploy(self, action: do.Deploy) -> Steps[on.Deployed | on.DeployFailed]:
        restored: Restored | None = action.restored.state if action.restored is not None else None  # type: ignore[assignment]
        yield PAUSE
        if restored is not None:
            try:
                yield from self._read()
            except StorageUnavailable as error:
                self.count("failed fetches")
                return on.DeployFailed(Failure(repr(error)), may_pass=True)
            if self.superseded:
                raise OwnershipLost  # what it was to fetch may have been deleted by the new owner
            self.world.store.check_whole(restored.location)
        self.attempt, self.restored, self.ended_sources = action.attempt, restored, action.ended_sources
        finished = deploy(self, restored)
        if restored is not None and not restored.savepoint:
            self.known(restored)
        heads = [(task.stages[0], task.id) for task in self.shape.tasks]
        sources = [SourceInstance(name_of(n), str(id.index), id) for n, id in heads if self.shape.stages[n].is_source]
        return on.Deployed(self.shape.graph, finished, tuple(sources))

    def _confirm(self) -> Steps[on.OwnershipConfirmed | on.StorageSilent]:
        assert self.ownership is not None
        try:
            yield from self.ownership.confirm()
        except (StorageUnavailable, OutcomeUnknown):
            return on.StorageSilent()
        newest = self.ownership.steps.state.newest
        if newest is None:
            return on.OwnershipConfirmed()
        return on.OwnershipConfirmed(completed_checkpoint(newest), newest.epoch)

    def _read_checkpoint(self, checkpoint: CompletedCheckpoint) -> Steps[on.NewestRead | on.StorageSilent]:
        try:
            yield from self._read()
        except StorageUnavailable:
            return on.StorageSilent()
        if self.superseded:
            raise OwnershipLost
        return on.NewestRead(restore_point(read_restored(self.world.store, checkpoint.location, self.world.shapes)))

    def _stop_tasks(self) -> None:
        """Those that had not finished are cancelled."""
        for task in self.running:
            if not task.done:
                task.done = True
                task.close()
        self.running = []

    # The end

    def _end_job(self, action: do.EndJob) -> Steps[on.JobEndRecorded | on.JobEndNotRecorded]:
        assert self.ownership is not None
        self.shut_down = True
        try:
            ended = self.ownership.steps.end_job(
                "FINISHED", keep_checkpoints=action.keep_checkpoints, ended_by=action.ended_by, stop_asked_by=action.stop_asked_by
            )
            dropped = yield from self.ownership.perform(ended)
        except StorageError:
            return on.JobEndNotRecorded()
        return on.JobEndRecorded(tuple(CompletedCheckpoint(p.checkpoint_id, p.location) for p in dropped))

    def _finish_work(self) -> Steps[on.WorkEnded]:
        self.shut_down = True
        self.uploads.clear()
        self._sleeping_until, self._waits_for = 0.0, lambda: not self.io_ready()
        while self.io_ready():
            yield WAIT
        self._take_requests()
        return on.WorkEnded()

    def _take_requests(self) -> None:
        """Requests received after the loop ended."""
        for item in [item for item in self.queue if isinstance(item, RequestReceived)]:
            self.queue.remove(item)
            self.hand_in(item)

    def _release(self, action: do.Release) -> Steps[None]:
        outcome = self.job.outcome
        assert self.ownership is not None and outcome is not None
        self.status, self.ended_by = outcome.status.name, outcome.ended_by
        with suppress(StorageError):
            status = action.status.name if action.status is not None else None
            yield from self.ownership.perform(self.ownership.steps.release(status))  # type: ignore[arg-type]
        self._take_requests()


def restore_point(restored: Restored) -> RestorePoint:
    """What the job machine is to know of a checkpoint that fits."""
    plan = restored.plan
    return RestorePoint(plan.checkpoint_id, restored.location, frozenset(plan.finished), restored)
