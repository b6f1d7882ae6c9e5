"""The jobs of a stage that have rows in a lake table. Rows of other writers do not count."""

from __future__ import annotations

from collections import defaultdict

from dagster_checkpoints.sinks.engine import SinkScope
from dagster_checkpoints.sinks.lake.ledger import committed_of, read_job
from dagster_checkpoints.sinks.lake.names import InstanceNames, TransactionName, origin_of, pipeline_folder, transactions_in
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, TableLog
from dagster_checkpoints.sinks.ledger import JobLedger

JobOfInstance = tuple[InstanceNames, str]
"""An instance of the stage, and a job."""


def visible_rows(log: TableLog, scope: SinkScope, *, by_key: bool) -> dict[JobOfInstance, list[TransactionName]]:
    """The transactions of the stage whose rows readers see, of all its instances and jobs.

    Args:
        log: the table, as it was read last.
        scope: an instance of the stage.
        by_key: whether rows replace others by key: then a restore has taken nothing back.
    """
    found: dict[JobOfInstance, list[TransactionName]] = defaultdict(list)
    ledgers: dict[JobOfInstance, JobLedger] = {}
    for name in committed_of(transactions_of(log, scope), log.number):
        of = (name.instance, name.job)
        ledger = ledgers.get(of) or ledgers.setdefault(of, read_job(*of, log.number))
        if (by_key and ledger.shown is None) or ledger.sees(name.checkpoint_id):
            found[of].append(name)
    return found


def transactions_of(log: TableLog, scope: SinkScope) -> list[TransactionName]:
    """The transactions whose files exist, of all instances and jobs of the stage."""
    found = transactions_in(log.files.sizes(pipeline_folder(scope.pipeline)))
    return [name for name in found if name.instance.stage == scope.stage]


def files_of_other_jobs(log: TableLog, scope: SinkScope) -> tuple[list[ActiveFile], list[str]]:
    """In a table where rows replace others by key: the files with rows of the stage's other jobs only, and those that may hold
    rows of other programs.

    The transactions do not tell in which files these rows are, since files have been rewritten; the names of the files do.
    """
    files = [(file, origin_of(file.path, scope.pipeline, scope.stage)) for file in log.active()]
    return [file for file, job in files if job not in (None, scope.job)], [file.path for file, job in files if job is None]
