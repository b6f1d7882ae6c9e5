"""A ParquetSink's directory: which stage owns it, and whether a new job may write to it.

::

    <path>/.sink.json    the pipeline and the stage that write here, and the history of the storage that counted their jobs first

Must not know the staged rows, nor how rows are committed.
"""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

from dagster_checkpoints.sinks.base import AtNewStart, SinkContext
from dagster_checkpoints.sinks.parquet.taken_back import COMMITTED
from dagster_checkpoints.sinks.stage_mark import StageMark, encoded, mark_of, read_mark
from dagster_checkpoints.systems.errors import InvalidSinkPath, SinkHoldsEarlierRows, SinkPathInUse, few

_MARKER = ".sink.json"


def claim(path: Path, context: SinkContext) -> str:
    """Mark the directory as the stage's, or check that it is marked so.

    Returns:
        The job's name in the names of committed directories.

    Raises:
        SinkPathInUse: the directory belongs to another stage or pipeline.
    """
    marker = mark_of(context)
    file = path / _MARKER
    temporary = path / f"{_MARKER}-{uuid4().hex}"
    temporary.write_bytes(encoded(marker))
    try:
        os.link(temporary, file)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not file.exists():
            os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return _job_name(_read(path, context) or marker, context)


def check_new_start(path: Path, at_new_start: AtNewStart, context: SinkContext) -> None:
    """Check whether a new job may write to the directory; changes nothing. See ``ParquetSink.check_new_start``."""
    where = f"Stage {context.stage!r} of pipeline {context.pipeline!r}"
    if not path.exists():
        return
    if not path.is_dir():
        raise InvalidSinkPath(f"{where}: expected {path} to be a directory or not to exist, found a file. Choose another path")
    marker = _read(path, context)
    visible = sorted(entry.name for entry in path.iterdir() if entry.name[0] not in "._")
    committed = {name: match[2] for name in visible if (match := COMMITTED.fullmatch(name))}
    own = {name for name, job in committed.items() if marker is not None and job == _job_name(marker, context)}
    if own:
        raise SinkPathInUse(
            f"{where}: this run begins job {context.job_id}, and expected no rows of a job of that number in {path}, found "
            f"{few(own)}. The checkpoint storage counts its jobs from 1 again: was it emptied or exchanged? Rows of two jobs "
            "with one number cannot be distinguished: give the sink another path, or move these directories away"
        )
    foreign = [name for name in visible if name not in committed]
    if foreign and at_new_start != "keep":
        raise SinkPathInUse(
            f"{where}: expected {path} to be empty or to hold rows that a ParquetSink has committed, found {len(foreign)} other "
            f"file(s) or directories ({few(foreign)}). Readers of the directory would take them for rows of the stage, and the "
            "sink never removes files that it has not written. Give the sink a separate directory, or move these away; if they "
            "belong there, choose at_new_start='keep'"
        )
    if committed and at_new_start == "refuse":
        jobs = sorted(set(committed.values()))
        raise SinkHoldsEarlierRows(
            f"{where}: this run is a new start, and expected no rows of an earlier job in {path}, found {len(committed)} "
            f"directories that job {', '.join(jobs)} has committed ({few(committed)}). Nothing was started. "
            "ParquetSink(at_new_start=...) says what a new start does with them: 'refuse' (the default) stops the run; 'keep' "
            "leaves them and adds the new job's rows, so input that both jobs read gives its rows twice; 'replace' removes them "
            "when the new job begins. Choose 'keep' or 'replace', or another path, or move the rows away; or continue the "
            "earlier job from one of its savepoints or checkpoints (restore_from), which is not a new start"
        )


def check_owner(path: Path, context: SinkContext) -> None:
    """Check that the directory belongs to the stage, or to none yet; changes nothing.

    Raises:
        SinkPathInUse: it belongs to another stage or pipeline.
    """
    _read(path, context)


def _read(path: Path, context: SinkContext) -> StageMark | None:
    """The directory's marker file, if it names the stage; None if the directory has no marker."""
    file = path / _MARKER
    try:
        return read_mark(file.read_bytes(), context, path, file)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _job_name(claimed: StageMark, context: SinkContext) -> str:
    # Each checkpoint storage counts its jobs from 1.
    own = claimed.history in ("", context.history)
    return str(context.job_id) if own else f"{context.job_id}.{context.history}"
