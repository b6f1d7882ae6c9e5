"""The code version of a stage: a hash of its source code and settings, as far as they are known without Spark.

It must not know Dagster, and must not run code of the stage.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from contextlib import suppress
from typing import Any

from dagster_checkpoints.pipeline import FunctionSplitSource, SplitSource, Stage
from dagster_checkpoints.pipeline.decorators import FunctionStage

_LENGTH = 16


def code_version(stage: Stage) -> str | None:
    """A hash of a stage's code and settings; None if its source code cannot be read, as that of an interactive session.

    Comments, line breaks and the code that the stage calls do not count. Neither do the settings of its sink, which differ
    between machines: of the sink only the class counts. Another version of Python may give another hash.

    Args:
        stage: The stage.
    """
    sources = [_source(code) for code in _code_of(stage)]
    if None in sources:
        return None
    settings = (
        stage.kind.value,
        stage.instances,
        sorted(stage.inputs.items()),
        stage.watermark,
        stage.event_time,
        stage.output_mode,
        f"{type(stage.sink).__module__}.{type(stage.sink).__qualname__}",
    )
    known: tuple[object, ...] = (sources, settings)
    if stage.quarantine is not None:  # the source code of a function that is a condition is that of the stage's definition
        known += ([condition for condition in stage.quarantine.conditions.items() if isinstance(condition[1], str)],)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:_LENGTH]


def _code_of(stage: Stage) -> list[Any]:
    """The user's function, or the user's classes."""
    if stage.takes_refused_rows:
        return []  # the class is the plugin's
    if isinstance(stage, FunctionStage):
        return [inspect.unwrap(stage.function)]
    if isinstance(stage, FunctionSplitSource):
        return [inspect.unwrap(function) for function in stage.code]
    return [kind for kind in type(stage).__mro__ if issubclass(kind, Stage) and kind not in (Stage, SplitSource)]


def _source(code: Any) -> str | None:
    """The source code without comments and layout; None if it cannot be read."""
    with suppress(OSError, TypeError, SyntaxError):
        return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(code))))
    return None
