"""The world: durable storage, sinks, the processes that live, the users; and everything that can happen next.

A step is a label, a tuple that begins with what happens; `perform` does it if it is possible now. Whoever chooses the steps
(`schedules`) chooses everything: there is no other chance in here, so a list of labels is a run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from dagster_checkpoints.execution.job_events import CancelRequested, DrainRequested
from simulation.cuts import written
from simulation.expected import expected_rows
from simulation.machine import LEASE
from simulation.process import Process
from simulation.restoring import From
from simulation.scenario import Scenario
from simulation.shapes import shape_of
from simulation.sinks import SinkSystem
from simulation.storage import OK, Store
from simulation.task import Task
from simulation.user_requests import UserRequest
from simulation.violations import Violation, check

Label = tuple[Any, ...]
DEADLINE = 200.0
"""How long a user waits for an answer, seconds."""


class World:
    """See the module's text."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.shapes = [shape_of(stages, scenario.chaining) for stages in scenario.variants]
        self.has_union = any(stage.kind == "union" for stage in scenario.variants[0])
        self.store = Store()
        self.sinks = {n: SinkSystem(n) for n, spec in enumerate(scenario.variants[0]) if spec.sink}
        self.now = 0.0
        self.steps = 0
        self.budgets = dict(scenario.budgets)
        self.counts: Counter[str] = Counter()
        self.processes: list[Process] = []
        self.active: list[Process] = []
        self.requests: list[UserRequest] = []
        self.ended_early = False
        """Whether anybody has ever ended a source."""
        self.notes: list[str] = []
        self.calm = False
        self.done = False
        self._does: dict[str, Callable[..., bool]] = {
            "start": self._start,
            "open": self._open,
            "read": self._read,
            "take": self._take,
            "query": self._query,
            "mail": self._mail,
            "announce": self._announce,
            "align": self._align,
            "network": self._network,
            "idle": self._idle,
            "main": self._main,
            "io": self._io,
            "upload": self._upload,
            "time": self._time,
            "fail": self._fail,
            "crash": self._crash,
            "pause": self._pause,
            "wake": self._wake,
            "cancel": self._cancel,
            "ask": self._ask,
            "repeat": self._repeat,
            "lose": self._lose,
            "calm": self._calm,
        }

    def perform(self, label: Label) -> bool:
        """Let it happen. False if it is impossible now; then nothing has changed."""
        if not self._does[label[0]](*label[1:]):
            return False
        self.steps += 1
        return True

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def current(self) -> Process | None:
        """The process that owns the pipeline, or else the one that was started last and tries to."""
        last = self.processes[-1] if self.processes else None
        if last is not None and not last.over and not last.paused and last.ownership is None:
            return last
        state = self.store.state
        for process in self.active:
            if process.ownership is not None and state is not None and process.ownership.epoch == state.epoch:
                return process
        return last if last is not None and not last.over else None

    def variant_of_newest(self) -> int:
        """Of the pipeline, with which a restore certainly fits."""
        newest = self.store.state.newest if self.store.state is not None else None
        return 0 if newest is None else self.store.check_whole(newest.location).variant

    def _process(self, number: int) -> Process | None:
        process = self.processes[number] if number < len(self.processes) else None
        return None if process is None or process.over or process.paused else process

    def _task(self, number: int, task: int) -> Task | None:
        process = self._process(number)
        if process is None or task >= len(process.shape.tasks):
            return None
        found = process.tasks.get(process.shape.tasks[task].id)
        return None if found is None or found.done else found

    # Processes

    def _start(self, *asked: Any) -> bool:
        if self.done or (self.current is not None and not self.current.paused):
            return False
        process = Process(self, len(self.processes), From(*asked))
        self.processes.append(process)
        self.active.append(process)
        self.counts["processes"] += 1
        return True

    def process_ended(self, process: Process) -> None:
        """A process has come to its end by itself."""
        self.active.remove(process)
        if process.status == "FINISHED":
            self.counts["finishes"] += 1
            if process.ended_by != "end_of_data":
                self.counts["stops"] += process.job.requests.stopped is not None
            self._check_finished(process)

    def _main(self, number: int, outcome: str, times: int) -> bool:
        process = self._process(number)
        if process is None or not process.ready():
            return False
        if outcome != OK:
            if not process.at_write:
                return False
            process.dirty = True
        process.step(outcome)
        for _ in range(times - 1):
            if not process.queue or not process.ready():
                break
            process.step(OK)
        return True

    def _io(self, number: int, outcome: str, times: int) -> bool:
        process = self._process(number)
        if process is None or not process.io_ready():
            return False
        if outcome != OK:
            if not process.io_at_write:
                return False
            process.dirty = True
        process.io_step(outcome)
        for _ in range(times - 1):
            if not process.io_ready() or not process.io_may_go_on:
                break
            process.io_step(OK)
        return True

    def _upload(self, number: int, task: int, checkpoint: int, attempt: int, outcome: str) -> bool:
        process = self._process(number)
        if process is None:
            return False
        for upload in process.uploads:
            if (upload.task.number, upload.barrier.checkpoint_id, upload.attempt) == (task, checkpoint, attempt):
                return process.upload(upload, outcome)
        return False

    def _time(self, seconds: float) -> bool:
        until = self.now + seconds
        while self.now < until:
            # Whoever is not paused renews his lease in time.
            self.now = min(self.now + LEASE / 4, until)
            for process in self.active:
                if not process.paused:
                    process.renew_if_due()
        return True

    def next_time(self) -> float | None:
        """When time alone makes something happen."""
        times = [t for p in self.active if not p.paused and (t := p.next_time()) is not None]
        if self.scenario.settings.config.unaligned:
            tasks = [task for p in self.active if not p.paused for task in p.running]
            times += [t for task in tasks if (t := task.machine.next_deadline()) is not None]
        return min((t for t in times if t > self.now), default=None)

    # Tasks

    def _open(self, number: int, task: int, all_of_them: bool) -> bool:
        found = self._task(number, task)
        if found is None or found.started or found not in found.process.running:
            return False
        for one in list(found.process.running) if all_of_them else (found,):
            if not one.started:
                one.start(at_once=all_of_them)
        self._check_opened(found.process)
        return True

    def _read(self, number: int, task: int, times: int) -> bool:
        found = self._task(number, task)
        if found is None or not found.source or not found.can_read():
            return False
        for _ in range(times):
            found.read_source()
            self.counts["records"] += 1
            if not found.can_read():
                break
        return True

    def _take(self, number: int, task: int, channel: int, times: int) -> bool:
        found = self._task(number, task)
        if found is None or channel >= len(found.inputs) or not found.can_step(found.inputs[channel]):
            return False
        found.step(found.inputs[channel], times)
        return True

    def _query(self, number: int, task: int) -> bool:
        found = self._task(number, task)
        if found is None or not found.can_run_query():
            return False
        found.run_query()
        return True

    def _mail(self, number: int, task: int, times: int) -> bool:
        found = self._task(number, task)
        if found is None or not found.started or not found.mailbox:
            return False
        for _ in range(times):
            found.take_mail()
            if not found.mailbox or found.done:
                break
        return True

    def _announce(self, number: int, task: int, channel: int) -> bool:
        found = self._task(number, task)
        if found is None or channel >= len(found.inputs):
            return False
        barrier = found.can_announce(found.inputs[channel])
        if barrier is None:
            return False
        found.announce(found.inputs[channel], barrier)
        return True

    def _align(self, number: int, task: int) -> bool:
        found = self._task(number, task)
        if found is None or not found.started or found.life.paused:
            return False
        deadline = found.machine.next_deadline()
        if deadline is None or deadline > self.now:
            return False
        found.alignment_tick(self.now)
        return True

    def _network(self, number: int, task: int, channel: int, elements: int) -> bool:
        found = self._task(number, task)
        if found is None or channel >= len(found.inputs):
            return False
        to = found.inputs[channel]
        if to.sent is to.queue or not to.sent:
            return False
        _move(to.sent, to.queue, elements)
        return True

    def _idle(self, number: int, task: int) -> bool:
        found = self._task(number, task)
        if found is None or not found.source or found.idle or not found.can_fall_idle():
            return False
        found.fall_idle()
        return True

    # Faults

    def _spend(self, what: str) -> bool:
        if self.calm or not self.budgets.get(what):
            return False
        self.budgets[what] -= 1
        return True

    def _fail(self, number: int, task: int, where: str) -> bool:
        """A task raises: at once, or the next time that it does something."""
        found = self._task(number, task)
        if found is None or not found.started or found.fail_at or not self._spend("task" if where == "now" else where):
            return False
        if where == "now":
            found.fail("crash")
        else:
            found.fail_at = where
        return True

    def _crash(self, number: int) -> bool:
        process = self.processes[number] if number < len(self.processes) else None
        if process is None or process.over or not self._spend("crash"):
            return False
        process.crash()
        self.active.remove(process)
        self.counts["crashes"] += 1
        return True

    def _pause(self, number: int) -> bool:
        process = self._process(number)
        if process is None or not self._spend("pause"):
            return False
        process.paused = True
        self.counts["pauses"] += 1
        return True

    def _wake(self, number: int) -> bool:
        process = self.processes[number] if number < len(self.processes) else None
        if process is None or process.over or not process.paused:
            return False
        process.paused = False
        for other in self.processes[number:]:
            other.dirty = True
        return True

    def _cancel(self, number: int) -> bool:
        process = self._process(number)
        if process is None or not self._spend("cancel"):
            return False
        process.queue.append(CancelRequested())
        process.dirty = True
        return True

    def _repeat(self, number: int, which: int) -> bool:
        """An acknowledgement or a decline comes a second time."""
        process = self._process(number)
        if process is None or which >= len(process.said) or not self._spend("repeat"):
            return False
        process.repeat(which)
        self.counts["repeated messages"] += 1
        return True

    def _lose(self, number: int, task: int) -> bool:
        """The next notice of a checkpoint's outcome does not reach the task."""
        found = self._task(number, task)
        mail = None if found is None else next((m for m in found.mailbox if found.may_miss(m)), None)
        if found is None or mail is None or not self._spend("lose"):
            return False
        found.mailbox.remove(mail)
        self.counts["lost notices"] += 1
        return True

    def _calm(self) -> bool:
        """Nothing goes wrong any more."""
        self.calm = True
        return True

    # Users

    def _ask(self, number: int, kind: str, stage: int, seconds: float) -> bool:
        process = self._process(number)
        if process is None or (not self.calm and not self._spend(kind)):
            return False
        self.ended_early = self.ended_early or kind in ("end_all", "end_source", "drain")
        if kind == "end_all":
            process.told_to_end = True
            process.queue.append(DrainRequested())
            return True
        users = 1 + (len(self.requests) % 3 == 0)
        request = UserRequest(f"r{len(self.requests)}", kind, seconds, stage, users)
        self.requests.append(request)
        process.asked.append(request)
        process.ask(request)
        return True

    # Invariants

    def _check_opened(self, process: Process) -> None:
        """When every sink has recovered, it shows exactly what the checkpoint counts as written."""
        restored = process.restored
        waits = process.config.checkpoints_after_tasks_finish
        opened = all(task.started for task in process.running) and not any(task.failed for task in process.tasks.values())
        if restored is None or not waits or process.checked == process.attempt or not opened or process.superseded:
            return
        process.checked = process.attempt
        self._check_written(process, restored.metadata, "after the restore")

    def _check_written(self, process: Process, metadata: Any, when: str) -> None:
        for stage, (count, total) in written(metadata, self.shapes[metadata.variant]).items():
            rows = self.sinks[stage].rows(process.lineage)
            found = (len(rows), sum(rows))
            what = f"{when} of {metadata.kind} {metadata.checkpoint_id}, stage {stage}"
            check(found == (count, total), f"{what}: {found} (rows, sum) are committed, {(count, total)} were written")

    def _check_finished(self, process: Process) -> None:
        for request in process.asked:
            check(request.answered, f"request {request.request_id} was never answered")
        if process.superseded:
            return  # what is committed is another one's affair by now
        if process.ended_by == "suspend":
            stopped = process.job.requests.stopped
            assert stopped is not None
            self._check_written(process, self.store.check_whole(stopped.location), "after the suspend")
        else:
            self._check_effects(process)
        if not process.dirty and process.ownership is not None and not process.ownership.steps.lost:
            self._check_nothing_left(process)

    def _check_effects(self, process: Process) -> None:
        """Each source record's effect is committed exactly once (at least once in that mode)."""
        shape = process.shape
        positions: dict[int, list[tuple[int, int]]] = {}
        for task in shape.tasks:
            if shape.stages[task.stages[0]].is_source:
                positions.setdefault(task.stages[0], []).extend(process.ghosts[task.id].splits)
        if process.ended_by == "end_of_data" and not self.ended_early:
            for stage, read in positions.items():
                spec = shape.stages[stage]
                left = [s for s in range(spec.splits) if dict(read).get(s, 0) < spec.records_of(s)]
                check(spec.kind != "bounded" or not left, f"stage {stage} has finished without the rest of its splits {left}")
        rows = expected_rows(shape, positions)
        for stage, sink in self.sinks.items():
            committed = sorted(sink.rows(process.lineage))
            wanted = sorted(uid for uid, _, _ in rows[stage])
            if not self.scenario.settings.exactly_once:
                # A source that goes back and is ended then has been read further before: what came of that is no fault.
                wanted = sorted(set(wanted))
                committed = sorted(set(committed) & set(wanted))
            if committed != wanted:
                lost, extra = Counter(wanted) - Counter(committed), Counter(committed) - Counter(wanted)
                raise Violation(f"stage {stage}: of {len(wanted)} effects {lost.total()} are lost, {extra.total()} too many")

    def _check_nothing_left(self, process: Process) -> None:
        pointers = self.store.pointers()
        kept = {p.location for p in pointers}
        left = sorted(set(self.store.metadata) - kept)
        check(not left, f"left over: {left}")
        named = {file for location in kept if location in self.store.metadata for file in self.store.metadata[location].files}
        files = sorted(self.store.shared - named)
        check(not files, f"left over in shared/: {files}")
        ran = {(task.stages[-1], task.id.index) for task in process.shape.tasks if task.id in process.tasks}
        for sink in self.sinks.values():
            # An instance that had finished before does not open its sink again, and so clears nothing up.
            staged = [name for name, (instance, _) in sink.staged.items() if (sink.stage, instance) in ran]
            check(not staged, f"left over in the staging area of stage {sink.stage}: {staged}")
        begun = [s.location for s in self.store.savepoints.values() if s.own and s.metadata is None and (s.marked or s.files)]
        check(not begun, f"left over: unfinished savepoints {begun}")

    def check_end(self) -> None:
        """Everything is over."""
        check(not self.active, "processes are left")


def _move(source: deque[Any], target: deque[Any], elements: int) -> None:
    for _ in range(min(elements, len(source))):
        target.append(source.popleft())
