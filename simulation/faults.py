"""Deliberate faults: shipped code with one rule broken, which the simulator must find. `python -m simulation.faults` tries all.

How a fault gets into the code is `injection`; those of a restore with other instances are in `rescaling_faults`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dagster_checkpoints.coordination.barriers.single import _SingleCheckpointHandler
from dagster_checkpoints.coordination.barriers.tracking import TrackingBarrierHandler
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.lifecycle import TaskLifecycle
from dagster_checkpoints.coordination.pending_checkpoints import PendingCheckpoints
from dagster_checkpoints.coordination.progress import StopProgress
from dagster_checkpoints.coordination.retention import CompletedCheckpoints
from dagster_checkpoints.coordination.schedule import CheckpointSchedule
from dagster_checkpoints.coordination.watermarks import WatermarkValve
from dagster_checkpoints.execution import gate_snapshots
from dagster_checkpoints.execution.checkpoint_deletion import discard_states
from dagster_checkpoints.execution.checkpoint_writing import write_checkpoint
from dagster_checkpoints.execution.event_time import ConsumedEventTime
from dagster_checkpoints.execution.fused_sources import FusedSources
from dagster_checkpoints.execution.gate_intake import BatchLimit, GateIntake
from dagster_checkpoints.execution.gate_snapshots import GateSnapshots
from dagster_checkpoints.execution.input_channel import first_elements
from dagster_checkpoints.execution.input_gate import InputGate
from dagster_checkpoints.execution.job_coordination import JobCoordination
from dagster_checkpoints.execution.job_machine import JobMachine
from dagster_checkpoints.execution.job_requests import JobRequests
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.shared_files import SharedNames
from dagster_checkpoints.execution.splits import SplitEnumerator, SplitEnumerators
from dagster_checkpoints.execution.task_machine import TaskMachine, config_of_task
from dagster_checkpoints.pipeline import connected_regions
from dagster_checkpoints.state import recording, rescaled_instances, restore, stage_changes
from simulation.burst_faults import BURST_FAULTS
from simulation.injection import Fault, injected
from simulation.layout_faults import LAYOUT_FAULTS
from simulation.liveness_faults import LIVENESS_FAULTS
from simulation.plan_faults import PLAN_FAULTS
from simulation.rescaling_faults import RESCALING_FAULTS
from simulation.running import Outcome, run
from simulation.scenario import random_scenario
from simulation.sink_faults import SINK_FAULTS

SEEDS = Path(__file__).with_name("found_seeds.json")
"""By fault, a seed at which it is found; `python -m simulation.faults --record` writes it anew, since worlds change."""
WORLDS = 20_000
"""Worlds in which a fault is looked for: about a minute on a quiet machine. The slowest one needs some 4,000."""


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
    Fault("at-least-once takes the first barrier for all", TrackingBarrierHandler._complete, "c in seen or", "seen or"),
    Fault(
        "an unaligned snapshot does not wait for elements in flight",
        _SingleCheckpointHandler._captured,
        "pending.in_flight & channels",
        "set(pending.in_flight)",
    ),
    Fault(
        "an unaligned snapshot leaves out what the query has not consumed",
        gate_snapshots._pinned,
        "for _, element in held)",
        "for _, element in held if False)",
    ),
    Fault(
        "an unaligned snapshot has the event time of elements that the query has not consumed",
        ConsumedEventTime.take_in,
        "if channel.held",
        "if False",
    ),
    Fault(
        "an unaligned snapshot is taken at positions from before the query was held",
        InputGate._query_held,
        "self._consumed(event)",
        "pass",
    ),
    Fault(
        "an unaligned snapshot holds what the query has consumed meanwhile",
        GateIntake.consumed,
        "self.behind is not None and self.open",
        "False",
    ),
    Fault(
        "a micro-batch takes more rows than its limit",
        BatchLimit._has_room,
        "taken + rows <= self._max_rows",
        "taken < self._max_rows",
    ),
    Fault("rows that the query has consumed still count", BatchLimit.consumed, "p <= channel.consumed", "False"),
    Fault(
        "an element that is larger than the limit is never read",
        BatchLimit._has_room,
        "taken == 0 or",
        "",
    ),
    Fault(
        "a barrier overtakes refused rows",
        config_of_task,
        "config.aligned() if first.takes_refused_rows else config",
        "config",
        "refused",
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
        "self.open and not self.caught_up",
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
    Fault("finished tasks are forgotten in a restart", CheckpointCoordinator._restart, "reset(event.finished)", "reset(())"),
    Fault(
        "a restart does not wait for a checkpoint being finalized",
        CheckpointCoordinator.finalizing,
        "return self._pending.finalizing",
        "return None",
    ),
    Fault(
        "union state of a partly finished stage is accepted", write_checkpoint, "check_union_states(metadata)", "pass", "tasks"
    ),
    Fault(
        "a checkpoint is accepted in which some instances with union state have finished",
        restore.check_union_states,
        " or 0 < len(gone) < stage.parallelism",
        "",
    ),
    # Storage and its owners
    Fault(
        "completion is not fenced",
        OwnershipSteps._adopt,
        "(found.state.epoch, found.state.history) != (self.epoch, self.state.history)",
        "False",
    ),
    Fault(
        "metadata of a checkpoint that was not completed stays without its files",
        discard_states,
        "yield DiscardMetadata(checkpoint_id)",
        "pass",
        "storage",
    ),
    Fault("a file's name does not contain the epoch of its owner", SharedNames.own, "self._epoch()", "0", "going back"),
    # State in a restore
    Fault(
        "list state loses the remainder of an uneven split", rescaled_instances.redistribute_lists, " + (step < remainder)", ""
    ),
    Fault(
        "broadcast state is taken from the first instance only",
        rescaled_instances.redistribute_broadcasts,
        "{**first, **(states or {})}",
        "{**(instances[0] or {})}",
        "ends",
    ),
    Fault(
        "the enumerator's splits are forgotten in a restore", restore.validate_restore, "stage.enumerator is not None", "False"
    ),
    # Split sources
    Fault(
        "the enumerator's part of a checkpoint is taken when the checkpoint is written, not when it is triggered",
        SplitEnumerators.written,
        "self._taken.pop(checkpoint_id, {})",
        "{stage: each.state() for stage, each in self._of.items()}",
        "splits",
    ),
    Fault("a checkpoint forgets the splits that a task reads", TaskMachine._triggered, "self.splits.held if", "() if"),
    Fault(
        "splits that no restored instance reads are not assigned again",
        SplitEnumerator.__init__,
        "*(split for split in state.assigned if split not in start.held)",
        "*()",
        "splits",
    ),
    Fault("finished splits are discovered again", SplitEnumerator.__init__, ", *state.finished}", "}", "splits"),
    Fault(
        "an instance ends when no split is discovered, though others may be",
        SplitEnumerator._deal_out,
        "or self._complete",
        "or not self._pending",
        "splits",
    ),
    Fault(
        "a split that was read in front of the barrier counts as unread",
        recording.recorded_enumerators,
        "tuple(split for split in state.assigned if split in held[stage])",
        "state.assigned",
        "splits",
    ),
    Fault("the end of a finished producer is not sent again", first_elements, "if producer_finished", "if False"),
    *BURST_FAULTS,
    *LAYOUT_FAULTS,
    *PLAN_FAULTS,
    *LIVENESS_FAULTS,
    *RESCALING_FAULTS,
    SINK_FAULTS[0],
    # Fused sources
    Fault(
        "a checkpoint forgets that a fused source has ended",
        FusedSources._snapshot,
        "source.name in self._ended",
        "False",
        "fan-in",
    ),
    Fault(
        "a task ends when the first of its fused sources has ended",
        FusedSources.all_ended,
        "len(self._ended) == len(self._sources)",
        "bool(self._ended)",
        "fan-in",
    ),
    Fault(
        "a fused source that has ended is read again after a restore",
        FusedSources.__init__,
        "if source.ended}",
        "if False}",
        "fan-in",
    ),
    Fault(
        "a fused source that is not held ends when it has no rows",
        FusedSources._not_moved,
        "name in self._to_end",
        "name in self._sources",
        "fan-in",
    ),
    Fault(
        "an ended fused source holds event time back",
        FusedSources._not_moved,
        "self._valve.end(name, drain=True)",
        "pass",
        "fan-in",
    ),
    Fault(
        "a burst has no end whose fused sources are read by a query with timers of processing time",
        FusedSources.asked,
        "event.ran_under is not None and event.ran_under >= self._valve.watermark",
        "False",
        "fan-in",
    ),
    Fault(
        "fused sources have caught up before the query has run under their event time",
        FusedSources.asked,
        "event.ran_under >= self._valve.watermark",
        "True",
        "fan-in",
    ),
    Fault(
        "event time that is due is sent behind the barrier",
        TaskMachine._pinned,
        "self._to_gate(BetweenBatches())",
        "[]",
    ),
    Fault(
        "a restored query does not run under the event time that its fused sources had reached",
        FusedSources.begin,
        "[AdvanceEventTime(watermark)]",
        "[]",
        "fan-in",
    ),
    Fault(
        "the stage of an ended fused source does not finish",
        recording.recorded_stages,
        "dict.fromkeys(ended_sources",
        "dict.fromkeys(()",
        "fan-in",
    ),
    Fault(
        "a task is restored as finished because one of its fused sources is",
        restore.validate_restore,
        "recorded[c.stages[-1]].finished",
        "recorded[c.stages[0]].finished",
        "fan-in",
    ),
    # Attempts, requests, the end of a job
    Fault("a restart does not end the sources that a user has ended", JobMachine._deploy, "self._job.ended_sources", "()"),
    Fault(
        "a checkpoint does not say which sources a user has ended",
        JobCoordination._write,
        "frozenset(self._asked_to_end)",
        "frozenset()",
    ),
    Fault(
        "a run reads on in the sources that a user had ended in the run before",
        JobCoordination.end_again,
        "self.ended_sources |= sources",
        "pass",
    ),
    Fault(
        "the run after the next one reads on in the sources that a user had ended",
        JobCoordination.end_again,
        "self._asked_to_end |= sources",
        "pass",
    ),
    Fault(
        "a restart begins from the start of the run, though a newer checkpoint is complete",
        JobMachine._newest_known,
        "event.newest if event.epoch == self._epoch else None",
        "None",
    ),
    Fault(
        "a report of an earlier attempt counts in this one",
        JobCoordination.take_report,
        "self.attempts.get(report.task.vertex) != attempt",
        "report.task.vertex not in self.attempts",
    ),
    Fault("the requester of a stop is answered twice", JobRequests.close, "+= self._answers", "+= 2 * self._answers"),
    Fault(
        "a drain that waits behind a stop is forgotten when the stop fails",
        JobRequests.stop_accepted,
        "self._stop = StopWithSavepoint(request_id, drain)",
        "self._stop, self.drain_waits = StopWithSavepoint(request_id, drain), False",
        "stops",
    ),
    Fault(
        "the drain of the run itself cuts bounded sources",
        JobRequests.advance_drain,
        "self._stop is not None or unread",
        "self._stop is not None",
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
    # Regions that restart
    Fault(
        "a task restarts without the tasks that it reads",
        connected_regions,
        "region_of[position] = source",
        "pass",
        "regions",
    ),
    Fault(
        "a region that fails restarts beside a checkpoint that it has acknowledged, and that completes",
        CheckpointCoordinator._region_failed,
        "self._pending.abort_where(lambda pending: True, reason, message)",
        "[]",
        "regions",
    ),
    Fault(
        "tasks that go on do not hear that a checkpoint was aborted because of a region",
        PendingCheckpoints._abort,
        "if tasks:",
        "if tasks and reason is not FailureReason.JOB_FAILOVER_REGION:",
        "regions",
    ),
    Fault(
        "the coordinator waits for all tasks to start when a region restarts",
        CheckpointCoordinator._restart,
        "event.vertices is None",
        "True",
        "regions",
    ),
    Fault(
        "the finished tasks of other regions are forgotten when a region restarts",
        JobCoordination._finished_after,
        "t.vertex not in down",
        "False",
        "regions",
    ),
    Fault(
        "tasks that wait to be started are never started if another region fails",
        JobMachine._stop_tasks,
        "self._phase is JobPhase.CONFIRMING",
        "False",
        "regions",
    ),
    Fault("tasks that go on are deployed again", JobMachine._deploy, "self._job.down", "None", "regions"),
    Fault("tasks that go on are stopped", JobMachine._stop_tasks, "do.StopTasks(vertices)", "do.StopTasks()", "regions"),
    Fault(
        "a region restarts although the savepoint of a suspend is being written",
        StopProgress.binds_all_tasks,
        "self.drain or written or self.phase is StopPhase.ENDING",
        "self.drain",
        "regions",
    ),
    Fault(
        "a region restarts beside drained tasks",
        StopProgress.binds_all_tasks,
        "self.drain or ",
        "",
        "regions",
    ),
    # Faults that the simulator found in the shipped code
    Fault(
        "a partial upload is not deleted when no task had acknowledged",
        PendingCheckpoints._abort,
        "actions.append(DiscardStates(",
        "pending.states and actions.append(DiscardStates(",
    ),
    Fault(
        "an older checkpoint completes after an unknown outcome",
        PendingCheckpoints.finalize_failed,
        "not discard and pending.properties.commits",
        "False",
        "storage",
    ),
    Fault("a late acknowledgement discards a completed checkpoint", PendingCheckpoints._late, "self._stored_ids", "()"),
    Fault(
        "a finished stage behind one at its end of data cannot be restored", stage_changes._ended, "+= waiting", "+= 0", "tasks"
    ),
)


def found_before() -> dict[str, int]:
    """By the name of a fault, the seed at which it was found when `SEEDS` was written."""
    seeds: dict[str, int] = json.loads(SEEDS.read_text(encoding="utf-8"))
    return seeds


def find(fault: Fault, worlds: int, first_seed: int | None = None) -> tuple[int, float, Outcome] | None:
    """A seed at which the simulator finds the fault, the seconds it took, and the outcome; None if no world finds it.

    Args:
        fault: the fault.
        worlds: number of worlds to try.
        first_seed: the first seed to try; default: the one at which it was found when `SEEDS` was written, or 0.
    """
    began = time.monotonic()
    with injected(fault):
        first = found_before().get(fault.name, 0) if first_seed is None else first_seed
        for seed in range(first, first + worlds):
            outcome = run(random_scenario(seed, fault.theme), record=False)
            if outcome.error is not None:
                return seed, time.monotonic() - began, outcome
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.faults", description="Find every deliberate fault.")
    parser.add_argument("--worlds", type=int, default=WORLDS, help="to try for each fault (%(default)s)")
    parser.add_argument("--seed", type=int, help=f"the first seed; by default that of {SEEDS.name}")
    parser.add_argument(
        "--record", action="store_true", help=f"write the seeds into {SEEDS.name}, which spares the tests the search"
    )
    parser.add_argument("only", nargs="*", default=[""], help="parts of the names of the faults to try; all by default")
    options = parser.parse_args(arguments)
    missed, seeds = 0, found_before()
    for fault in (fault for fault in FAULTS if any(part in fault.name for part in options.only)):
        found = find(fault, options.worlds, options.seed)
        missed += found is None
        result = f"NOT FOUND in {options.worlds} worlds"
        if found is not None:
            seed, took, outcome = found
            text = str(outcome.error).replace("\n", " ")[:110]
            if run(random_scenario(seed, fault.theme), record=False).error is None:
                seeds[fault.name] = seed
                result = f"{took:.2f} s, seed {seed}: {type(outcome.error).__name__}: {text}"
            else:
                missed += 1
                result = f"NOT FOUND: seed {seed} breaks without the fault, too: {text}"
        print(f"{fault.name}: {result}", flush=True)
    if options.record:
        names = [fault.name for fault in FAULTS if fault.name in seeds]
        SEEDS.write_text(json.dumps({name: seeds[name] for name in names}, indent=0) + "\n", encoding="utf-8")
    print(f"{missed} not found" if missed else "all found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
