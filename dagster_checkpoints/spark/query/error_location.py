"""The location of an error: the stage of a chain, and the line of the user's code.

Stages of a chain share one query, and a user's function may have run in one of Spark's workers, whose traceback arrives as
text. Must not know tasks.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from linecache import getline

from dagster_checkpoints.own_code import own_frames
from dagster_checkpoints.pipeline import FunctionSplitSource, FunctionStage, Stage
from dagster_checkpoints.spark.query.error_text import QueryFilesError, text_of_error

_WORKER_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)


@dataclass(frozen=True)
class CodeLine:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}: {getline(self.file, self.line).strip()}"


def own_line(error: BaseException, inside: str | None) -> CodeLine | None:
    """The line that raised an error.

    Args:
        inside: The user's file: the innermost frame in this file is returned, a worker's frame before a frame of this process.

    Returns:
        Without a frame in that file, the innermost frame of this process that is neither in Python's own code, nor in an
        installed package, nor in this one; None if there is none.
    """
    in_driver = [CodeLine(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    in_worker = [CodeLine(m["file"], int(m["line"]), m["function"]) for m in _WORKER_FRAME.finditer(str(error))]
    for frames in (in_worker, in_driver):
        within = [frame for frame in frames if frame.file == inside]
        if within:
            return within[-1]
    own = own_frames(error)
    return CodeLine(own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else None


def located(error: BaseException, stage: Stage, advice: str = "") -> str:
    """The text of an error that a stage's code raised: the user's line first, then advice, then the error's own text.

    Args:
        error: The error.
        stage: The stage; without a line of the user's, the text names the line of its definition.
        advice: What to do; empty if that is not known.
    """
    if isinstance(error, QueryFilesError):
        return f"because {error}"
    line = own_line(error, stage.location.file)
    where = f"at {line}" if line is not None else f"in the stage that {stage.location} defines"
    return "\n".join(filter(None, (where, advice, text_of_error(error))))


def stage_of(error: BaseException, stages: Sequence[Stage]) -> Stage | None:
    """The stage whose code raised an error; None if that is not known."""
    for stage in stages:
        line = own_line(error, stage.location.file)
        if line is not None and line.file == stage.location.file and _contains(stage, line.line):
            return stage
    return None


def _contains(stage: Stage, line: int) -> bool:
    code = stage.function if isinstance(stage, FunctionStage | FunctionSplitSource) else type(stage)
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return False
    return first <= line < first + len(lines)
