"""The random choice of the next step of a world, from a seed. `running` repeats recorded steps."""

from __future__ import annotations

import random

from simulation.machine import TURN, Thread
from simulation.process import Process
from simulation.requests import LANDED, LOST, OK, PAUSE, PUT, UNAVAILABLE
from simulation.task import Task
from simulation.world import DEADLINE, Label, World


class RandomSchedule:
    """Chooses at random, by the scenario's weights; fair: every possible step has a probability above 0."""

    def __init__(self, world: World) -> None:
        scenario, config = world.scenario, world.scenario.config
        self._world = world
        self._scenario = scenario
        self._soft_limit = scenario.soft_limit
        self._random = random.Random(scenario.seed)
        self._chance = self._random.random
        task, self._mail, self._main, self._upload, self._io, self._tick, network = scenario.weights
        self._buffered, self._aligned_timeout = config.unaligned, config.aligned_checkpoint_timeout
        network *= self._buffered
        self._mail_or_network, self._task_total = self._mail + network, task + self._mail + network
        self._after_finish = config.checkpoints_after_tasks_finish
        self._write_failed = False
        self._next_label: Label | None = None
        # Where runs restore older checkpoints, a process that is paused while it does so sleeps until others have progressed.
        chances = (0.2, 0.04, 0.2) if scenario.going_back else (0.06, 0.3, 0.5)
        self._fault_chance, self._wake_chance, self._open_chance = chances

    def next(self) -> Label | None:
        """A step that is possible now; None when no step will ever be."""
        world = self._world
        if world.steps > self._soft_limit and not world.calm:
            return ("calm",)
        if self._next_label is not None:
            followup, self._next_label = self._next_label, None
            return followup
        active = world.active
        if not active:
            return self._next_process()
        alone = active[0] is world.processes[-1] and not active[0].paused
        if not alone and (label := self._other_process()):
            return label
        # A fault or a user's request; once the world is calm, only the request that ends the job.
        apart = self._scenario.apart and not world.calm and not active[-1].paused and _is_partly_ended(active[-1])
        if self._chance() < (0.1 if world.calm else 0.4 if apart else self._fault_chance):
            label = self._end_job() if world.calm else self._fault_or_request()
            if label:
                return label
        if alone:
            return self._process_step(active[0]) or self._pass_time()
        first = int(self._chance() * len(active)) if len(active) > 1 else 0
        for process in active[first:] + active[:first] if first else active:
            if not process.paused and (label := self._process_step(process)):
                return label
        return self._pass_time()

    def _other_process(self) -> Label | None:
        """A paused process wakes; or another process starts beside one that is paused or no longer the owner."""
        world = self._world
        current = world.current
        if current is None and all(process.paused for process in world.active) and (world.calm or self._chance() < 0.5):
            return ("wake", world.active[0].number)
        if (current is None and self._chance() < 0.05) or (current is not None and current.paused and self._chance() < 0.5):
            return self._next_process()  # it has to wait for the lease to expire
        return None

    def _pass_time(self) -> Label | None:
        """No process can take a step: time passes, a paused process wakes, or the job is ended."""
        world = self._world
        due = world.next_time()
        if due is not None:
            return ("time", max(due - world.now, 0.001))
        for process in world.active:
            if process.paused:
                return ("wake", process.number)
        return self._end_job() if world.calm else ("calm",)

    def _process_step(self, process: Process) -> Label | None:
        """A possible step of a process, by the weights."""
        tasks = self._task_total if process.running else 0.0
        main = tasks + self._main if process.queue or process.main.at != TURN else tasks
        upload = main + self._upload if process.uploads else main
        io = upload + self._io if process.io or process.io_thread.at != TURN else upload
        # A process that loses its lease during a slow write crashes; where tasks commit at their own end, that repeats rows.
        keeps_lease = self._world.calm or (process.locked and not self._after_finish)
        time = io if keeps_lease else io + self._tick
        drawn = self._chance() * time
        if drawn < tasks:
            order = _TASK_FIRST
        elif drawn < main:
            order = _MAIN_FIRST
        elif drawn < upload:
            order = _UPLOAD_FIRST
        elif drawn < io:
            order = _IO_FIRST
        else:
            return ("time", 1.0) if time else self._main_step(process)
        for step in order:
            if label := step(self, process):
                return label
        return None

    def _main_step(self, process: Process) -> Label | None:
        return ("main", process.number, self._outcome(process.main), self._times()) if process.ready() else None

    def _io_step(self, process: Process) -> Label | None:
        if not process.io_ready():
            return None
        outcome = self._outcome(process.io_thread)
        # Single steps as long as a fault may interrupt a write.
        interrupted = any(map(self._world.may_happen, ("pause", "crash", "write")))
        return ("io", process.number, outcome, 1 if interrupted else self._times())

    def _task_step(self, process: Process) -> Label | None:
        """A step of the first task that has one, beginning at a random task."""
        running, chance, number = process.running, self._chance, process.number
        total, buffered, apart = self._task_total, self._buffered, self._scenario.apart
        first = int(chance() * len(running)) if running else 0
        for task in running[first:] + running[:first] if first else running:
            if not task.started:
                return ("open", number, task.number, chance() < self._open_chance)
            drawn, inputs = chance() * total, task.inputs
            mail = bool(task.mailbox) and not task.reads_split
            if mail and drawn < self._mail:
                return self._mail_step(number, task)
            if apart and task.id.index and (inputs or self._scenario.seed % 4) and not self._world.calm and chance() < apart:
                continue
            network = buffered and inputs
            if network and drawn < self._mail_or_network and (label := self._network_step(number, task)):
                return label
            label = self._gate_step(number, task) if inputs else self._source_step(number, task) if task.can_read() else None
            if label:
                return label
            if mail:
                return self._mail_step(number, task)
            if network and (label := self._network_step(number, task)):
                return label
        return None

    def _mail_step(self, number: int, task: Task) -> Label:
        return ("mail", number, task.number, self._times())

    def _source_step(self, number: int, task: Task) -> Label | None:
        """None if an unbounded source has no record yet."""
        lazy = self._scenario.lazy
        nothing_new = lazy and not self._world.calm and self._chance() < lazy
        return None if nothing_new else ("read", number, task.number, self._times())

    def _gate_step(self, number: int, task: Task) -> Label | None:
        asynchronous = task.asynchronous and task.can_run_query()
        if asynchronous and self._chance() < 0.5:
            return ("query", number, task.number)
        slow = self._scenario.slow
        if slow and not self._world.calm and self._chance() < slow:
            return None
        inputs = task.inputs
        count = len(inputs)
        first = int(self._chance() * count) if count > 1 else 0
        for n in range(first, first + count):
            channel = inputs[n % count]
            if channel.queue and task.can_take(channel):
                return ("take", number, task.number, n % count, self._times())
        return ("query", number, task.number) if asynchronous else None

    def _times(self) -> int:
        """How many times a step is repeated: 1, or up to 4."""
        return 1 if self._chance() < 0.4 else 4

    def _network_step(self, number: int, task: Task) -> Label | None:
        """Elements arrive, a barrier is announced, or an alignment times out."""
        count = len(task.inputs)
        channel = int(self._chance() * count)
        chance = self._chance()
        if chance < 0.2 and task.can_announce(task.inputs[channel]) is not None:
            return ("announce", number, task.number, channel)
        if self._aligned_timeout and task.can_time_out():
            return ("align", number, task.number)
        for n in range(channel, channel + count):
            if task.inputs[n % count].sent:
                return ("network", number, task.number, n % count, 1 + int(chance * 4))
        return None

    def _outcome(self, thread: Thread) -> str:
        """The outcome of the write before which the thread has stopped; OK if it has not."""
        may_fail = thread.at == PUT and self._world.may_happen("write")
        # Failed writes come in series.
        self._write_failed = may_fail and self._chance() <= (0.7 if self._write_failed else 0.2) and self._world.spend("write")
        return self._random.choice((UNAVAILABLE, LOST, LANDED)) if self._write_failed else OK

    def _upload_step(self, process: Process) -> Label | None:
        uploads = process.uploads
        if not uploads:
            return None
        upload = uploads[-1 if self._scenario.newest_first else int(self._chance() * len(uploads))]
        if not process.may_upload(upload):
            return None
        fails = self._world.may_happen("upload") and self._chance() < 0.15 and self._world.spend("upload")
        outcome = UNAVAILABLE if fails else OK
        return ("upload", process.number, upload.task.number, upload.barrier.checkpoint_id, upload.task.attempt, outcome)

    # Faults, users

    def _fault_or_request(self) -> Label | None:
        world, r = self._world, self._random
        process = world.active[int(self._chance() * len(world.active))]
        number = process.number
        if process.paused:
            # Preferably where it can do harm: while it opens a sink in which a newer owner has staged transactions by now.
            harm = [t.number for t in process.running if t.opening and t.sink and t.sink.newer_staged]
            if world.current is process or self._chance() >= (0.5 if harm else self._wake_chance):
                return None
            if harm:
                self._next_label = ("open", number, harm[0], True)
            return ("wake", number)
        reports, opening = process.sent_reports, any(task.opening for task in process.running)
        left = [what for what, budget in world.budgets.items() if budget and what not in ("write", "upload", "restart", "state")]
        if self._scenario.apart and not _is_partly_ended(process) and self._chance() < 0.9:
            return None
        if process.shut_down and reports and "repeat" in left:
            what = "repeat"
        elif opening and self._scenario.going_back and "pause" in left:
            what = "pause"
        elif left:
            what = r.choice(left)
        else:
            return ("calm",) if self._chance() < 0.05 else None
        if what in ("checkpoint", "savepoint", "suspend", "drain", "end_source", "end_all"):
            seconds = r.choice((2.0, 30.0, DEADLINE)) if self._after_finish else DEADLINE
            return ("ask", number, what, r.randrange(len(process.shape.stages)), seconds)
        if what == "crash" and self._scenario.apart and self._chance() < 0.95 and not _holds_ended_instances(world):
            return None
        if what in ("crash", "pause", "cancel"):
            writing = process.main.at == PUT or process.io_thread.at in (PUT, PAUSE) or opening
            return (what, number) if writing or self._chance() < 0.3 else None
        if what == "repeat":
            return ("repeat", number, int(self._chance() * len(reports))) if reports else None
        if not process.running:
            return None
        if what == "lose":
            losable = [t.number for t in process.running if any(t.may_be_lost(m) for m in t.mailbox)]
            return ("lose", number, r.choice(losable)) if losable else None
        task = r.choice(process.running)
        if task.source and process.scenario.idle and self._chance() < 0.5:
            return ("idle", number, task.number)
        return ("fail", number, task.number, "now" if what == "task" else what)

    def _next_process(self) -> Label | None:
        """Start another run; None when the last one has finished and no restart is left."""
        world, r = self._world, self._random
        if world.active and world.calm:
            return None
        last = world.processes[-1] if world.processes else None
        if world.may_happen("state") and world.store.may_lose_state and self._chance() < 0.5:
            return ("lose state",)
        job_ended = last is not None and last.ended and last.status == "FINISHED" and last.ended_by != "suspend"
        if last is None or not world.spend("restart"):
            if job_ended:
                return None
            start = "retained" if world.store.without_record else "latest"
            label = ("start", start, 0, False, False, world.variant_of_newest(), self._is_burst())
            return label if last is None or world.calm else ("calm",)
        latest, earlier = (6, 6) if self._scenario.going_back else (12, 4)
        # After the job's end "latest" is a new start. A user seldom names a checkpoint that does not exist.
        retained = earlier if world.store.listed() and not job_ended else 1
        savepoint = (6 if job_ended else earlier) if world.store.reported else 1
        what = r.choices(("latest", "retained", "savepoint", "none"), (1 if job_ended else latest, retained, savepoint, 1))[0]
        variant = r.randrange(len(world.shapes)) if r.random() < 0.3 else (last.requested_start.variant + 1) % len(world.shapes)
        which, copied, claims = r.randrange(2), what == "savepoint" and r.random() < 0.3, r.random() < 0.3
        return ("start", what, which, copied, claims, variant, self._is_burst())

    def _is_burst(self) -> bool:
        """Whether the next run is a burst: in some worlds, most of them."""
        world = self._world
        return self._scenario.bursts and not world.calm and len(world.processes) % 3 != 2

    def _end_job(self) -> Label | None:
        """When the unbounded sources have no more records, a user ends the job; again if that fails. A burst ends by itself."""
        world = self._world
        process = world.current
        if process is None or process.paused or process.end_requested or process.unanswered or process.requested_start.burst:
            return None
        unbounded = [task for task in process.running if task.source == "unbounded"]
        # With union state there may be no checkpoint before all instances have reached their end.
        patience = 0 if world.has_union else self._scenario.patience
        if not any(t.started for t in unbounded) or any(t.can_read() for t in unbounded) or process.completed < patience:
            return None
        kind = self._random.choice(("drain", "end_all", "suspend"))
        if not self._after_finish:
            kind = "end_all"
        elif kind == "suspend" and self._chance() < 0.5:
            kind = "drain"
        return ("ask", process.number, kind, self._random.randrange(2), DEADLINE)


