"""A new start, not a restore: files that earlier jobs have committed to the location, and files of other programs."""

from __future__ import annotations

from itertools import islice

from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.files.columns import read_columns
from dagster_checkpoints.sinks.files.names import (
    COLUMNS,
    MANIFESTS,
    OWN,
    commit_of_part,
    commits_folder,
    job_of,
    parse_commit,
    taken_back_folder,
    timelines_folder,
)
from dagster_checkpoints.sinks.files.target_files import TargetFiles
from dagster_checkpoints.systems.errors import SinkHoldsEarlierRows, SinkPathInUse, few

_NAMED = 4


def check_new_start(files: TargetFiles, context: SinkContext, at_new_start: AtNewStart) -> None:
    """Check whether a new job may write to the location; see ``FileSink.check_new_start``."""
    where = f"Stage {context.stage!r} of pipeline {context.pipeline!r}"
    jobs = {job for index in _indices(files) for job in _jobs(files, index)}
    if job_of(context) in jobs:
        raise SinkPathInUse(
            f"{where}: this run begins job {context.job_id}, and expected no rows of a job of that number in {files.place}, "
            "found some. The checkpoint storage counts its jobs from 1 again: was it emptied or exchanged? Rows of two jobs with "
            "one number cannot be distinguished: give the sink another location"
        )
    if jobs and at_new_start == "refuse":
        raise SinkHoldsEarlierRows(
            f"{where}: this run is a new start, and expected no rows of an earlier job in {files.place}, found files that job "
            f"{', '.join(sorted(jobs))} has committed. Nothing was started. FileSink(at_new_start=...) says what a new start "
            "does with them: 'refuse' (the default) stops the run; 'keep' leaves them and adds the new job's rows, so input that "
            "both jobs read gives its rows twice; 'replace' removes them when the new job begins. Choose 'keep' or 'replace', or "
            "another location; or continue the earlier job from one of its savepoints or checkpoints (restore_from), which is "
            "not a new start"
        )
    if at_new_start == "keep":
        return
    foreign = list(islice((name for name, _ in files.sizes("") if _is_foreign(name)), _NAMED))
    if foreign:
        raise SinkPathInUse(
            f"{where}: expected {files.place} to be empty or to hold files that a FileSink has committed, found other files "
            f"({few(foreign)}). Readers would take them for rows of the stage, and the sink never removes files that it has not "
            "written. Give the sink a separate location, or move these away; if they belong there, choose at_new_start='keep'"
        )


def remove_earlier_jobs(files: TargetFiles, context: SinkContext) -> None:
    """Remove the files of earlier jobs: each instance those of its index, the first also those of indices that no longer exist.

    Several instances may do this at the same time, and again after a crash: what says that there are files goes last.
    """
    own = job_of(context)
    indices = [index for index in _indices(files) if _is_mine(index, context)]
    earlier = [commit for index in indices for commit in files.names(f"{commits_folder(index)}/") if _job(commit) != own]
    if earlier:
        for names in (files.names(f"{MANIFESTS}/"), filter(_is_visible_name, files.names(""))):
            files.delete(name for name in names if _is_of_earlier_job(name, context))
    for index in indices:
        files.delete(name for name in files.names(f"{taken_back_folder(index)}/") if _job(name.rpartition("/")[0]) != own)
        files.delete(name for name in files.names(f"{timelines_folder(index)}/") if name.rpartition("/")[2] != own)
    columns = read_columns(files)
    if columns is not None and columns.job != own:
        files.delete([COLUMNS])
    files.delete(earlier)


def _is_of_earlier_job(name: str, context: SinkContext) -> bool:
    commit = commit_of_part(name) or parse_commit(name.rpartition("/")[2].removesuffix(".manifest"))
    return commit is not None and _is_mine(commit.index, context) and commit.job != job_of(context)


def _is_mine(index: int, context: SinkContext) -> bool:
    return index == context.index or (context.index == 0 and index >= context.parallelism)


def _is_foreign(name: str) -> bool:
    return _is_visible_name(name) and commit_of_part(name) is None


def _is_visible_name(name: str) -> bool:
    """Whether readers of the location take a file for rows."""
    return not any(part[0] in "._" and "=" not in part for part in name.split("/"))


def _indices(files: TargetFiles) -> list[int]:
    """The indices of the instances that have written to the location."""
    return sorted(int(name) for name in files.folders(f"{OWN}/") if name.isdigit())


def _jobs(files: TargetFiles, index: int) -> list[str]:
    return files.folders(f"{commits_folder(index)}/")


def _job(commit: str) -> str | None:
    name = parse_commit(commit.rpartition("/")[2])
    return None if name is None else name.job
