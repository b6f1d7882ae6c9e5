"""Which stage of a chain an error comes from, and which line of the user's code.

Stages of a chain share one query, and a user's function may have run in one of Spark's workers, whose traceback arrives as
text. It must not know tasks.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from linecache import getline

from dagster_checkpoints.pipeline import FunctionStage, Stage

_WORKER_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)


@dataclass(frozen=True)
class CodeLine:
    """A place in somebody's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}: {getline(self.file, self.line).strip()}"


def own_line(error: BaseException, inside: str | None) -> CodeLine | None:
    """Where an error was raised: the innermost frame in the file `inside`, here or in a worker; else the innermost here."""
    here = [CodeLine(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    in_worker = [CodeLine(m["file"], int(m["line"]), m["function"]) for m in _WORKER_FRAME.finditer(str(error))]
    for frames in (in_worker, here):
        within = [frame for frame in frames if frame.file == inside]
        if within:
            return within[-1]
    return here[-1] if here else None


def stage_of(error: BaseException, stages: Sequence[Stage]) -> Stage | None:
    """The stage within whose code an error was raised, if that can be told."""
    for stage in stages:
        found = own_line(error, stage.location.file)
        if found is not None and found.file == stage.location.file and _holds(stage, found.line):
            return stage
    return None


def _holds(stage: Stage, line: int) -> bool:
    code = stage.function if isinstance(stage, FunctionStage) else type(stage)
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return False
    return first <= line < first + len(lines)
