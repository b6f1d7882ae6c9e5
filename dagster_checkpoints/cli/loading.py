"""The pipeline in a user's code: -m, -f and -a, as Dagster's own command line has them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from dagster_checkpoints.cli.exits import UsageProblem
from dagster_checkpoints.pipeline import Pipeline

if TYPE_CHECKING:
    from dagster import Definitions

_OPTIONS = (
    click.option("-m", "--module", metavar="MODULE", help="Python module with the pipeline, or a Dagster code location."),
    click.option("-f", "--python-file", "file", metavar="FILE", help="Python file with the pipeline, or a code location."),
    click.option(
        "-a",
        "--attribute",
        metavar="NAME",
        help="The variable there that holds the pipeline or the definitions. Default: the only pipeline there, or --pipeline.",
    ),
)


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that name a pipeline in code; the command gets `module`, `file` and `attribute`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class CodeNotImported(UsageProblem):
    """A user's code raises when it is imported."""


def load_pipeline(module: str | None, file: str | None, attribute: str | None, name: str | None) -> Pipeline | None:
    """The pipeline that the options name, or None if they name no code.

    Args:
        name: of the pipeline, to choose among several.

    Raises:
        UsageProblem: the code cannot be imported, or has no such pipeline.
    """
    chosen = load_chosen(module, file, attribute, name)
    return chosen[1] if chosen is not None else None


def load_chosen(
    module: str | None, file: str | None, attribute: str | None, name: str | None
) -> tuple[LoadedCode, Pipeline] | None:
    """As :func:`load_pipeline`, with the code in which the pipeline is: it is imported once.

    Raises:
        UsageProblem: the code cannot be imported, or has no such pipeline.
    """
    if module is None and file is None:
        if attribute is not None:
            raise UsageProblem("-a names something in a module or file: say which one with -m or -f")
        return None
    code = load_code(module, file)
    fitting = code.one_or_more(attribute, name)
    if len(fitting) == 1:
        return code, fitting[0]
    raise UsageProblem(f"expected one pipeline in {code.where}, found {len(fitting)}. {code.overview()}")


@dataclass(frozen=True)
class LoadedCode:
    """A module of a user's, with its pipelines.

    Attributes:
        where: the module or file, as it was named.
        pipelines: by the names under which they are found, an attribute's or a pipeline's own; a pipeline may have several.
        definitions: Dagster's, of a code location; none in a module that defines pipelines only.
    """

    where: str
    module: ModuleType
    pipelines: Mapping[str, Pipeline]
    definitions: Sequence[Definitions]

    def one_or_more(self, attribute: str | None, name: str | None) -> list[Pipeline]:
        """The pipelines that an attribute or a pipeline's name chooses; all of them if neither is given.

        Raises:
            UsageProblem: there is none; or the attribute is no pipeline, and no code location with pipelines.
        """
        if attribute is None:
            found = list({id(pipeline): pipeline for pipeline in self.pipelines.values()}.values())
        else:
            value = getattr(self.module, attribute, None)
            found = [value] if isinstance(value, Pipeline) else _of_code_locations(_code_locations({attribute: value}))
            if not found:
                other = "nothing of that name" if value is None else f"a {type(value).__name__}"
                raise UsageProblem(
                    f"expected a Pipeline called {attribute!r} in {self.where}, or Definitions with assets of one, "
                    f"found {other}. {self.overview()}"
                )
        fitting = [pipeline for pipeline in found if name is None or pipeline.name == name]
        if not fitting:
            raise UsageProblem(
                f"expected a pipeline{f' {name!r}' if name else ''} in {self.where}, found none. {self.overview()}"
            )
        return fitting

    def spark_settings(self) -> dict[str, str]:
        """Those of the first CheckpointCoordinatorResource of the code location; empty if it has none.

        Raises:
            SparkSettingError: checkpoints cannot work with one of the settings.
        """
        if not self.definitions:
            return {}
        from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource

        for definitions in self.definitions:
            for resource in (definitions.resources or {}).values():
                if isinstance(resource, CheckpointCoordinatorResource):
                    return resource.spark_settings()
        return {}

    def overview(self) -> str:
        """What there is to choose from, for errors."""
        return f"Pipelines there: {', '.join(self.pipelines) or 'none'}; name one with -a or --pipeline"


def load_code(module: str | None, file: str | None) -> LoadedCode:
    """Import a user's code and find its pipelines: in its variables, and behind the assets of its Dagster definitions.

    Raises:
        UsageProblem: not exactly one of the two is given, or the code cannot be imported.
    """
    if (module is None) == (file is None):
        raise UsageProblem("expected the code, by -m or -f" if module is None else "expected -m or -f, found both")
    where = module or file or ""
    loaded = _import(module, file)
    locations = _code_locations(vars(loaded))
    pipelines = {name: value for name, value in vars(loaded).items() if isinstance(value, Pipeline)}
    known = {id(pipeline) for pipeline in pipelines.values()}
    for pipeline in _of_code_locations(locations):
        if id(pipeline) not in known:
            pipelines[pipeline.name] = pipeline
    return LoadedCode(where, loaded, pipelines, locations)


def _code_locations(values: Mapping[str, Any]) -> list[Definitions]:
    """Dagster's definitions among a module's variables; those behind `@dagster.definitions` are loaded."""
    dagster: Any = sys.modules.get("dagster")
    if dagster is None:  # the code has not imported it, so it has none
        return []
    from dagster.components.definitions import LazyDefinitions

    found = []
    for name, value in list(values.items()):
        if isinstance(value, LazyDefinitions):
            try:
                value = value()
            except Exception as error:
                raise UsageProblem(f"the definitions {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if isinstance(value, dagster.Definitions):
            found.append(value)
    return found


def _of_code_locations(locations: Sequence[Definitions]) -> list[Pipeline]:
    if not locations:
        return []
    from dagster_checkpoints.plugin.asset_decorator import pipelines_of

    return [pipeline for definitions in locations for pipeline in pipelines_of(definitions)]


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
        raise CodeNotImported(f"{module or file} cannot be imported: {type(error).__name__}: {error}{at}") from error
