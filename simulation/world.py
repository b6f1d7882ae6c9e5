"""The world: durable storage, sinks, the live processes, the users; and every possible step.

A step is a label, a tuple that begins with the kind of step; `perform` takes it if it is possible now. `schedules` chooses the
steps; nothing else in a world is random, so a list of labels determines a run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Any

from dagster_checkpoints.sinks.ledger import Staged
from simulation.channels import describe, tally
from simulation.consistency import expected_rows, written
from simulation.machine import LEASE, TURN
from simulation.process import Process
from simulation.restoring import RequestedStart
from simulation.scenario import Scenario
from simulation.sinks import SinkSystem
from simulation.storage import Metadata, Store
from simulation.task import Task
from simulation.violations import Violation, check

Label = tuple[Any, ...]
DEADLINE = 200.0
"""How long a user waits for an answer, seconds."""


class World:
    """One pipeline with its storage, sinks, processes and users."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.shapes = scenario.variants
        self.has_union = any(stage.kind == "union" for stage in self.shapes[0].stages)
        self.store = Store()
        stages = self.shapes[0].stages
        self.sinks = {n: SinkSystem(n, stepped=(scenario.seed + n) % 2 == 1) for n, spec in enumerate(stages) if spec.sink}
        self.now = 0.0
        self.steps = 0
        self.budgets = scenario.budgets.copy()
        self.counts: Counter[str] = Counter()
        self.processes: list[Process] = []
        self.active: list[Process] = []
        self.requests_sent = 0
        self.ended_early = False
        self.cut = False
        """Whether a user may have ended bounded sources before they were read to their end."""
        """Whether a user has ever ended a source."""
        self.calm = False

    def perform(self, label: Label) -> bool:
        """Take a step. False if it is impossible now; then nothing has changed."""
        what = label[0]
        if (step := _OF_TASKS.get(what)) is not None:
            task = self._task(label[1], label[2])
            possible = task is not None and task.attempt_step(step, label[3:])
        elif what in _OF_PROCESSES:
            process = self._process(label[1])
            possible = process is not None and _OF_PROCESSES[what](process, *label[2:])
        else:
            possible = _OF_WORLD[what](self, *label[1:])
        self.steps += possible
        return possible

    @property
    def current(self) -> Process | None:
        """The process that owns the pipeline, or else the last one started, if it is still acquiring the pipeline."""
        last = self.processes[-1] if self.processes and not self.processes[-1].ended else None
        if last is not None and not last.paused and not last.epoch:
            return last
        epoch = self.store.state.epoch if self.store.state is not None else None
        return next((process for process in self.active if process.epoch == epoch), last)

    def variant_of_newest(self) -> int:
        """The variant of the pipeline that the newest checkpoint was taken with: a restore always fits it."""
        if self.store.without_record:
            return self.store.check_complete(self.store.unlisted().newest_first[0].location).variant
        newest = self.store.state.newest if self.store.state is not None else None
        return 0 if newest is None else self.store.check_complete(newest.location).variant

    def _process(self, number: int, paused: bool = False) -> Process | None:
        """The process with this number, if it has not ended, and is paused or not, as asked."""
        process = self.processes[number] if number < len(self.processes) else None
        return process if process is not None and not process.ended and process.paused is paused else None

    def _task(self, number: int, task_number: int) -> Task | None:
        process = self._process(number)
        if process is not None:
            for task in process.running:
                if task.number == task_number:
                    return task
        return None

    # Processes

    def _start(self, *start: Any) -> bool:
        current = self.current
        if current is not None and not current.paused:
            return False
        process = Process(self, len(self.processes), RequestedStart(*start))
        self.processes.append(process)
        self.active.append(process)
        return True

    def process_ended(self, process: Process) -> None:
        """A process has ended without a crash."""
        self.active.remove(process)
        check(not (process.epoch and process.unanswered), "{} were never answered", process.unanswered)
        if process.status == "FINISHED":
            self.counts["finishes"] += 1
            self.counts["stops"] += process.job.requests.stopped is not None
            self._check_finished(process)

    def _pass_time(self, seconds: float) -> bool:
        until = self.now + seconds
        while self.now < until:
            # A process that is not paused renews its lease in time.
            self.now = min(self.now + LEASE / 4, until)
            for process in self.active:
                if not process.paused:
                    process.renew_if_due()
        return True

    def next_time(self) -> float | None:
        """The earliest time at which a process or task acts without another step; None if there is none."""
        awake = [process for process in self.active if not process.paused]
        times = [process.next_time() for process in awake]
        if self.scenario.config.unaligned:
            times += [task.machine.next_deadline() for process in awake for task in process.running]
        return min((t for t in times if t is not None and t > self.now), default=None)

    # Tasks

    def _open(self, number: int, task_number: int, all_tasks: bool) -> bool:
        task = self._task(number, task_number)
        if task is None or task.started:
            return False
        process = task.process
        for each in process.running if all_tasks else [task]:
            if not each.started:
                each.attempt_step(Task.open, (all_tasks,))
        self._check_opened(process)
        return True

    # Faults

    def may_happen(self, fault: str) -> bool:
        return not self.calm and self.budgets.get(fault, 0) > 0

    def spend(self, fault: str) -> bool:
        """Whether this fault may happen once more; counts it if so."""
        possible = self.may_happen(fault)
        self.budgets[fault] -= possible
        return possible

    def _crash(self, number: int) -> bool:
        process = self._process(number) or self._process(number, paused=True)
        if process is None or not self.spend("crash"):
            return False
        process.crash()
        self.active.remove(process)
        self.counts["crashes"] += 1
        return True

    def _wake(self, number: int) -> bool:
        process = self._process(number, paused=True)
        if process is None:
            return False
        process.paused = False
        for other in self.processes[number:]:
            other.dirty = True
        return True

    def _lose_state(self) -> bool:
        """A user deletes `state.json` while no process runs."""
        if self.active or not self.store.may_lose_state or not self.spend("state"):
            return False
        self.store.state = None
        self.counts["lost states"] += 1
        return True

    def _calm_down(self) -> bool:
        self.calm = True
        return True

    # Invariants

    def lost_transactions(self, metadata: Metadata) -> list[Staged]:
        """The transactions of a checkpoint that are neither staged nor committed."""
        tails = {task.id: task.stages[-1] for task in self.shapes[metadata.variant].tasks}
        return [t for task, state in metadata.states.items() for t in state.transactions if self.sinks[tails[task]].has_lost(t)]

    def _check_opened(self, process: Process) -> None:
        """When every sink has recovered, it shows exactly the rows that the checkpoint counts as written."""
        restored = process.restored
        waits = process.config.checkpoints_after_tasks_finish
        tasks = [task for task in process.tasks.values() if task.id.vertex in process.restarted]
        opened = all(task.started and not task.failed for task in tasks)
        if restored is not None and waits and opened and not process.superseded:
            tails = [task.stages[-1] for task in process.shape.tasks if task.id.vertex in process.restarted]
            self._check_written(process, restored.metadata, "after the restore", tails)

    def _check_written(self, process: Process, metadata: Any, when: str, stages: Collection[int] | None = None) -> None:
        """The sinks of these stages, or all, show the rows that the checkpoint counts as written."""
        for stage, expected in written(metadata, self.shapes[metadata.variant]).items():
            if stages is not None and stage not in stages:
                continue
            found = tally(self.sinks[stage].rows(process.lineage))
            what = f"{when} of {metadata.pointer.location}, stage {stage}"
            check(found == expected, f"{what}: {describe(found)} are committed, {describe(expected)} were written")

    def _check_finished(self, process: Process) -> None:
        if process.superseded:
            return  # another owner may have committed more by now
        if process.ended_by == "suspend":
            stopped = process.job.requests.stopped
            assert stopped is not None
            unended = [task.id for task in process.tasks.values() if task.source and task.machine.suspended]
            ends = self.ended_early or stopped.asked_by != "caught_up"
            check(ends or unended, "a burst has suspended a job all of whose sources have ended")
            self._check_written(process, self.store.check_complete(stopped.location), "after the suspend")
        else:
            self._check_effects(process)
        # A message that comes after the end may begin a deletion: the next run finishes it.
        deletes = process.io or process.io_thread.at != TURN
        if not process.dirty and not process.owner.lost and not deletes:
            self._check_nothing_left(process)

    def _check_effects(self, process: Process) -> None:
        """Each source record's effect is committed exactly once (at least once in that mode)."""
        shape = process.shape
        positions: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for task in shape.tasks:
            ghost = process.ghosts[task.id]
            for stage, splits in {task.stages[0]: (*ghost.splits, *ghost.retired), **ghost.fused}.items():
                positions[stage] += splits
        if not self.cut:
            for stage, read in positions.items():
                spec = shape.stages[stage]
                left = [s for s in range(spec.splits) if dict(read).get(s, 0) < spec.records_of(s)]
                check(spec.kind != "unbounded" or self.ended_early, f"stage {stage}, which is unbounded, has come to its end")
                check(spec.kind != "bounded" or not left, f"stage {stage} has finished before the end of its splits {left}")
        rows = expected_rows(shape, positions)
        for stage, sink in self.sinks.items():
            committed = sorted(sink.rows(process.lineage))
            wanted = sorted(uid for uid, _, _ in rows[stage])
            if not self.scenario.exactly_once:
                # A source that went back and then ended had been read further before: the effects of that are allowed.
                wanted = sorted(set(wanted))
                committed = sorted(set(committed) & set(wanted))
            if committed != wanted:
                lost, extra = Counter(wanted) - Counter(committed), Counter(committed) - Counter(wanted)
                raise Violation(f"stage {stage}: of {len(wanted)} effects {lost.total()} are lost, {extra.total()} too many")

    def _check_nothing_left(self, process: Process) -> None:
        left = self.store.left_over()
        check(not left, f"left over: {left}")
        ran = {(task.stages[-1], task.id.index) for task in process.shape.tasks if task.id in process.tasks}
        for sink in self.sinks.values():
            # An instance that was restored as finished does not open its sink, and so deletes nothing from staging.
            staged = [name for name, (instance, _) in sink.staged.items() if (sink.stage, instance) in ran]
            check(not staged, f"left over in the staging area of stage {sink.stage}: {staged}")


_OF_WORLD: dict[str, Callable[..., bool]] = {
    "start": World._start,
    "open": World._open,
    "time": World._pass_time,
    "crash": World._crash,
    "wake": World._wake,
    "calm": World._calm_down,
    "lose state": World._lose_state,
}
_OF_TASKS: dict[str, Callable[..., bool]] = {
    "read": lambda task, times: task.emit_records(times),
    "take": Task.take,
    "query": Task.run_query,
    "mail": Task.take_mail,
    "announce": Task.announce,
    "align": Task.time_out,
    "network": Task.receive,
    "idle": lambda task: task.fall_idle(),
    "fail": Task.fail_soon,
    "lose": Task.lose_notice,
}
_OF_PROCESSES: dict[str, Callable[..., bool]] = {
    "main": Process.run_main,
    "io": Process.run_io,
    "upload": Process.upload,
    "pause": Process.pause,
    "cancel": Process.cancel,
    "ask": Process.ask,
    "repeat": Process.repeat,
}
