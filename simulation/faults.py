"""Deliberate faults: shipped code with one rule broken, which the simulator must find. `python -m simulation.faults` tries all.

A fault replaces a piece of the source text of one function while it is tried. A fault whose text is no longer in the function
is refused.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from dagster_checkpoints.coordination import CheckpointCoordinator, TaskLifecycle, TrackingBarrierHandler, WatermarkValve
from dagster_checkpoints.coordination.barriers.single import _SingleCheckpointHandler
from dagster_checkpoints.coordination.pending_checkpoints import PendingCheckpoints
from dagster_checkpoints.coordination.retention import CompletedCheckpoints
from dagster_checkpoints.coordination.schedule import CheckpointSchedule
from dagster_checkpoints.execution.checkpoint_writing import write_checkpoint
from dagster_checkpoints.execution.gate_snapshots import GateSnapshots
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.job_coordination import JobCoordination
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.job_requests import JobRequests
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.restored_channels import first_elements
from dagster_checkpoints.execution.shared_files import SharedNames
from dagster_checkpoints.execution.task_machine import TaskMachine
from dagster_checkpoints.sinks import transactions
from dagster_checkpoints.state import redistribution, restore
from dagster_checkpoints.state.rescaling import check_rescaling, least_watermark
from simulation.running import Outcome, run
from simulation.scenario import random_scenario


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule broken.

    Attributes:
        name: the behaviour of the code with the fault.
        function: the function, method or property that is broken.
        old: a piece of its source text, which occurs in it once.
        new: the replacement.
        theme: the theme (`scenario.THEMES`) of the worlds to search, if worlds of all themes take too long.
        also: another function, in which the same text is replaced in the same way.
    """

    name: str
    function: Any
    old: str
    new: str
    theme: str = ""
    also: Any = None


class StaleFault(Exception):
    """The code that a fault breaks has changed."""


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """The shipped code has the fault inside the block: every reference to the function sees it, because its code object changes.

    Raises:
        StaleFault: the function's source does not have the fault's text, or has it more than once.
    """
    with ExitStack() as restore:
        for function in [getattr(each, "fget", each) for each in (fault.function, fault.also) if each is not None]:
            restore.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = _broken(fault, function)
        yield


def _broken(fault: Fault, function: Callable[..., Any]) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    found = source.count(fault.old)
    if found != 1:
        raise StaleFault(
            f"Fault {fault.name!r}: expected {fault.old!r} once in the source of {function.__qualname__}, found it {found} "
            "times. The code has changed: name the text that breaks the same rule now."
        )
    module = compile(source.replace(fault.old, fault.new), f"<fault: {fault.name}>", "exec", dont_inherit=True)
    return next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)


