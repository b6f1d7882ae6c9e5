"""A new start, not a restore: rows that earlier jobs of the stage have committed to the table.

Rows of other writers do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.lake.ledger import committed_of, describe, read_ledger
from dagster_checkpoints.sinks.lake.names import (
    InstanceNames,
    TransactionName,
    job_name,
    origin_of,
    pipeline_folder,
    transactions_in,
)
from dagster_checkpoints.sinks.lake.rewritable_log import RewritableLog
from dagster_checkpoints.sinks.lake.table_log import ActiveFile, LakeChange, TableLog
from dagster_checkpoints.sinks.lake.timelines import Timelines
from dagster_checkpoints.systems.errors import SinkCannotTakeBack, SinkHoldsEarlierRows, SinkPathInUse, few


def check_new_start(log: TableLog, context: SinkContext, at_new_start: AtNewStart, *, by_key: bool, sink: str) -> None:
    """Check whether a new job may write to the table; see ``LakeSink.check_new_start``.

    Args:
        log: the table, which exists.
        context: an instance of the new job.
        at_new_start: what the new start does with rows of earlier jobs.
        by_key: whether rows replace others by key.
        sink: the sink as errors name it.
    """
    where = f"Stage {context.stage!r} of pipeline {context.pipeline!r}"
    visible = _with_visible_rows(log, context, by_key=by_key)
    if job_name(context) in {job for _, job in visible}:
        raise SinkPathInUse(
            f"{where}: this run begins job {context.job_id}, and expected no rows of a job of that number in {sink}, found "
            "some. The checkpoint storage counts its jobs from 1 again: was it emptied or exchanged? Rows of two jobs with one "
            "number cannot be distinguished: give the sink another table"
        )
    if visible and at_new_start == "refuse":
        jobs = sorted({job for _, job in visible})
        raise SinkHoldsEarlierRows(
            f"{where}: this run is a new start, and expected no rows of an earlier job of this stage in {sink}, found rows of "
            f"job {', '.join(jobs)}. Nothing was started. {log.format.sink}(at_new_start=...) says what a new start does with "
            "them: 'refuse' (the default) stops the run; 'keep' leaves them and adds the new job's rows, so input that both "
            "jobs read gives its rows twice, unless rows replace others; 'replace' removes them when the new job begins. Choose "
            "'keep' or 'replace', or another table; or continue the earlier job from one of its savepoints or checkpoints "
            "(restore_from), which is not a new start"
        )
    if visible and at_new_start == "replace" and by_key:
        _files_of_earlier_jobs(log, context, sink)


def remove_earlier_jobs(log: TableLog, context: SinkContext, timelines: Timelines) -> None:
    """Remove the rows of earlier jobs: each instance those of its index, the first also those of indices that no longer exist."""
    log.refresh()
    jobs: dict[tuple[InstanceNames, str], list[TransactionName]] = defaultdict(list)
    for name in _of_stage(log, context):
        mine = name.instance.index == context.index or (context.index == 0 and name.instance.index >= context.parallelism)
        if mine and name.job != job_name(context):
            jobs[name.instance, name.job].append(name)
    for (instance, job), names in jobs.items():
        timelines.settle(instance, job, 0, names)


def remove_rows_of_earlier_jobs(log: TableLog, context: SinkContext, owner: Callable[[], dict[str, int]], sink: str) -> None:
    """Remove the rows of earlier jobs from a table in which rows replace others by key: of all instances, in one commit.

    The transactions do not tell in which files these rows are, since files have been rewritten; the names of the files do.

    Args:
        log: the table, which exists.
        context: the instance.
        owner: returns the numbers that a commit records; raises if this owner must change nothing.
        sink: the sink as errors name it.

    Raises:
        SinkCannotTakeBack: another program may have rewritten some of the rows.
    """

    def plan() -> LakeChange | None:
        numbers = owner()
        earlier = [(instance, job) for instance, job in _with_visible_rows(log, context, by_key=True) if job != job_name(context)]
        if not earlier:
            return None
        for instance, job in earlier:
            numbers |= read_ledger(instance, job, log.number).showing(0)
        files = _files_of_earlier_jobs(log, context, sink)
        note = {"pipeline": context.pipeline, "stage": context.stage, **describe(numbers)}
        return LakeChange(remove=files, numbers=numbers, note=note, read_rows=True)

    log.commit(plan)


def _files_of_earlier_jobs(log: TableLog, context: SinkContext, sink: str) -> list[ActiveFile]:
    assert isinstance(log, RewritableLog)
    files = [(file, origin_of(file.path, context.pipeline, context.stage)) for file in log.active()]
    others = [file.path for file, job in files if job is None]
    if others:
        raise SinkCannotTakeBack(
            f"{sink}: this run is a new start with at_new_start='replace', and expected a table with rows of stage "
            f"{context.stage!r} only, found {len(others)} files that another program has written ({few(others)}): they may hold "
            f"rows of earlier jobs, if that program has rewritten the table ({log.format.rewriting}), or rows of its own. "
            "Nothing was changed. "
            "Choose at_new_start='keep', which replaces rows by key; or delete the rows yourself; or write to another table"
        )
    return [file for file, job in files if job != job_name(context)]


def check_continued_job(log: TableLog, context: SinkContext, sink: str) -> None:
    """Check that a job that continues a savepoint of another job finds none of its rows, if rows replace partitions.

    Raises:
        SinkCannotTakeBack: it finds some.
    """
    log.refresh()
    jobs = {job for _, job in _with_visible_rows(log, context, by_key=False)} - {job_name(context)}
    if jobs:
        raise SinkCannotTakeBack(
            f"{sink}: job {context.job_id} continues from a savepoint of another job, and its rows replace those of their "
            f"partitions; expected no rows of stage {context.stage!r} in the table, found rows of job "
            f"{', '.join(sorted(jobs))}: the savepoint does not say which of them belong to it. Give the sink another table; or "
            "begin a new job that writes all rows again"
        )


def _with_visible_rows(log: TableLog, context: SinkContext, *, by_key: bool) -> list[tuple[InstanceNames, str]]:
    """The instances and jobs of the stage whose rows readers see.

    Args:
        log: the table.
        context: an instance of the stage.
        by_key: whether rows replace others by key: then a restore has taken nothing back.
    """
    return sorted(
        {(name.instance, name.job) for name in _of_stage(log, context) if _is_visible(log, name, by_key)},
        key=lambda found: (found[1], found[0].index),
    )


def _of_stage(log: TableLog, context: SinkContext) -> list[TransactionName]:
    found = transactions_in(log.files.sizes(pipeline_folder(context.pipeline)))
    return committed_of([name for name in found if name.instance.stage == context.stage], log.number)


def _is_visible(log: TableLog, name: TransactionName, by_key: bool) -> bool:
    ledger = read_ledger(name.instance, name.job, log.number)
    return (by_key and ledger.visible is None) or ledger.sees(name.checkpoint_id)
