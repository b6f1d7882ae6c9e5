"""Who chooses what happens next: chance with a seed, or a recorded list of steps."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate

from simulation.process import UPLOADED, Process
from simulation.scenario import KINDS
from simulation.storage import LANDED, LOST, OK, UNAVAILABLE
from simulation.task import Task
from simulation.world import DEADLINE, Label, World

ASKED_BY_CALM = ("drain", "end_all", "suspend")


class RandomSchedule:
    """Chooses at random, by the scenario's weights; fair, because everything possible has its chance."""

    def __init__(self, seed: int, world: World) -> None:
        self._random = random.Random(seed)
        self._chance = self._random.random
        self._world = world
        self._weights = list(accumulate(world.scenario.weights))
        self._total = self._weights[-1]
        self._buffered = world.scenario.settings.barriers in ("unaligned", "timeout")
        self._asked = -1

    def next(self) -> Label | None:
        """A step that is possible now; None when nothing is, ever."""
        world = self._world
        if not world.active or (world.current is None and self._chance() < 0.05) or (world.current is None and self._stuck()):
            return self._next_process()
        if world.calm:
            label = self._bring_to_an_end()
            if label is not None:
                return label
        elif self._chance() < 0.03:
            label = self._something_goes_wrong()
            if label is not None:
                return label
        for _ in range(6):
            label = self._try()
            if label is not None:
                return label
        enabled = list(self._enabled())
        if enabled:
            return self._random.choice(enabled)
        due = world.next_time()
        if due is not None:
            return ("time", max(due - world.now, 0.001))
        return self._bring_to_an_end(always=True) if world.calm else ("calm",)

    def _stuck(self) -> bool:
        """Only paused processes are left."""
        return all(process.paused for process in self._world.active)

    def _pick(self) -> Process | None:
        active = self._world.active
        process = active[0] if len(active) == 1 else active[int(self._chance() * len(active))]
        return None if process.paused else process

    def _try(self) -> Label | None:
        process = self._pick()
        if process is None:
            return None
        kind = KINDS[bisect(self._weights, self._chance() * self._total)]
        if kind == "tick":
            return None if self._world.calm else ("time", 1.0)
        if kind == "main":
            return ("main", process.number, self._outcome(process.at_write)) if process.ready() else None
        if kind == "io":
            return ("io", process.number, self._outcome(process.io_at_write)) if process.io_ready() else None
        if kind == "upload":
            return self._upload(process)
        running = process.running
        if not running:
            return None
        task = running[int(self._chance() * len(running))]
        if not task.started:
            return ("open", process.number, task.number)
        if kind == "mail":
            return ("mail", process.number, task.number) if task.mailbox else None
        if kind == "network":
            return self._network(process, task) if self._buffered else None
        return self._task(process, task)

    def _task(self, process: Process, task: Task) -> Label | None:
        if task.source:
            return ("read", process.number, task.number) if task.can_read() else None
        if task.due is not None and task.can_take_due_snapshot():
            return ("due", process.number, task.number)
        inputs = task.inputs
        channel = int(self._chance() * len(inputs))
        if task.can_step(inputs[channel]):
            return ("take", process.number, task.number, channel)
        for channel, one in enumerate(inputs):
            if task.can_step(one):
                return ("take", process.number, task.number, channel)
        return None

    def _network(self, process: Process, task: Task) -> Label | None:
        """Elements arrive, barriers are announced, alignments time out."""
        if not task.inputs:
            return None
        channel = int(self._chance() * len(task.inputs))
        chance = self._chance()
        if chance < 0.2 and task.can_announce(task.inputs[channel]) is not None:
            return ("announce", process.number, task.number, channel)
        if chance < 0.3:
            deadline = task.handler.next_deadline()
            if deadline is not None and deadline <= self._world.now and not task.life.paused:
                return ("align", process.number, task.number)
        to = task.inputs[channel]
        return ("network", process.number, task.number, channel, 1 + int(self._chance() * 4)) if to.sent else None

    def _outcome(self, at_write: bool) -> str:
        world = self._world
        if not at_write or world.calm or not world.budgets["write"] or self._chance() > 0.3:
            return OK
        world.budgets["write"] -= 1
        return self._random.choice((UNAVAILABLE, LOST, LANDED))

    def _upload(self, process: Process) -> Label | None:
        uploads = process.uploads
        if not uploads:
            return None
        upload = uploads[int(self._chance() * len(uploads))]
        outcome = UPLOADED
        world = self._world
        if not world.calm and world.budgets["upload"] and self._chance() < 0.15:
            world.budgets["upload"] -= 1
            outcome = "failed"
        return ("upload", process.number, upload.task.number, upload.barrier.checkpoint_id, upload.attempt, outcome)

    def _enabled(self) -> Iterator[Label]:
        """Everything that can happen by itself, except that time passes."""
        world = self._world
        for process in world.active:
            if process.paused:
                yield ("wake", process.number)
                continue
            number = process.number
            if process.ready():
                yield ("main", number, OK)
            if process.io_ready() and process.io_may_go_on:
                yield ("io", number, OK)
            for upload in process.uploads:
                yield ("upload", number, upload.task.number, upload.barrier.checkpoint_id, upload.attempt, UPLOADED)
            for task in process.running:
                if not task.started:
                    yield ("open", number, task.number)
                    continue
                if task.mailbox:
                    yield ("mail", number, task.number)
                label = self._task(process, task)
                if label is not None:
                    yield label
                deadline = task.handler.next_deadline()
                if deadline is not None and deadline <= world.now and not task.life.paused:
                    yield ("align", number, task.number)
                if self._buffered:
                    for channel, one in enumerate(task.inputs):
                        if one.sent:
                            yield ("network", number, task.number, channel, 1)

    # Faults, users

    def _something_goes_wrong(self) -> Label | None:
        world, r = self._world, self._random
        process = world.active[int(self._chance() * len(world.active))]
        number = process.number
        if process.paused:
            return ("wake", number) if world.current is not process and self._chance() < 0.3 else None
        left = [what for what, budget in world.budgets.items() if budget and what not in ("write", "upload", "restart")]
        if not left:
            return ("calm",) if self._chance() < 0.05 else None
        what = r.choice(left)
        if what in ("checkpoint", "savepoint", "suspend", "drain", "end_source", "end_all"):
            seconds = r.choice((2.0, 30.0, DEADLINE)) if process.config.tasks_wait_for_final_checkpoint else DEADLINE
            return ("ask", number, what, r.randrange(len(process.shape.stages)), seconds)
        if what in ("crash", "pause", "cancel"):
            return (what, number) if self._chance() < 0.2 else None
        if not process.running:
            return None
        task = r.choice(process.running)
        if task.source and process.may_idle and self._chance() < 0.5:
            return ("idle", number, task.number)
        return ("fail", number, task.number, "now" if what == "task" else what)

    def _next_process(self) -> Label | None:
        """Another run, from somewhere; or nothing more, when the last one has finished in peace."""
        world, r = self._world, self._random
        last = world.processes[-1] if world.processes else None
        if world.active and world.calm:
            return None
        if last is None:
            return ("start", "latest", 0, False, False, 0)
        over = last.over and last.status == "FINISHED" and last.ended_by != "suspend"
        again = world.budgets["restart"] > 0 and not world.calm
        if over and not again:
            return None
        if not again:
            if not world.calm:
                return ("calm",)
            return ("start", "latest", 0, False, False, world.variant_of_newest())
        world.budgets["restart"] -= 1
        what = r.choices(("latest", "retained", "savepoint", "none"), (6, 2, 3, 1))[0]
        variant = r.randrange(len(world.shapes))
        return ("start", what, r.randrange(2), what == "savepoint" and r.random() < 0.3, r.random() < 0.3, variant)

    def _bring_to_an_end(self, *, always: bool = False) -> Label | None:
        """When the unbounded sources have nothing more to say, somebody ends the job; again if that fails."""
        world = self._world
        process = world.current
        if process is None or process.paused or (not always and self._chance() > 0.1):
            return None
        if any(not r.answer for r in process.asked):
            return None
        quiet = process.running and all(t.source != "unbounded" or not t.can_read() for t in process.running)
        open_ended = any(t.source == "unbounded" and t.started for t in process.running)
        if not quiet or not open_ended:
            return None
        kind = self._random.choice(ASKED_BY_CALM)
        if not world.scenario.settings.config.tasks_wait_for_final_checkpoint:
            kind = "end_all"
        if kind == "suspend" and self._chance() < 0.5:
            kind = "drain"
        return ("ask", process.number, kind, 0, DEADLINE)


class Replay:
    """Goes through recorded steps, leaving out what is impossible."""

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = iter(labels)

    def next(self) -> Label | None:
        return next(self._labels, None)