FAULTS = (
    # Barriers and event time
    Fault(
        "a closed channel is not counted",
        _SingleCheckpointHandler._end,
        "self._channels.open.discard(channel)",
        "return []",
        "quiet",
    ),
    Fault("an aligned channel is not blocked", _SingleCheckpointHandler._barrier, "[*actions, BlockChannel(last)]", "actions"),
    Fault("at-least-once takes the first barrier for all", TrackingBarrierHandler._complete, "<= seen", "<= seen or seen"),
    Fault(
        "an unaligned snapshot does not wait for elements in flight",
        _SingleCheckpointHandler._captured,
        "pending.in_flight & channels",
        "set(pending.in_flight)",
    ),
    Fault("an ended channel holds event time back", WatermarkValve.end, '"drain" if drain else "suspend"', "state.ended"),
    Fault("event time goes back in a restore", WatermarkValve.restore, "self._recompute()", "self._output -= 1_000"),
    # How a task ends
    Fault(
        "a task ends at the first notice after its end of data, though that checkpoint was triggered before it",
        TaskLifecycle._completed,
        "any(taken <= checkpoint_id for taken in self._after_finish)",
        "self.operators_finished",
    ),
    Fault("a suspend does not pause", TaskLifecycle._snapshot_taken, "self.operators_finished or self._paused", "True"),
    Fault(
        "a failed suspend does not resume its tasks",
        TaskLifecycle._aborted,
        "checkpoint_id == self._stop",
        "checkpoint_id == self._stop and not self._paused",
    ),
    Fault(
        "a task ends before it has committed",
        TaskMachine._perform,
        "in decided",
        "in sorted(decided, key=lambda action: isinstance(action, life.CommitUpTo))",
    ),
    Fault("the data ends before the query has consumed the records released to it", InputGate._end, " and self.caught_up", ""),
    # Snapshots
    Fault(
        "a snapshot is taken before the query has consumed the records released to it",
        InputGate._take_due,
        "self._open and not self.caught_up",
        "False",
    ),
    Fault(
        "a gate reads on behind the barrier at which its snapshot is due",
        InputGate.reads,
        "self._due",
        "()",
        also=InputGate._arrived,
    ),
    Fault("an aborted checkpoint's due snapshot is taken nevertheless", GateSnapshots.drop, "!= checkpoint_id", "> 0"),
    # From trigger to completion
    Fault(
        "only the first instance of a root is triggered",
        PendingCheckpoints.trigger,
        "for task in plan.trigger",
        "for task in plan.trigger if task.index == 0",
    ),
    Fault("ids begin again after a restore", CheckpointCoordinator.__init__, "next_checkpoint_id, completed", "1, completed"),
    Fault("no final checkpoint", CheckpointSchedule._observe, "all_wait and", "False and"),
    Fault("a savepoint is subsumed", PendingCheckpoints._subsume_older, " and not other.properties.is_savepoint", ""),
    Fault("a plain savepoint commits", PendingCheckpoints.complete, "if completed.properties.commits", "if True"),
    Fault(
        "retention drops the newest checkpoint",
        CompletedCheckpoints._subsume,
        "newest = {self.latest_id, *checkpoints[-1:]}",
        "newest = {self._checkpoints[0].checkpoint_id}",
    ),
    Fault("an unknown outcome discards", CheckpointCoordinator._dispatch, "discard=False", "discard=True"),
    Fault(
        "tasks are notified before the store names the checkpoint",
        PendingCheckpoints._finalize_next,
        "return [WriteMetadata(",
        "return [NotifyTasks(frozenset(pending.plan.commit), CheckpointCompletedNotice(pending.checkpoint_id)), WriteMetadata(",
    ),
    Fault("finished tasks are forgotten in a restart", CheckpointCoordinator._restart, "reset(finished)", "reset(())"),
    Fault(
        "a restart does not wait for a checkpoint being finalized",
        CheckpointCoordinator.finalizing,
        "return self._pending.finalizing",
        "return None",
    ),
    Fault("union state of a partly finished stage is accepted", write_checkpoint, "check_union_states(metadata)", "pass"),
    Fault(
        "a checkpoint is accepted in which some instances with union state have finished",
        restore.check_union_states,
        " or 0 < len(gone) < stage.parallelism",
        "",
    ),
    # Storage and its owners
    Fault("completion is not fenced", OwnershipSteps._adopt, "found.state.epoch != self.epoch", "False"),
    Fault("a file's name does not contain the epoch of its owner", SharedNames.own, "self._epoch()", "0", "going back"),
    Fault(
        "an older owner aborts what a newer one has staged",
        transactions.stages_for_newer_owner,
        "staged_by > epoch",
        "False",
        "going back",
    ),
    # State in a restore
    Fault("list state loses the remainder of an uneven split", redistribution.redistribute_lists, " + (step < remainder)", ""),
    Fault(
        "key groups stay where they were",
        redistribution.redistribute_key_groups,
        "in key_groups_of(index, parallelism, groups)",
        "in (*instances, *[None] * parallelism)[index] or {}",
        "rescaling",
    ),
    Fault(
        "broadcast state is taken from the first instance only",
        redistribution.redistribute_broadcasts,
        "{**first, **(states or {})}",
        "{**(instances[0] or {})}",
        "ends",
    ),
    Fault("the enumerator's splits are forgotten in a restore", restore._enumerators, "s.enumerator is not None", "False"),
    Fault("the end of a finished producer is not sent again", first_elements, "if producer_finished", "if False"),
    Fault("a rescaled instance begins with the latest event time", least_watermark, "min(", "max(", "rescaling"),
    Fault("finished instances are restored as other instances", check_rescaling, "(waiting or ended)", "waiting", "rescaling"),
    # Attempts, requests, the end of a job
    Fault("a restart does not end the sources that a user has ended", JobMachine._deploy, "self._job.ended_sources", "()"),
    Fault(
        "a restart begins from the start of the run, though a newer checkpoint is complete",
        JobMachine._newest_known,
        "event.newest if event.epoch == self._epoch else None",
        "None",
    ),
    Fault("a report of an earlier attempt counts in the present one", JobMachine._take, "attempt == self._attempt and ", ""),
    Fault("the requester of a stop is answered twice", JobRequests.close, "+= self._answers", "+= 2 * self._answers"),
    Fault(
        "a drain that waits behind a stop is forgotten when the stop fails",
        JobRequests.resume_drain,
        "self.drain() if self._drain_waits else []",
        "[]",
        "stops",
    ),
    Fault(
        "a finished job deletes its checkpoints before its end is recorded",
        JobMachine._finish,
        "self._to_discard = discards",
        "job.actions += discards",
    ),
    Fault(
        "passed-over checkpoints are deleted before the run has one of its own",
        JobCoordination.begin,
        "self._passed_over = passed_over",
        "self.actions += [DiscardCheckpoint(later) for later in passed_over]",
    ),
    # Faults that the simulator found in the shipped code
    Fault(
        "a partial upload is not deleted when no task had acknowledged",
        PendingCheckpoints._abort,
        "actions.append(DiscardStates(",
        "pending.states and actions.append(DiscardStates(",
    ),
    Fault(
        "a new channel is left out after a second restore",
        WatermarkValve.restore,
        "aligned=not saved.idle",
        "aligned=not saved.idle and saved.watermark >= self._output",
    ),
    Fault(
        "an older checkpoint completes after an unknown outcome",
        PendingCheckpoints.finalize_failed,
        "not discard and pending.properties.commits",
        "False",
        "storage",
    ),
    Fault("a late acknowledgement discards a completed checkpoint", PendingCheckpoints._late, "self._stored_ids", "()"),
    Fault("a finished stage behind one at its end of data cannot be restored", restore._ended, "+= waiting", "+= 0"),
)


def find(fault: Fault, seconds: float, first_seed: int = 0) -> tuple[int, float, Outcome] | None:
    """The first seed at which the simulator finds the fault, the seconds it took, and the outcome; None if none does in time."""
    began = time.monotonic()
    with injected(fault):
        for seed in itertools.count(first_seed):
            outcome = run(random_scenario(seed, fault.theme), record=False)
            took = time.monotonic() - began
            if outcome.error is not None:
                return seed, took, outcome
            if took > seconds:
                return None
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.faults", description="Find every deliberate fault.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each fault (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("only", nargs="*", default=[""], help="parts of the names of the faults to try; all by default")
    options = parser.parse_args(arguments)
    missed = 0
    for fault in (fault for fault in FAULTS if any(part in fault.name for part in options.only)):
        found = find(fault, options.seconds, options.seed)
        missed += found is None
        result = f"NOT FOUND in {options.seconds:g} s"
        if found is not None:
            seed, took, outcome = found
            text = str(outcome.error).replace("\n", " ")[:110]
            result = f"{took:.2f} s, seed {seed}: {type(outcome.error).__name__}: {text}"
        print(f"{fault.name}: {result}", flush=True)
    print(f"{missed} not found" if missed else "all found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
