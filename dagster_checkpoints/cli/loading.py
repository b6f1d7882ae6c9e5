"""The pipeline in a user's code: -m, -f and -a, as Dagster's own command line has them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import click

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.pipeline import Pipeline

_OPTIONS = (
    click.option("-m", "--module", metavar="MODULE", help="Python module with the pipeline."),
    click.option("-f", "--python-file", "file", metavar="FILE", help="Python file with the pipeline."),
    click.option(
        "-a", "--attribute", metavar="NAME", help="The pipeline's name in it. Default: the only pipeline there, or --pipeline."
    ),
)


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that name a pipeline in code; the command gets `module`, `file` and `attribute`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def load_pipeline(module: str | None, file: str | None, attribute: str | None, name: str | None) -> Pipeline | None:
    """The pipeline that the options name, or None if they name no code.

    Args:
        name: of the pipeline, to choose among several.

    Raises:
        UsageProblem: the code cannot be imported, or has no such pipeline.
    """
    if module is None and file is None:
        if attribute is not None:
            raise UsageProblem("-a names something in a module or file: say which one with -m or -f")
        return None
    if module is not None and file is not None:
        raise UsageProblem("expected -m or -f, found both")
    loaded = _import(module, file)
    where = module or file
    if attribute is not None:
        chosen = getattr(loaded, attribute, None)
        if isinstance(chosen, Pipeline):
            return chosen
        found = "nothing of that name" if chosen is None else f"a {type(chosen).__name__}"
        raise UsageProblem(f"expected a Pipeline called {attribute!r} in {where}, found {found}. {_there(loaded)}")
    pipelines = {id(value): value for value in vars(loaded).values() if isinstance(value, Pipeline)}
    fitting = [pipeline for pipeline in pipelines.values() if name is None or pipeline.name == name]
    if len(fitting) == 1:
        return fitting[0]
    raise UsageProblem(f"expected one pipeline{f' {name!r}' if name else ''} in {where}, found {len(fitting)}. {_there(loaded)}")


def _there(loaded: ModuleType) -> str:
    names = [name for name, value in vars(loaded).items() if isinstance(value, Pipeline)]
    return f"Pipelines there: {', '.join(names) or 'none'}; name one with -a"


def _import(module: str | None, file: str | None) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        if module is not None:
            return importlib.import_module(module)
        assert file is not None
        path = os.path.abspath(os.path.expanduser(file))
        if not os.path.isfile(path):
            raise UsageProblem(f"expected a Python file at {path}, found none")
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location("pipeline_file", path)
        if spec is None or spec.loader is None:
            raise UsageProblem(f"expected a Python file, found {path}")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
        return loaded
    except UsageProblem:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The innermost line outside of Python's own import machinery and of this module.
        lines = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
        at = f"\n  at {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
        raise UsageProblem(f"{module or file} cannot be imported: {type(error).__name__}: {error}{at}") from error
