"""Deliberate faults: the core with one rule broken, which the simulator must find. `python -m simulation.faults` tries all.

Each fault replaces a method or two from outside, for as long as it is tried; none is in the code of the core.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from dagster_checkpoints.coordination import (
    AlignedBarrierHandler,
    BarrierReceived,
    BlockChannel,
    CheckpointCoordinator,
    CompletedCheckpoint,
    DiscardStates,
    FailureReason,
    JobRestarting,
    NotifyComplete,
    NotifySavepointComplete,
    TakeSnapshot,
    TaskLifecycle,
    TrackingBarrierHandler,
    TriggerTask,
    UnalignedBarrierHandler,
    WatermarkValve,
    WriteMetadata,
)
from dagster_checkpoints.coordination import lifecycle as life
from dagster_checkpoints.coordination.barriers.single import _SingleCheckpointHandler
from dagster_checkpoints.coordination.pending_checkpoints import PendingCheckpoints
from dagster_checkpoints.coordination.progress import TaskProgress
from dagster_checkpoints.coordination.retention import CompletedCheckpoints
from dagster_checkpoints.coordination.schedule import CheckpointSchedule
from dagster_checkpoints.execution import checkpoint_writing
from dagster_checkpoints.execution.ownership import OwnershipSteps
from dagster_checkpoints.execution.shared_files import SharedName, SharedNames
from dagster_checkpoints.execution.storage_steps import ReadState
from dagster_checkpoints.state import PartlyFinishedUnionState, redistribution, restore
from simulation import sinks
from simulation.run_faults import RUN_FAULTS, Patches
from simulation.running import Outcome, run
from simulation.scenario import random_scenario


@dataclass(frozen=True)
class Fault:
    """One rule broken: what is replaced by what; and the theme of the worlds to look in, if it takes too long in all of them."""

    name: str
    patches: Callable[[], Patches]
    theme: str = ""


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """The fault is in the core inside the block."""
    with ExitStack() as stack:
        for owner, name, broken in fault.patches():
            stack.enter_context(patch.object(owner, name, broken))
        yield


def _closed_channel_not_counted() -> Patches:
    def end(self: Any, channel: str) -> list[Any]:
        return []

    yield _SingleCheckpointHandler, "_end", end


def _first_notice_ends_the_task() -> Patches:
    completed = TaskLifecycle._completed

    def broken(self: Any, checkpoint_id: int) -> Any:
        if self._state is life.LifecycleState.WAITING_FOR_FINAL_CHECKPOINT and self._stop is None:
            self._final_completed = True
            self._awaited.clear()
        return completed(self, checkpoint_id)

    yield TaskLifecycle, "_completed", broken


def _savepoint_subsumed() -> Patches:
    complete = PendingCheckpoints.complete

    def broken(self: Any, checkpoint_id: int, location: str, now: float) -> Any:
        actions = complete(self, checkpoint_id, location, now)
        reason = FailureReason.CHECKPOINT_SUBSUMED
        return actions + self.abort_where(lambda other: other.checkpoint_id < checkpoint_id, reason, "subsumed")

    yield PendingCheckpoints, "complete", broken


def _plain_savepoint_commits() -> Patches:
    complete = PendingCheckpoints.complete

    def broken(self: Any, *arguments: Any) -> Any:
        actions = complete(self, *arguments)
        return [NotifyComplete(a.tasks, a.checkpoint_id) if isinstance(a, NotifySavepointComplete) else a for a in actions]

    yield PendingCheckpoints, "complete", broken


def _no_pause_on_suspend() -> Patches:
    taken = TaskLifecycle._snapshot_taken

    def broken(self: Any, event: Any) -> Any:
        actions = taken(self, event)
        self._paused = False
        return [action for action in actions if not isinstance(action, life.PauseOperators)]

    yield TaskLifecycle, "_snapshot_taken", broken


def _ids_begin_again() -> Patches:
    begin = CheckpointCoordinator.__init__

    def broken(self: Any, *arguments: Any, next_checkpoint_id: int = 1, **named: Any) -> None:
        begin(self, *arguments, next_checkpoint_id=1, **named)

    yield CheckpointCoordinator, "__init__", broken


def _no_fencing() -> Patches:
    def broken(self: Any, token: str) -> Any:
        found = yield ReadState()
        self._version = found.version  # the next round replaces what another owner has written
        return False

    yield OwnershipSteps, "_adopt", broken


def _newest_not_retained() -> Patches:
    add = CompletedCheckpoints.add

    def broken(self: Any, checkpoint: CompletedCheckpoint) -> list[CompletedCheckpoint]:
        given_up = add(self, checkpoint)
        if given_up:
            self._checkpoints.remove(checkpoint)
            self._checkpoints.append(given_up[-1])
            return [*given_up[:-1], checkpoint]
        return given_up

    yield CompletedCheckpoints, "add", broken


def _unknown_outcome_discards() -> Patches:
    failed = PendingCheckpoints.finalize_failed

    def broken(self: Any, *arguments: Any, discard: bool) -> Any:
        return failed(self, *arguments, discard=True)

    yield PendingCheckpoints, "finalize_failed", broken


def _no_final_checkpoint() -> Patches:
    observe = CheckpointSchedule._observe

    def broken(self: Any, tasks: TaskProgress, now: float) -> None:
        observe(self, tasks, now)
        self._final_wanted = False

    yield CheckpointSchedule, "_observe", broken


def _ended_channel_holds_event_time_back() -> Patches:
    def broken(self: Any, channel: str, drain: bool) -> int | None:
        return None

    yield WatermarkValve, "end", broken


def _partly_finished_union_accepted() -> Patches:
    yield checkpoint_writing, "check_union_states", lambda metadata: None


def _union_lets_some_go() -> Patches:
    def broken(metadata: Any) -> None:
        partly = {s.name for s in metadata.stages if s.finished and not s.fully_finished}
        for chain in metadata.chains:
            for task in chain.tasks.values():
                for name, snapshot in task.stages.items():
                    if snapshot.operator_states and name in partly:
                        raise PartlyFinishedUnionState

    yield checkpoint_writing, "check_union_states", broken


def _finished_tasks_forgotten() -> Patches:
    restart = CheckpointCoordinator._restart

    def broken(self: Any, finished: Any, restored: Any) -> Any:
        return restart(self, frozenset(), restored)

    yield CheckpointCoordinator, "_restart", broken


def _watermark_goes_back() -> Patches:
    restore = WatermarkValve.restore

    def broken(self: Any, state: Any) -> Any:
        result = restore(self, state)
        self._output -= 1_000
        return result

    yield WatermarkValve, "restore", broken


def _aligned_channel_not_blocked() -> Patches:
    handle = AlignedBarrierHandler.handle

    def broken(self: Any, event: Any) -> Any:
        return [action for action in handle(self, event) if not isinstance(action, BlockChannel)]

    yield AlignedBarrierHandler, "handle", broken


def _tracking_takes_the_first_barrier() -> Patches:
    handle = TrackingBarrierHandler.handle

    def broken(self: Any, event: Any) -> Any:
        if isinstance(event, BarrierReceived) and event.barrier.checkpoint_id > self._last_completed:
            self._last_completed = event.barrier.checkpoint_id
            return [TakeSnapshot(event.barrier)]
        return handle(self, event)

    yield TrackingBarrierHandler, "handle", broken


def _in_flight_data_lost() -> Patches:
    captured = UnalignedBarrierHandler._captured

    def broken(self: Any, pending: Any, channels: Any) -> Any:
        return captured(self, pending, set(self._channels.all) if pending.in_flight else channels)

    yield _SingleCheckpointHandler, "_captured", broken


def _list_remainder_lost() -> Patches:
    lists = redistribution.redistribute_lists

    def broken(instances: Sequence[Any], parallelism: int) -> Any:
        shares = lists(instances, parallelism)
        if parallelism != len(instances):
            size = min((len(share.get("held", ())) for share in shares), default=0)
            return [{name: items[:size] if name == "held" else items for name, items in share.items()} for share in shares]
        return shares

    yield redistribution, "redistribute_lists", broken


def _key_groups_stay_where_they_were() -> Patches:
    def broken(instances: Sequence[Any], parallelism: int, groups: int) -> Any:
        return [dict(instances[i] or {}) if i < len(instances) else {} for i in range(parallelism)]

    yield redistribution, "redistribute_key_groups", broken


def _roots_not_triggered() -> Patches:
    trigger = PendingCheckpoints.trigger

    def broken(self: Any, *arguments: Any) -> Any:
        return [a for a in trigger(self, *arguments) if not isinstance(a, TriggerTask) or a.task.index == 0]

    yield PendingCheckpoints, "trigger", broken


def _restart_while_finalizing() -> Patches:
    handle = CheckpointCoordinator._handle

    def broken(self: Any, event: Any, now: float) -> Any:
        if isinstance(event, JobRestarting):
            self._pending._finalizing = None
        return handle(self, event, now)

    yield CheckpointCoordinator, "finalizing", property(lambda self: None)
    yield CheckpointCoordinator, "_handle", broken


def _abort_does_not_resume() -> Patches:
    aborted = TaskLifecycle._aborted

    def broken(self: Any, checkpoint_id: int) -> Any:
        if checkpoint_id == self._stop and self._paused:
            return []
        return aborted(self, checkpoint_id)

    yield TaskLifecycle, "_aborted", broken


def _half_an_upload_stays() -> Patches:
    abort = PendingCheckpoints._abort

    def broken(self: Any, *arguments: Any, **named: Any) -> Any:
        return [a for a in abort(self, *arguments, **named) if not isinstance(a, DiscardStates) or a.states]

    yield PendingCheckpoints, "_abort", broken


def _new_channel_left_out() -> Patches:
    restore = WatermarkValve.restore

    def broken(self: Any, state: Any) -> Any:
        restored = restore(self, state)
        for channel in self._channels.values():
            channel.aligned = channel.aligned and channel.watermark >= self._output
        return restored

    yield WatermarkValve, "restore", broken


def _older_completes_after_unknown_outcome() -> Patches:
    subsume = PendingCheckpoints._subsume_older

    def broken(self: Any, checkpoint_id: int, message: str) -> Any:
        return [] if "may have" in message else subsume(self, checkpoint_id, message)

    yield PendingCheckpoints, "_subsume_older", broken


def _ended_predecessor_refused() -> Patches:
    yield restore, "_ended", lambda metadata, recorded: {name: len(stage.finished) for name, stage in recorded.items()}


def _name_without_owner() -> Patches:
    yield SharedNames, "own", lambda self, sha256: SharedName(sha256, 0)


def _older_owner_aborts() -> Patches:
    yield sinks, "stages_for_newer_owner", lambda epoch, staged_by: False


def _enumerators_forgotten() -> Patches:
    yield restore, "_enumerators", lambda metadata, instances: {}


def _broadcast_of_the_first_only() -> Patches:
    yield redistribution, "redistribute_broadcasts", lambda instances, parallelism: [dict(instances[0] or {})] * parallelism


def _notice_before_the_store_names_it() -> Patches:
    finalize = PendingCheckpoints._finalize_next

    def broken(self: Any) -> Any:
        actions = finalize(self)
        begun = [a.checkpoint for a in actions if isinstance(a, WriteMetadata)]
        return [*(NotifyComplete(frozenset(c.plan.commit), c.checkpoint_id) for c in begun), *actions]

    yield PendingCheckpoints, "_finalize_next", broken


def _late_acknowledgement_discards() -> Patches:
    late = PendingCheckpoints._late

    def broken(self: Any, event: Any) -> Any:
        with patch.multiple(self, _stored_ids=set()):
            return late(self, event)

    yield PendingCheckpoints, "_late", broken


FAULTS = (
    Fault("a closed channel is not counted", _closed_channel_not_counted),
    Fault("the first notice after the end lets a task go, though triggered before it", _first_notice_ends_the_task),
    Fault("a savepoint is subsumed", _savepoint_subsumed),
    Fault("a plain savepoint commits", _plain_savepoint_commits),
    Fault("a suspend does not pause", _no_pause_on_suspend),
    Fault("ids begin again after a restore", _ids_begin_again),
    Fault("completion is not fenced", _no_fencing),
    Fault("retention gives the newest up", _newest_not_retained),
    Fault("an unknown outcome discards", _unknown_outcome_discards),
    Fault("no final checkpoint", _no_final_checkpoint),
    Fault("an ended channel holds event time back", _ended_channel_holds_event_time_back, "rescaling"),
    Fault("union state of a partly finished stage is accepted", _partly_finished_union_accepted),
    Fault("a checkpoint lets some instances with union state go", _union_lets_some_go),
    Fault("finished tasks are forgotten in a restart", _finished_tasks_forgotten),
    Fault("event time goes back in a restore", _watermark_goes_back),
    Fault("an aligned channel is not blocked", _aligned_channel_not_blocked),
    Fault("at-least-once takes the first barrier for all", _tracking_takes_the_first_barrier),
    Fault("an unaligned snapshot does not wait for what is in flight", _in_flight_data_lost),
    Fault("list state loses the remainder of an uneven split", _list_remainder_lost),
    Fault("key groups stay where they were", _key_groups_stay_where_they_were),
    Fault("only the first instance of a root is triggered", _roots_not_triggered),
    Fault("a restart does not wait for what is being finalized", _restart_while_finalizing),
    Fault("a failed suspend does not let its tasks go on", _abort_does_not_resume),
    Fault("a file's name does not say who stored it", _name_without_owner, "going back"),
    Fault("an older owner aborts what a newer one has staged", _older_owner_aborts, "going back"),
    Fault("the enumerator's splits are forgotten in a restore", _enumerators_forgotten),
    Fault("broadcast state is that of the first instance, whoever has it", _broadcast_of_the_first_only),
    Fault("tasks are told before the store names the checkpoint", _notice_before_the_store_names_it),
    *(Fault(name, patches) for name, patches in RUN_FAULTS),
    # These the simulator has found in the core itself.
    Fault("half an upload stays when nobody had acknowledged", _half_an_upload_stays),
    Fault("a new channel is left out after a second restore", _new_channel_left_out),
    Fault("an older checkpoint completes after an unknown outcome", _older_completes_after_unknown_outcome, "storage"),
    Fault("an acknowledgement that comes late discards a completed checkpoint", _late_acknowledgement_discards),
    Fault("a finished stage behind one at its end of data cannot be restored", _ended_predecessor_refused),
)


def find(fault: Fault, seconds: float, first_seed: int = 0) -> tuple[int, float, Outcome] | None:
    """The first seed at which the simulator finds the fault, the seconds it took, and what it found."""
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
    parser.add_argument("--seed", type=int, default=0, help="the first (%(default)s)")
    parser.add_argument("only", nargs="*", help="parts of names")
    options = parser.parse_args(arguments)
    missed = 0
    for fault in FAULTS:
        if options.only and not any(part in fault.name for part in options.only):
            continue
        found = find(fault, options.seconds, options.seed)
        if found is None:
            missed += 1
            print(f"{fault.name}: NOT FOUND in {options.seconds:g} s", flush=True)
        else:
            seed, took, outcome = found
            text = str(outcome.error).replace("\n", " ")[:110]
            print(f"{fault.name}: {took:.2f} s, seed {seed}: {type(outcome.error).__name__}: {text}", flush=True)
    print(f"{missed} not found" if missed else "all found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
