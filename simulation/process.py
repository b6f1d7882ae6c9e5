"""One simulated process: from acquiring the pipeline to its release; the second driver of `execution.job_machine`.

It hands events to the job machine and performs the actions: at once, or one step at a time where they write to storage.
Invariants are checked where they could break. A crash loses everything in this module; `storage` and `sinks` survive it.
Read `machine` and `writing` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any

from dagster_checkpoints.coordination import events as coordination
from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.checkpoints import CompletedCheckpoint
from dagster_checkpoints.coordination.events import DiscardStates
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.errors import OwnershipLost, StorageError, StorageUnavailable
from dagster_checkpoints.execution import job_actions as do
from dagster_checkpoints.execution import job_events as on
from dagster_checkpoints.execution.checkpoint_deletion import discard_states, sweep
from dagster_checkpoints.execution.job_events import Failure, JobMachineEvent
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.job_phases import JobPhase
from dagster_checkpoints.execution.job_requests import AnswerRequest, BoundedSources, Request, RequestReceived, SourceInstance
from dagster_checkpoints.execution.job_storage import beginning_chosen, ownership_answer, restore_point
from dagster_checkpoints.execution.split_events import SplitsDiscovered
from dagster_checkpoints.execution.splits import enumerator_starts
from dagster_checkpoints.execution.start_point import NothingToRestoreError, choose_start, is_job_over
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.pipeline import TaskId
from dagster_checkpoints.state.errors import RestoreError
from simulation.channels import mix
from simulation.machine import FINISH, SLEEP, TURN
from simulation.requests import OK, PAUSE, PUT, Steps
from simulation.restoring import Restored, StartPoint, deploy, read_restored, settled_sinks, start_options
from simulation.shapes import name_of, number_of
from simulation.sinks import TaskFailure
from simulation.storage import is_savepoint
from simulation.task_data import TaskData
from simulation.violations import Violation, check
from simulation.writing import Writer

_OVER = JobPhase.OVER


class Process(Writer):
    """The main thread of a process, and its actions."""

    __slots__ = ()

    def _run(self) -> Steps[None]:
        try:
            self.owner = yield from self.acquire()
        except StorageError:
            self.status = "REFUSED"
        else:
            self.epoch = self.owner.epoch
            yield from self._run_job()
        self.ended = True
        self.world.process_ended(self)
        yield TURN  # never resumed

    def _run_job(self) -> Steps[None]:
        self.count("take-overs" if self.owner.previous.lease is not None else "acquisitions")
        restart, failover, burst = self.scenario.restart, self.scenario.failover, self.requested_start.burst
        self.job = JobMachine("simulated", self.config, restart, self.epoch, failover, burst=burst)
        self.slow.append(self._choose())
        while self.job.phase is not _OVER:
            if self.slow:
                try:
                    event = yield from self.slow.popleft()
                except (StorageError, NothingToRestoreError, RestoreError) as error:
                    event = on.FatalError(Failure(repr(error)))
            else:
                yield TURN
                event = self.queue.popleft() if self.queue else coordination.Tick()
            if event is not None:
                self.hand_in(event)
        yield from self.slow.popleft()

    def is_owner_gone(self, owner: str) -> bool:
        """Whether an owner has crashed that ran on this process's host: processes 2n and 2n + 1 share a host."""
        gone = self.world.processes[int(owner)].crashed and int(owner) // 2 == self.number // 2
        if gone:
            self.count("take-overs at once")
        return gone

    def sleep(self, seconds: float) -> Steps[None]:
        self._due = self.world.now + seconds
        yield SLEEP

    # Actions that need no storage

    def hand_in(self, event: JobMachineEvent) -> None:
        self._due = None
        for action in self.job.handle(event, self.world.now):
            steps = _PERFORM[type(action)](self, action)
            if steps is not None:
                self.slow.append(steps)

    def _send(self, action: do.SendToTasks) -> None:
        message = action.message
        if isinstance(message, life.CheckpointCompletedNotice):
            # Tasks commit at this notice: storage must name the checkpoint before, or a crash could lose it.
            named = (self.job_id, message.checkpoint_id) in self.store.named
            check(named, "tasks are notified that {} has completed, and the state has never named it", message.checkpoint_id)
        for task in action.tasks:
            self.tasks[task].mailbox.append(message)

    def _discover(self, action: do.DiscoverSplits) -> Steps[None]:
        """A bounded source has all its splits, in two reports; an unbounded one has one more at each discovery."""
        spec = self.shape.stages[number_of(action.stage)]
        yield PAUSE
        self.discoveries[action.stage] += 1
        self.count("discoveries")
        splits = tuple(map(str, range(spec.splits)))
        if spec.kind == "bounded":
            self.report(action.attempt, SplitsDiscovered(action.stage, splits[: spec.splits // 2]))
            yield PAUSE
        elif self.requested_start.burst:
            splits = splits[: mix(self.scenario.seed, self.number, self.attempt) % (len(splits) + 1)]
        else:
            splits = splits[: self.discoveries[action.stage]]
        self.report(action.attempt, SplitsDiscovered(action.stage, splits, last=True))

    def _write_metadata(self, action: coordination.WriteMetadata) -> None:
        ghosts = {task: self.ghosts[task] for task in action.checkpoint.plan.finished}
        self.io.append(self._write(action.checkpoint, ghosts, self.asked_to_end))

    def _start_tasks(self, action: do.StartTasks) -> Steps[on.StartFailed | None]:
        for sink in settled_sinks(self, self.plan):
            self.count("settled sinks")
            try:
                for _ in sink.settle(self.plan.next_checkpoint_id):
                    yield PAUSE
            except TaskFailure as error:
                return on.StartFailed(Failure(repr(error)))
        started = [task for task in self.tasks.values() if task.id.vertex in self.vertices_of(action)]
        again = [task.id for task in started if task.started or task in self.running]
        check(not again, "{} are started a second time", again)
        self.running += started
        return None

    def _triggered(self, action: coordination.CheckpointTriggered) -> None:
        checkpoint_id, properties = action.checkpoint_id, action.properties
        last = max(self._last_id, self.store.highest_ids.get(self.job_id, 0))
        check(checkpoint_id > last or self.superseded, f"id {checkpoint_id} after {last}")
        self._last_id = checkpoint_id
        if properties.is_savepoint:
            self._savepoints[checkpoint_id] = f"savepoints/savepoint-{checkpoint_id}-{self.epoch}"
        self.world.counts["stops begun"] += properties.stops_job
        if self.world.calm:
            self.fair[checkpoint_id] = self.world.now + self.config.timeout

    def _completed(self, action: coordination.CheckpointCompleted) -> None:
        self.completed += not action.checkpoint.is_savepoint
        self.count("savepoints" if action.checkpoint.is_savepoint else "checkpoints")

    def _failed(self, action: coordination.CheckpointFailed) -> None:
        checkpoint_id, reason = action.checkpoint_id, action.reason
        self.count(f"failed: {reason.name}")
        self._check_fair(checkpoint_id, reason, action.message)
        if checkpoint_id is not None and checkpoint_id in self._savepoints:
            check(reason is not FailureReason.CHECKPOINT_SUBSUMED, "savepoint {} was subsumed", checkpoint_id)
            self.io.append(self.discard_savepoint(checkpoint_id))

    def _check_fair(self, what: int | str | None, reason: FailureReason | None, message: str) -> None:
        """Nothing expires where no fault happens. A checkpoint may be aborted sooner, with a request from before."""
        if reason is FailureReason.CHECKPOINT_EXPIRED and what in self.fair:
            check(self.world.now < self.fair[what], "{} has expired, and nothing had failed: {}", what, message)

    def _discard(self, action: coordination.DiscardCheckpoint) -> None:
        """A running job keeps its newest checkpoint, or a crash would make it start from scratch. Passed-over ones are kept until
        the run has completed a checkpoint: until then its user may still restore them."""
        checkpoint = action.checkpoint
        state = self.store.state
        # What a later owner has restored is kept from this one by storage, which refuses to forget it.
        owned = state is not None and state.epoch == self.epoch
        needed = state.newest if state is not None and owned and state.job.status == "RUNNING" else None
        deleted = needed is not None and needed.location == checkpoint.location
        check(not deleted, "{} is deleted before storage says that the job has ended", checkpoint.location)
        passed_over = owned and checkpoint in self._start.passed_over
        own = self.shut_down or (state is not None and state.newest is not None and state.newest.epoch == self.epoch)
        check(own or not passed_over, f"{checkpoint.location} is deleted before the run has a checkpoint of its own")
        self.io.append(self.delete(checkpoint.location))

    # The start

    def _choose(self) -> Steps[on.BeginningChosen]:
        previous = self.owner.previous
        self.most_instances = dict(previous.job.most_instances)
        yield from self._read()
        if is_job_over(previous) and previous.newest is not None:
            self.dirty = True  # recording its end failed: its files are swept once the state no longer names the newest
        options = start_options(self)
        unlisted = self.owner.unlisted
        steps: Steps[StartPoint] = choose_start(previous, self.owner.retained, options, "the store", unlisted=unlisted)
        self._start = start = drive(steps, self.perform)
        job = previous.job
        if self.requested_start.restore_from == "latest" and job.stop_asked_by == "caught_up" and start.pointer is not None:
            of_burst = start.pointer.location != job.savepoint or start.pointer.claimed
            check(of_burst, "the savepoint {} of a burst is nobody's, and would never be deleted", job.savepoint)
        self.count("restores" if start.restored is not None else "new starts")
        if unlisted.checkpoints:
            self._check_without_record(start)
        self.job_id = previous.job.job_id + (not start.resume)
        self.lineage = start.restored.metadata.lineage if start.restored is not None else ()
        took_it = start.restored is not None and start.restored.metadata.pointer.job_id == self.job_id
        if not (start.resume and took_it):  # a job that has no checkpoint of its own resumes from that of a lost state
            restored_id = start.pointer.checkpoint_id if start.pointer is not None else None
            parents = tuple((job, restored_id if upto is None else upto) for job, upto in self.lineage)
            self.lineage = (*parents, (self.job_id, None))
        return beginning_chosen(start)

    def _check_without_record(self, start: StartPoint) -> None:
        """After a loss of the state nothing takes rows back: no checkpoint after the restored one has committed any."""
        check(self.requested_start.restore_from != "latest", "a run has ignored the checkpoints of a lost state")
        self.count("starts after the state was lost")
        if start.restored is None or start.restored.location.startswith("elsewhere/"):
            return
        pointer = start.restored.metadata.pointer
        for sink in self.world.sinks.values():
            later = [c for c in sink.visible if c.job == str(pointer.job_id) and c.checkpoint > pointer.checkpoint_id]
            check(not later, "{} is restored without a record, and rows of {} are in the sinks", pointer.location, later)

    def _read(self) -> Steps[None]:
        """Read an object from storage, which may be unavailable; a new owner may have deleted the object."""
        if (yield PUT) not in (None, OK):
            raise StorageUnavailable
        if self.superseded:
            raise OwnershipLost

    def _begin(self, action: do.BeginJob) -> Steps[on.JobBegun]:
        if self._start.pointer is not None and self._start.pointer.claimed:
            self.store.claimed.add(self._start.pointer.location)
        instances = {stage.uid: stage.parallelism for stage in self.shape.pipeline.stages}
        job_id = yield from self.owned(
            self.owner.begin_job(resume=self._start.resume, restored=self._start.pointer, instances=instances)
        )
        check(job_id == self.job_id, "the job has another id than its tasks were given")
        return on.JobBegun()

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
            self.store.check_complete(restored.location)
        self.attempt, self.restored, self.ended_sources = action.attempt, restored, action.ended_sources
        self.restarted = self.vertices_of(action)
        still = [task.id for task in self.running if task.id.vertex in self.restarted]
        check(not still, "{} are deployed again, and still run", still)
        self.count("region restarts" if action.vertices is not None else "deployments")
        self.plan = plan = deploy(self)
        if restored is not None and not is_savepoint(restored.location):
            self.known(restored)
        if restored is not None:
            self._check_ends(restored, plan.sources, plan.finished)
        known = restored.plan.enumerators if restored is not None else {}
        held = {task.id: task.machine.splits.held for task in self.tasks.values() if task.machine.splits is not None}
        enumerators = enumerator_starts(self.shape.pipeline, plan.finished, known, held)
        self.discoveries = Counter({stage: n for stage, n in self.discoveries.items() if stage not in self.restarted})
        return on.Deployed(plan.graph, plan.finished, plan.sources, enumerators)

    def _check_ends(self, restored: Restored, sources: Sequence[SourceInstance], finished: Set[TaskId]) -> None:
        """The sources that a user was told would end have ended, or end again."""
        self.asked_to_end |= restored.metadata.asked_to_end
        asked = [source for source in sources if str(source) in self.asked_to_end and source.task not in finished]
        done = self.ended_sources | {(stage, source.instance) for source in asked for stage in restored.plan.fully_finished}
        lost = [str(source) for source in asked if (source.stage, source.instance) not in done]
        check(not lost, "the sources {} were ended before {}, and are read on", lost, restored.location)

    def _confirm(self, action: do.ConfirmOwnership) -> Steps[on.OwnershipConfirmed | on.StorageSilent]:
        renewed = yield from self.owned(self.owner.renew())
        return ownership_answer(renewed, self.owner.state.newest)

    def _read_newest(self, action: do.ReadNewest) -> Steps[on.NewestRead | on.StorageSilent]:
        try:
            yield from self._read()
        except StorageUnavailable:
            return on.StorageSilent()
        return on.NewestRead(
            restore_point(read_restored(self.store, action.checkpoint.location, self.world.shapes, self.requested_start.variant))
        )

    def _stop_tasks(self, action: do.StopTasks) -> Steps[on.TasksStopped]:
        yield from ()
        vertices = self.vertices_of(action)
        for task in self.running:
            if task.id.vertex in vertices:
                task.done = True
                task.close()
        self.running = [task for task in self.running if task.id.vertex not in vertices]
        return on.TasksStopped()

    # The end

    def _end_job(self, action: do.EndJob) -> Steps[on.JobEndRecorded | on.JobEndNotRecorded]:
        self.shut_down = True
        try:
            ended = self.owner.end_job(
                "FINISHED", keep_checkpoints=action.keep_checkpoints, ended_by=action.ended_by, stop_asked_by=action.stop_asked_by
            )
            dropped = yield from self.owned(ended)
        except StorageError:
            return on.JobEndNotRecorded()
        return on.JobEndRecorded(tuple(CompletedCheckpoint(p.checkpoint_id, p.location) for p in dropped))

    def _finish_work(self, action: do.FinishWork) -> Steps[on.WorkEnded]:
        self.shut_down = True
        self.uploads.clear()
        while self.io_busy():
            yield FINISH
        self._take_requests()
        return on.WorkEnded()

    def _take_requests(self) -> None:
        """Requests received after the loop ended."""
        for item in [item for item in self.queue if isinstance(item, RequestReceived)]:
            self.queue.remove(item)
            self.hand_in(item)

    def _release(self, action: do.Release) -> Steps[None]:
        outcome = self.job.outcome
        assert outcome is not None
        self.status, self.ended_by = outcome.status.name, outcome.ended_by
        with suppress(StorageError):
            status = action.status.name if action.status is not None else None
            yield from self.owned(self.owner.release(status))  # type: ignore[arg-type]
        self._take_requests()

    # Users

    def ask(self, kind: str, stage: int, seconds: float) -> bool:
        """A user sends a request; every third request is sent by two users."""
        world = self.world
        if not world.calm and not world.spend(kind):
            return False
        bounded: BoundedSources = "finish" if kind == "drain" and stage % 2 else "cut"
        world.ended_early = world.ended_early or kind in ("end_all", "end_source", "drain")
        world.cut = world.cut or kind == "end_source" or (kind == "drain" and bounded == "cut")
        if kind == "end_all":
            self.end_requested = True
            self.queue.append(on.DrainRequested())
            return True
        number = world.requests_sent
        world.requests_sent += 1
        request = Request(f"r{number}", _REQUESTS.get(kind, kind), seconds, kind == "drain", bounded, name_of(stage))
        # A task whose notice was lost is taken for just ending until the timeout, and a stop waits for it.
        if world.calm and (self.config.timeout < seconds or not world.counts["lost notices"]):
            self.fair[request.request_id] = world.now + seconds
        for requester in (2 * number, 2 * number + 1) if number % 3 == 0 else (2 * number,):
            self.queue.append(RequestReceived(request, requester, world.now))
            self.unanswered[requester] = request
        return True

    def cancel(self) -> bool:
        if not self.world.spend("cancel"):
            return False
        self.queue.append(on.CancelRequested())
        self.dirty = True
        return True

    def _answer(self, action: AnswerRequest) -> None:
        self._check_fair(action.request_id, action.reason, action.message)
        # A stop that the job asks for itself has no requester.
        if self.running and (not action.requesters or self.unanswered[action.requesters[0]].kind == "stop"):
            check(
                action.reason not in _TASK_ENDED, "stop {} fails because a task has ended: {}", action.request_id, action.message
            )
        for requester in action.requesters:
            request = self.unanswered.pop(requester, None)
            if request is None or request.request_id != action.request_id:
                raise Violation(f"requester {requester} waits for the answer to {request}, and gets {action}")
            self.asked_to_end |= frozenset(action.ended)
            if action.done and request.kind in ("savepoint", "stop") and action.location not in self.store.claimed:
                self.store.check_complete(action.location)

    # Tasks

    def repeat(self, which: int) -> bool:
        """Deliver an acknowledgement or a decline a second time, perhaps after the job's end."""
        if which >= len(self.sent_reports) or not self.world.spend("repeat"):
            return False
        item = self.sent_reports[which]
        if self.shut_down and isinstance(item.event, coordination.Acknowledged | coordination.Declined):
            for action in self.coordinator.handle(item.event, self.world.now):
                if isinstance(action, DiscardStates):
                    _PERFORM[DiscardStates](self, action)
        else:
            self.queue.append(item)
        self.count("repeated messages")
        return True

    def vertices_of(self, action: do.Deploy | do.StartTasks | do.StopTasks) -> Set[str]:
        """The vertices that an action concerns."""
        return action.vertices if action.vertices is not None else {task.id.vertex for task in self.shape.tasks}

    def task_failed(self, task: TaskData, message: str) -> None:
        self.count("task failures")
        self.running = [t for t in self.running if t is not task]
        self.report(task.attempt, on.TaskFailure(task.id, Failure(f"{task.id}: {message}")))

    def task_ended(self, task: TaskData) -> None:
        """Called by the task when it is FINISHED."""
        self.ghosts[task.id] = task.ghost()
        self.running = [t for t in self.running if t is not task]
        stopped = self.job.requests.stopped
        if stopped is not None and stopped.asked_by == "caught_up" and task.machine.suspended:
            self.count("tasks suspended by a burst")
            check(not task.unread_in_burst(), "the burst has ended before {} has read what was there", task.id)
        last = task.ended_with if stopped is None else stopped.checkpoint_id
        check(task.ended_with == last, "{} ends with checkpoint {}, the others with {}", task.id, task.ended_with, last)


_REQUESTS: dict[str, Any] = {"suspend": "stop", "drain": "stop"}
"""The kinds of users' requests that have another name in a control request."""
_TASK_ENDED = {FailureReason.CHECKPOINT_DECLINED_TASK_CLOSING, FailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING}
"""Why a checkpoint fails when a task comes to its own end."""
_PERFORM: dict[type[object], Callable[[Process, Any], Steps[Any] | None]] = {
    # Actions that take steps: the result is an event, except for the release, which is the last action
    do.Deploy: Process._deploy,
    do.BeginJob: Process._begin,
    do.ConfirmOwnership: Process._confirm,
    do.ReadNewest: Process._read_newest,
    do.StopTasks: Process._stop_tasks,
    do.EndJob: Process._end_job,
    do.FinishWork: Process._finish_work,
    do.Release: Process._release,
    # Actions without a result
    do.SendToTasks: Process._send,
    do.StartTasks: Process._start_tasks,
    do.DiscoverSplits: lambda process, action: process.io.append(process._discover(action)),
    do.ForgetSavepoints: lambda process, action: process.owner.forget_savepoints(action.retained),
    do.Sweep: lambda process, action: process.io.append(process.run(sweep(process._start.sweep))),
    do.AttemptBegan: lambda process, action: process.count("attempts"),
    do.AttemptRestarting: lambda process, action: process.count("restarts"),
    do.TaskHasFinished: lambda process, action: process.count("finished tasks"),
    do.SourcesCut: lambda process, action: process.count("cut sources"),
    AnswerRequest: Process._answer,
    coordination.WriteMetadata: Process._write_metadata,
    DiscardStates: lambda process, action: process.io.append(
        process.run(discard_states(action.checkpoint_id, process.owner.ensure))
    ),
    coordination.DiscardCheckpoint: Process._discard,
    coordination.CheckpointTriggered: Process._triggered,
    coordination.CheckpointCompleted: Process._completed,
    coordination.CheckpointFailed: Process._failed,
    coordination.RequestCompleted: lambda process, action: None,
    coordination.RequestNotCompleted: lambda process, action: None,
}
