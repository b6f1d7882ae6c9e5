"""A task: runs one instance of a chain on its own thread, with a mailbox.

It performs the actions of its `execution.task_machine`. It owns one Spark query at most, run by its `query_runs`. Its
`operator_chain` calls the stages, its `task_watermarks` know event time, its `task_snapshots` pin what a checkpoint holds. What
differs between a source and a stage behind channels is in the subclasses.

    mailbox ──> the task's thread ──────────────> the query's lock ──> snapshots, commits, marks on the output channels
    Spark   ──> foreachBatch ──> evaluation ────> the query's lock ──> sink, segments on the output channels

It must not know other tasks, the coordinator's rules, or storage beyond handing over pinned files.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.events import AlignmentTick
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.execution.elements import BarrierMark, Mark, WatermarkAt, WatermarkStatus
from dagster_checkpoints.execution.source_answers import SourceLook
from dagster_checkpoints.execution.task_events import (
    DropSnapshot,
    Evaluated,
    EvaluateOnce,
    Forward,
    HoldQuery,
    KillQuery,
    NotifyOperatorsAborted,
    Overtake,
    PinSnapshot,
    QueryHeld,
    QueryRunning,
    Report,
    SnapshotFailed,
    SnapshotPinned,
    StartQuery,
    StopSource,
    StoreSnapshot,
    TaskAction,
    TaskEvent,
    TaskOpened,
    WatermarkReached,
)
from dagster_checkpoints.execution.task_machine import TaskMachine
from dagster_checkpoints.spark.channels.channel_log import SegmentFiles
from dagster_checkpoints.spark.errors import StageError
from dagster_checkpoints.spark.query import plans
from dagster_checkpoints.spark.query.error_text import query_files_error, text_of_error
from dagster_checkpoints.spark.query.query import BatchFailed, TaskQuery
from dagster_checkpoints.spark.query.query_gate import QueryGate
from dagster_checkpoints.spark.query.query_log import STATE_PARTITIONS
from dagster_checkpoints.spark.query.query_sessions import with_settings
from dagster_checkpoints.spark.query.row_counts import RowCounts, rows_of_table
from dagster_checkpoints.spark.tasks.counted_rows import EmittedRows, LateRows
from dagster_checkpoints.spark.tasks.group_offsets import GroupOffsets
from dagster_checkpoints.spark.tasks.messages import Mail, TaskFirstBatch, TaskQueryStarted, TaskRaised, WakeUp
from dagster_checkpoints.spark.tasks.operator_chain import OperatorChain
from dagster_checkpoints.spark.tasks.query_runs import POLL_SECONDS, QueryRuns
from dagster_checkpoints.spark.tasks.stage_errors import StageErrors
from dagster_checkpoints.spark.tasks.task_parts import StageInstance, TaskParts
from dagster_checkpoints.spark.tasks.task_snapshots import TaskSnapshots
from dagster_checkpoints.spark.tasks.task_watermarks import TaskWatermarks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IDLE_POLL_SECONDS = 0.5
"""Seconds that a task waits for a message if nothing is to be expected that comes without one, see `seconds_to_next_look`."""
ACTIVE_SECONDS = 1.0
"""Seconds after a batch or a message in which a task whose input may end looks often."""
CHECK_SECONDS = 1.0
"""Seconds between two checks whether the query still runs."""
LOOK_SECONDS = 0.1
"""The same for a query one of whose inputs may end; if all may, it is `POLL_SECONDS` shortly after a batch or a message."""

_BETWEEN_BATCHES = WatermarkReached | Forward | Overtake | life.PauseOperators | StoreSnapshot
"""What follows a pinned snapshot before the next batch may emit."""
_EVALUATES = SourceLook("", "reading", "evaluating its DataFrame")


class TaskCanceled(BaseException):
    """Ends a task's thread when the job cancels the task."""