def _holds_ended_instances(world: World) -> bool:
    """Whether the newest checkpoint holds a stage that is no source, of which some instances have ended and others have not."""
    newest = world.store.state.newest if world.store.state is not None else None
    if newest is None:
        return False
    found = world.store.check_complete(newest.location)
    readers = {spec.id for spec in world.shapes[found.variant].tasks if spec.inputs}
    waits = {task for task in readers if task in found.states and found.states[task].after_finish}
    finished = readers - found.states.keys()
    run = {task.vertex for task in readers - waits - finished}
    return any(task.vertex in run for task in (finished | waits if world.scenario.seed % 2 else finished))


def _is_partly_ended(process: Process) -> bool:
    """Whether some instances of a stage that is no source have ended, and others have not."""
    ended = {task.id.vertex for task in process.tasks.values() if task.inputs and not task.machine.running}
    return any(task.id.vertex in ended and task.machine.running for task in process.running)


_TASK, _MAIN, _UPLOAD, _IO = (
    RandomSchedule._task_step, RandomSchedule._main_step, RandomSchedule._upload_step, RandomSchedule._io_step,
)  # fmt: skip
_TASK_FIRST, _MAIN_FIRST = (_TASK, _MAIN, _UPLOAD, _IO), (_MAIN, _TASK, _UPLOAD, _IO)
_UPLOAD_FIRST, _IO_FIRST = (_UPLOAD, _MAIN, _TASK, _IO), (_IO, _MAIN, _UPLOAD, _TASK)
"""The orders in which to look for a possible step."""
