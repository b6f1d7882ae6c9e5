"""Deliberate faults of the life of a sink: of its steps, and of the values that they decide by."""

from __future__ import annotations

from dagster_checkpoints.execution import state_changes
from dagster_checkpoints.sinks.branches import Branches
from dagster_checkpoints.sinks.engine import SinkLife
from dagster_checkpoints.sinks.ledger import JobLedger, SinkOwner
from simulation.injection import Fault

SINK_FAULTS = (
    Fault(
        "an older owner aborts what a newer one has staged",
        SinkOwner.is_replaced_by,
        "other.epoch > self.epoch",
        "False",
        "going back",  # the theme of whole pipelines that find it, too
    ),
    Fault(
        "an older owner's changes are not refused",
        SinkLife.check_owner,
        "self._scope.owner.is_replaced_by(ledger.owner)",
        "False",
    ),
    Fault(
        "a new start that was suspended removes what a newer owner has kept",
        SinkLife._remove_other_jobs,
        '(yield Op("read_ledger")) != ledger',
        "False",
    ),
    Fault("a transaction is published a second time", SinkLife.commit, "not job.is_committed(commit.checkpoint)", "True"),
    Fault("the last commit of a branch counts as not made", JobLedger.is_committed, ">= checkpoint", "> checkpoint"),
    Fault(
        "commits of all branches count as one branch's",
        JobLedger.is_committed,
        "self.branches.branch_of(checkpoint)",
        "max(self.newest, default=0)",
    ),
    Fault("rows of later checkpoints stay visible", SinkLife._settle, "hide=tuple(sorted(seen - on_the_way))", "hide=()"),
    Fault("rows are not shown again", SinkLife._settle, "show=tuple(sorted(on_the_way - seen))", "show=()"),
    Fault("the ledger does not say which rows readers see", JobLedger.showing, "shown=restored", "shown=None"),
    Fault("the ledger says for ever which rows readers see", JobLedger.begun, ", shown=None", ""),
    Fault(
        "the first checkpoint after a restore is not recorded",
        SinkLife.begin,
        "origin is not None and checkpoint_id > origin",
        "False",
    ),
    Fault(
        "a job goes on from its beginning instead of the restored checkpoint",
        SinkLife.recover,
        "(yield from self._beginning()) if restored is None else restored",
        "yield from self._beginning()",
    ),
    Fault(
        "a branch is begun where the one before began",
        Branches.begun,
        "Branch(restored, first)",
        "Branch(0, first)",
    ),
    Fault(
        "other transactions are discarded before the checkpoint's are committed",
        SinkLife.recover,
        "    for staged in transactions:\n",
        "    yield from self._discard_rest()\n    for staged in transactions:\n",
    ),
    Fault(
        "a table without the rows that were committed is taken for the instance's own",
        SinkLife.check_owner,
        "known is not None and not",
        "False and not",
    ),
    Fault("the transactions of earlier attempts are left", SinkLife._discard_rest, "if rest:", "if False:"),
    Fault("rows move before the change is recorded", SinkLife._change, 'yield Op("put_ledger", (begun,))', "pass"),
    Fault(
        "a change that was interrupted is not completed",
        SinkLife._change,
        "if ledger.unfinished is not None:",
        "if False:",
    ),
    Fault(
        "a change counts as made when its rows begin to move",
        SinkLife._change,
        "begun = msgspec.structs.replace(ledger, unfinished=unfinished)",
        "begun = msgspec.structs.replace(change.ledger, unfinished=None)",
    ),
    Fault(
        "a completed change is not recorded",
        SinkLife._finish,
        "ledger.with_job(unfinished.job, unfinished.after)",
        "ledger",
    ),
    Fault("an owner that is replaced between two moves of rows goes on", SinkLife._finish, "if number:", "if False:"),
    Fault(
        "rows of a commit stay as they are although a restore moves them, since their record was deleted",
        SinkLife._check_listed,
        "    if moved:",
        "    if False:",
    ),
    Fault(
        "deleted records are looked for only if the newest commit moves",
        SinkLife._check_listed,
        "(restored, *job.ends)",
        "(restored, *job.newest.values())",
    ),
    Fault(
        "in a table of newest rows by key anything is restored",
        SinkLife._settle,
        "check_not_overwritten(job.branches, restored, order, self._sink)",
        "pass",
    ),
    # What storage says of the checkpoints behind the one that a run goes back to
    Fault(
        "a checkpoint that was passed over is restored after its transactions were discarded",
        state_changes.completed,
        "old.checkpoint_id > newest",
        "False",
    ),
    Fault(
        "rows that were taken back are missing when the latest checkpoint is restored after all",
        state_changes.begun,
        "resume and restored.checkpoint_id < state.highest_checkpoint_id",
        "False",
    ),
)