class Task(ABC):
    """The part that all tasks have in common; see the module's text.

    Args:
        parts: The task's parts.
        machine: The task's machine.
        gate: The gate of the query's sources, if the query reads channels.
    """

    def __init__(self, parts: TaskParts, machine: TaskMachine, gate: QueryGate | None = None) -> None:
        self.parts = parts
        self.machine = machine
        self.id = parts.id
        self.output = parts.output
        self.plan = parts.plan
        checkpoint = parts.folder.work / "checkpoint"
        self.stages = StageErrors(parts.instances, parts.plan.outputs if parts.plan is not None else {}, checkpoint)
        self.operators = OperatorChain(parts, self.stages)
        wait = self.output.wait_for_consumers
        self.query = TaskQuery(checkpoint, str(parts.id), self._on_batch, wait, self.before_batch, gate)
        self.runs = QueryRuns(parts.id, self.query, self.tail.stage.output_mode, self._check_canceled)
        self.watermarks = TaskWatermarks(parts, self.query, self.committed_watermark)
        self.snapshots = TaskSnapshots(parts, self.query, self.operators, self.watermarks)
        self.group_offsets = GroupOffsets(parts, self.query.log)
        self.rows = EmittedRows(parts.chain.stages, self.output, parts.restored)
        plan = parts.plan
        self._row_counts = RowCounts(tuple(plan.outputs), plan.stateful) if plan is not None and len(plan.outputs) > 1 else None
        self.error: BaseException | None = None
        self.job_tag = f"task-{uuid4().hex}"
        """The tag of all Spark jobs that the task starts, on its own thread and in its query."""
        self._mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._canceled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"task {parts.id}", daemon=True)
        self._done = False
        self._next_query_check = 0.0
        self._active_until = 0.0
        self._rows_in_reported_batch: int | None = None
        self._evaluates = False

    # For the job

    def start(self) -> None:
        self._thread.start()

    def send(self, mail: Mail) -> None:
        """Put a message into the mailbox; any thread."""
        self._mailbox.put(mail)

    def wake_up(self) -> None:
        """Wake the task's thread; any thread."""
        self._mailbox.put(WakeUp())

    def cancel(self) -> None:
        """Stop the task as soon as possible; any thread. `join` waits for the end."""
        self._canceled.set()
        self.wake_up()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread. True if it has ended.

        A task that was built, and never started, ends here: its stages were opened.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout)
        else:
            self.operators.close()
        return not self._thread.is_alive()

    @property
    def rows_before(self) -> int:
        """The number of rows that the last stage had emitted at the restored checkpoint."""
        return self.rows.before

    def rows_of(self, stage: str) -> int | None:
        """The number of rows that a stage has emitted since the job began; None if it is not known."""
        return self.rows.of(stage)

    @property
    def output_watermark(self) -> int | None:
        """The watermark that was sent last, epoch ms; None before the first one."""
        return self.watermarks.output

    @property
    def late_rows(self) -> LateRows:
        """The numbers of late rows dropped since the job began."""
        return self.watermarks.late_rows

    @property
    def suspended(self) -> bool:
        """Whether the task ended before its data: it continues when the job is resumed from the savepoint."""
        return self.machine.suspended

    def caught_up(self, stage: str) -> bool | None:
        """Whether a stage of the task has processed all input that the last check found; None if that is not known. Any thread.

        Args:
            stage: The name of the stage.
        """
        return None

    def look_at_sources(self) -> SourceLook | None:
        """What the task does with its sources; None if it reads none now. Any thread."""
        return _EVALUATES if self._evaluates and not self.has_first_batch else None

    @property
    def reads_locally(self) -> bool:
        """Whether Spark's driver reads the rows itself, and no executors on other machines."""
        return str(self.parts.spark.sparkContext.master).partition("[")[0] == "local"

    @property
    def has_first_batch(self) -> bool:
        """Whether the task has processed a batch in this attempt."""
        return self._rows_in_reported_batch is not None

    @property
    def rows_behind(self) -> int | None:
        """The number of rows that the task's source has not read yet; None if that is not known. Any thread."""
        return None

    @property
    def tail(self) -> StageInstance:
        """The chain's last stage: the one whose output leaves the task."""
        return self.parts.instances[-1]

    # The thread

    def _run(self) -> None:
        try:
            self.parts.spark.sparkContext.addJobTag(self.job_tag)  # Spark's thread of the query inherits it
            self.operators.open_sink()
            if not self.parts.finished_before:
                self.report_waiting()
            self.handle(TaskOpened())
            while not self._done:
                self._check_canceled()
                self._read_mail()
                if not self._done and (self.query.error is not None or time.monotonic() >= self._next_query_check):
                    self._next_query_check = time.monotonic() + self.seconds_to_next_check()
                    self.runs.check_query() if self.query.paused else self.check_query()
                if not self._done and not self.query.paused:
                    self._tick()
                    self.step()
        except TaskCanceled:
            self.query.kill()
        except BaseException as error:
            self.error = self.stages.explain(error)
            with contextlib.suppress(Exception):
                self.query.kill()
            self.parts.report(TaskRaised(self.id, self.error))
        finally:
            self.operators.close()
            self.group_offsets.close(wait=self._done)

    def _seconds_to_tick(self) -> float:
        deadline = None if self.query.paused else self.machine.next_deadline()
        return math.inf if deadline is None else max(POLL_SECONDS, deadline - time.monotonic())

    def _tick(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is not None and (now := time.monotonic()) >= deadline:
            self.handle(AlignmentTick(now))

    def _read_mail(self) -> None:
        with contextlib.suppress(queue.Empty):
            mail = self._mailbox.get(timeout=min(self.seconds_to_next_look(), self._seconds_to_tick()))
            self._active_until = time.monotonic() + ACTIVE_SECONDS
            while True:
                self.take(mail)
                if self._done:
                    return
                mail = self._mailbox.get_nowait()

    def take(self, mail: Mail) -> None:
        """Take a message out of the mailbox; on the task's own thread only."""
        if not isinstance(mail, WakeUp):
            self.handle(mail)

    def handle(self, event: TaskEvent) -> None:
        """Hand an event to the machine, and perform its actions; on the task's own thread only."""
        self.perform(self.machine.handle(event, time.monotonic()))

    # For subclasses

    def seconds_to_next_look(self) -> float:
        """Seconds that the task waits for a message before its next step. Spark commits a batch shortly after its processing."""
        return POLL_SECONDS if self.query.log.awaits_commit else IDLE_POLL_SECONDS

    def seconds_to_next_check(self) -> float:
        """Seconds between two checks of the query, which call into the JVM; a batch that failed is checked at once."""
        return CHECK_SECONDS

    @property
    def seconds_until_end_is_seen(self) -> float:
        """The same while the query's input may end by itself, which Spark does not report."""
        return POLL_SECONDS if self.was_active else LOOK_SECONDS

    @property
    def was_active(self) -> bool:
        """Whether the task has had a batch or a message in the last `ACTIVE_SECONDS`."""
        return time.monotonic() < self._active_until

    def check_query(self) -> None:
        """Check that the query still runs. Raises its error."""
        self.runs.check_query()

    @abstractmethod
    def step(self) -> None:
        """Do one round of the loop: check the progress of the query and the elements on channels."""

    def report_waiting(self) -> None:  # noqa: B027 - a source waits for nothing
        """Report the inputs that the task waits for before it has a query."""

    def query_settings(self, frame: DataFrame) -> dict[str, str]:
        """Settings of Spark with which the query starts, unless its log has others."""
        partitions = self.parts.pipeline.stage(self.parts.chain.name).state_partitions_of_instance
        return {} if partitions is None else {STATE_PARTITIONS: str(partitions)}

    def launch_query(self) -> None:
        """Start the query for the first time."""
        raise AssertionError(f"{self.id} has no query to start")

    def stop_source(self) -> None:  # noqa: B027 - a batch source has no query to stop
        """Stop reading a source, as if its input were exhausted."""

    @abstractmethod
    def reach_max_watermark(self) -> None:
        """Advance event time to its end in this task's query: every window and timer fires."""

    def perform_on_inputs(self, action: TaskAction) -> None:
        """Perform an action on input channels."""
        raise AssertionError(f"{self.id} has no input channels: {action!r}")

    def consumed_positions(self) -> Mapping[str, int]:
        """By input channel, the position up to which the query has consumed it in the batches that it has committed."""
        return {}

    def static_tables(self) -> Mapping[str, tuple[SegmentFiles, ...]]:
        """The segments of each static input so far."""
        return {}

    def committed_watermark(self, batch_id: int) -> int | None:
        """The output watermark after batch `batch_id` is committed; None if it is not known."""
        return self.watermarks.behind_state(batch_id)

    # Micro-batches

    def start_query(
        self, trigger: Mapping[str, object] | None = None, before_first_batch: Callable[[], None] | None = None
    ) -> None:
        """Start the query with one of Spark's triggers, by default without a pause between batches."""
        assert self.plan is not None
        frame = with_settings(self.plan.frame, self.query_settings(self.plan.frame))
        self.runs.start(frame, trigger or {}, before_first_batch)
        self.parts.report(TaskQueryStarted(self.id))

    def _on_batch(self, batch: DataFrame, batch_id: int) -> Callable[[], None]:
        """Evaluate a batch; called by Spark. Returns what emits it."""
        assert self.plan is not None
        plan, began = self.plan, time.monotonic()
        emit_rows = self.output.evaluate(batch, self.operators.process_batch(batch, batch_id, plan))

        def emit() -> None:
            rows = emit_rows(batch_id)
            counts = self._row_counts.of_batch(self.query.execution.lastExecution()) if self._row_counts is not None else {}
            self.rows.add(counts)
            self.report_first_batch(rows, time.monotonic() - began, self._rows_read(counts))
            self.after_emit(rows)
            self.watermarks.observe(batch_id, plan.stateful)
            self.wake_up()

        return emit

    def evaluate_once(self, plan: plans.QueryPlan) -> None:
        """Evaluate a plan without streams, as one batch."""
        self.parts.spark.sparkContext.setLocalProperty("spark.scheduler.pool", str(self.id))
        self.parts.report(TaskQueryStarted(self.id))
        began, self._evaluates = time.monotonic(), True
        rows = self.output.write(plan.frame, 0, self.operators.process_batch(plan.frame, 0, plan))
        self.rows.add(rows_of_table(plan.observations))
        self.report_first_batch(rows, time.monotonic() - began)

    def _rows_read(self, counts: Mapping[str, int | None]) -> int | None:
        """The number of rows of the sources among these stages; None if it is not known."""
        known = [
            counts[each.stage.name] for each in self.parts.instances if each.stage.kind.is_source and each.stage.name in counts
        ]
        return None if not known or None in known else sum(count for count in known if count is not None)

    def report_first_batch(self, rows: int, seconds: float, rows_read: int | None = None) -> None:
        """Report a batch if it was this task's first one, or the first one with rows; see `TaskFirstBatch`."""
        if self._rows_in_reported_batch is None or (rows and not self._rows_in_reported_batch):
            self._rows_in_reported_batch = rows
            self.parts.report(TaskFirstBatch(self.id, rows, seconds, rows_read))

    def before_batch(self, batch_id: int) -> None:  # noqa: B027
        """Before a batch is evaluated; no snapshot is taken meanwhile."""

    def after_emit(self, rows: int) -> None:  # noqa: B027
        """After a batch's records were emitted; no snapshot is taken meanwhile."""

    # The machine's actions

    def perform(self, actions: Sequence[TaskAction]) -> None:
        """Perform actions in their order."""
        for action in actions:
            match action:
                case Forward(mark):
                    self._forward(mark)
                case WatermarkReached():
                    self.watermarks.send(action)
                case Report(event):
                    self.parts.report(event)
                case StartQuery():
                    self.launch_query()
                    self.handle(QueryRunning())
                case EvaluateOnce():
                    assert self.plan is not None
                    self.evaluate_once(self.plan)
                    self.handle(Evaluated())
                case StopSource():
                    self.stop_source()
                case PinSnapshot() | HoldQuery():
                    self._snapshot(action)
                case Overtake(barrier):
                    self.output.append(BarrierMark(barrier))  # whatever is in front of it waits at the consumers
                case StoreSnapshot():
                    self.snapshots.store(action)
                case DropSnapshot(checkpoint_id):
                    self.snapshots.drop(checkpoint_id)
                case NotifyOperatorsAborted(checkpoint_id):
                    with self.query.no_batch_emits():
                        self.operators.notify_aborted(checkpoint_id)
                case life.FinishOperators():
                    self._finish_operators()
                    self.handle(life.OperatorsFinished())
                case life.PauseOperators():
                    self.query.pause()
                case life.ResumeOperators():
                    self.query.resume()
                case KillQuery():
                    self.query.kill()
                case life.CommitUpTo(checkpoint_id):
                    assert checkpoint_id is not None  # every task waits for a checkpoint, see JobOptions
                    self.operators.commit(checkpoint_id, last=any(isinstance(each, life.TaskFinished) for each in actions))
                    with self.query.no_batch_emits():
                        self.operators.notify_complete(checkpoint_id)
                    self.group_offsets.complete(checkpoint_id)
                case life.CloseOperators():
                    self.operators.close()
                case life.TaskFinished():
                    self._done = True
                case _:
                    self.perform_on_inputs(action)

    def _forward(self, mark: Mark) -> None:
        if isinstance(mark, WatermarkAt | WatermarkStatus):
            self.watermarks.send(mark)
        else:
            self.output.append(mark)

    # Snapshots

    def _snapshot(self, due: PinSnapshot | HoldQuery) -> None:
        """Pin everything and send the barrier on while no batch emits; perform the machine's other actions after that."""
        checkpoint_id = due.checkpoint_id if isinstance(due, HoldQuery) else due.barrier.checkpoint_id
        actions: list[TaskAction] = [due]
        try:
            with self.query.between_batches() as batch_id:
                if isinstance(due, HoldQuery):
                    actions = self.machine.handle(QueryHeld(checkpoint_id, self.consumed_positions()), time.monotonic())
                if actions and isinstance(actions[0], PinSnapshot):
                    self._pin(actions[0], batch_id)
                    # Still between two batches: after a suspend's snapshot nothing may be emitted.
                    actions = self.machine.handle(SnapshotPinned(checkpoint_id), time.monotonic())
                while actions and isinstance(actions[0], _BETWEEN_BATCHES):
                    self.perform([actions.pop(0)])
        except StageError:
            raise
        except Exception as error:
            if self.snapshots.is_pinned(checkpoint_id):
                raise  # the barrier may have been sent
            self.snapshots.discard(checkpoint_id)
            reason = FailureReason.TASK_FAILURE if isinstance(error, BatchFailed) else FailureReason.CHECKPOINT_DECLINED
            text = text_of_error(query_files_error(error, self.query.checkpoint) or error)
            actions = self.machine.handle(SnapshotFailed(checkpoint_id, text, reason), time.monotonic())
        self.perform(actions)

    def _pin(self, due: PinSnapshot, batch_id: int) -> None:
        if self.machine.running:
            self.watermarks.forward()
        finished = self.machine.operators_finished
        self.group_offsets.pin(due.barrier.checkpoint_id, batch_id)
        self.snapshots.pin(due, batch_id, self.plan, self.static_tables(), rows_out=self.rows.all(), finished=finished)

    # The end

    def _finish_operators(self) -> None:
        self.reach_max_watermark()
        self.operators.finish(self.plan, lambda rows: self.output.write(rows, self.first_free_batch()))

    def first_free_batch(self) -> int:
        """The number behind those of all micro-batches of the attempt."""
        # 0 is the number of a batch result's only batch, which has no log.
        return max(self.query.log.last_committed(), 0) + 1

    def fire_timers(self) -> None:
        """Run batches under MAX_WATERMARK until no timer is set by a timer, see `TaskWatermarks.fire_timers`."""
        self.watermarks.fire_timers(self.run_planned_batch)

    def run_planned_batch(self, watermark: int) -> None:
        """Run one batch without input under the given watermark, epoch ms; the query is stopped."""
        self.runs.plan_batch(watermark)
        self.start_query({"once": True})
        self.runs.wait_until(lambda: not self.query.active)
        self.runs.check_query()

    def _check_canceled(self) -> None:
        if self._canceled.is_set():
            raise TaskCanceled
