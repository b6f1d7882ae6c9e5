"""The pipeline in a user's code, named by -m, -f and -a as on Dagster's command line."""

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
from dagster_checkpoints.cli.output import prints_as_other_text
from dagster_checkpoints.own_code import own_frames
from dagster_checkpoints.pipeline import Pipeline

if TYPE_CHECKING:
    from dagster import Definitions

    from dagster_checkpoints.definitions.pipelines import RunsPipelines

_OPTIONS = (
    click.option("-m", "--module", metavar="MODULE", help="Python module with the pipeline, or a Dagster code location."),
    click.option("-f", "--python-file", "file", metavar="FILE", help="Python file with the pipeline, or a code location."),
    click.option(
        "-a",
        "--attribute",
        metavar="NAME",
        help="Variable that holds the pipeline or the definitions. Default: the only pipeline in the code, or --pipeline.",
    ),
)

_NEEDS_SESSION = (
    "\nPySpark needs a session for this, and there is none while code is imported. Write it inside the stage's function; or, for "
    'a user-defined function, give the type as an object, @F.udf(DoubleType()) instead of @F.udf("double")'
)


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that name a pipeline in code; the command gets `module`, `file` and `attribute`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class CodeNotImported(UsageProblem):
    """A user's code cannot be imported: it raises an error."""


def load_pipeline(module: str | None, file: str | None, attribute: str | None, name: str | None) -> Pipeline | None:
    """The pipeline that the options name, or None if they name no code.

    Args:
        module: name of the module; None if -m is not given.
        file: path of the file; None if -f is not given.
        attribute: name of the variable; None if -a is not given.
        name: name of the pipeline, to choose among several; None for the only one.

    Raises:
        UsageProblem: the code cannot be imported, or has no such pipeline.
    """
    chosen = load_chosen(module, file, attribute, name)
    return chosen[1] if chosen is not None else None


def load_chosen(
    module: str | None, file: str | None, attribute: str | None, name: str | None
) -> tuple[LoadedCode, Pipeline] | None:
    """As :func:`load_pipeline`, but returns the imported code as well, so that it is imported once.

    Raises:
        UsageProblem: the code cannot be imported, or has no such pipeline.
    """
    if module is None and file is None:
        if attribute is not None:
            raise UsageProblem("-a names a variable of a module or file: name that with -m or -f")
        return None
    code = load_code(module, file)
    chosen = code.one_or_more(attribute, name)
    if len(chosen) == 1:
        return code, chosen[0]
    raise UsageProblem(f"expected one pipeline in {code.origin}, found {len(chosen)}. {code.overview()}")


@dataclass(frozen=True)
class LoadedCode:
    """A user's module with its pipelines.

    Attributes:
        origin: the module or file, as the user named it.
        module: the imported module.
        pipelines: the pipelines by name: the variable's name, or the pipeline's own; a pipeline may have several names.
        definitions: Dagster definitions of a code location; empty in a module that only defines pipelines.
    """

    origin: str
    module: ModuleType
    pipelines: Mapping[str, Pipeline]
    definitions: Sequence[Definitions]

    def one_or_more(self, attribute: str | None, name: str | None) -> list[Pipeline]:
        """The pipelines that the name of a variable or of a pipeline selects; all of them if neither is given.

        Raises:
            UsageProblem: the code has no such pipeline, or the variable holds neither a pipeline nor definitions with pipelines.
        """
        if attribute is None:
            candidates = list({id(pipeline): pipeline for pipeline in self.pipelines.values()}.values())
        else:
            value = getattr(self.module, attribute, None)
            candidates = [value] if isinstance(value, Pipeline) else _of_code_locations(_code_locations({attribute: value}))
            if not candidates:
                found = "nothing of that name" if value is None else f"a {type(value).__name__}"
                raise UsageProblem(
                    f"expected a Pipeline called {attribute!r} in {self.origin}, or Definitions with assets of one, "
                    f"found {found}. {self.overview()}"
                )
        chosen = [pipeline for pipeline in candidates if name is None or pipeline.name == name]
        if not chosen:
            raise UsageProblem(
                f"expected a pipeline{f' {name!r}' if name else ''} in {self.origin}, found none. {self.overview()}"
            )
        return chosen

    def spark_settings(self) -> dict[str, str]:
        """The Spark settings of the code location's first CheckpointCoordinatorResource; empty if it has none.

        Raises:
            SparkSettingError: checkpoints cannot work with one of the settings.
        """
        resource = self._resource()
        return {} if resource is None else resource.spark_settings()

    def check_settings(self) -> None:
        """Check what a run checks of the settings of that resource before it starts.

        Raises:
            SparkSettingError: checkpoints cannot work with one of the settings.
            WorkDirectoryError: the work directory has to be named, since Spark's executors are on other machines.
        """
        resource = self._resource()
        if resource is not None:
            from dagster_checkpoints.spark.session.work_directory import check_work_directory_named

            check_work_directory_named(resource.spark_settings()["spark.master"], named=bool(resource.work_directory))

    def _resource(self) -> RunsPipelines | None:
        if not self.definitions:
            return None
        from dagster_checkpoints.definitions.pipelines import RunsPipelines

        resources = [each for definitions in self.definitions for each in (definitions.resources or {}).values()]
        return next((each for each in resources if isinstance(each, RunsPipelines)), None)

    def overview(self) -> str:
        """The pipelines to choose from, for errors."""
        if not self.pipelines:
            return "It has no pipeline: neither a Pipeline among its variables, nor Definitions with assets of @pipeline_assets"
        return f"Its pipelines: {', '.join(self.pipelines)}; name one with -a or --pipeline"


def load_code(module: str | None, file: str | None) -> LoadedCode:
    """Import a user's code with its pipelines: those in its variables, and those of the assets in its Dagster definitions.

    Raises:
        UsageProblem: both arguments or none of them are given, or the code cannot be imported.
    """
    if (module is None) == (file is None):
        raise UsageProblem(
            "expected -m or -f with the code, found neither" if module is None else "expected either -m or -f, found both"
        )
    with prints_as_other_text():
        loaded = _import(module, file)
        locations = _code_locations(vars(loaded))
    variables = {name: value for name, value in vars(loaded).items() if isinstance(value, Pipeline)}
    variable_ids = {id(pipeline) for pipeline in variables.values()}
    others = {
        f"{pipeline.name} of the definitions" if pipeline.name in variables else pipeline.name: pipeline
        for pipeline in _of_code_locations(locations)
        if id(pipeline) not in variable_ids
    }
    return LoadedCode(module or file or "", loaded, {**variables, **others}, locations)


def _code_locations(values: Mapping[str, Any]) -> list[Definitions]:
    """Dagster's definitions among a module's variables; those behind `@dagster.definitions` are loaded."""
    dagster: Any = sys.modules.get("dagster")
    if dagster is None:  # the code has not imported Dagster, so it has no definitions
        return []
    from dagster.components.definitions import LazyDefinitions

    definitions = []
    for name, value in list(values.items()):
        if isinstance(value, LazyDefinitions):
            try:
                value = value()
            except (Exception, SystemExit) as error:
                raise UsageProblem(f"the definitions {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if isinstance(value, dagster.Definitions):
            definitions.append(value)
    return definitions


def _of_code_locations(locations: Sequence[Definitions]) -> list[Pipeline]:
    if not locations:
        return []
    from dagster_checkpoints.definitions.pipelines import pipelines_of

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
    except (Exception, SystemExit) as error:  # code that ends its process would end the command, with its own exit code
        raise CodeNotImported(_import_problem(module or file or "", error)) from error


def _import_problem(code: str, error: BaseException) -> str:
    """The text for code that cannot be imported: the user's own line first."""
    from dagster_checkpoints.spark.query.error_text import NO_PANDAS_REMEDY, no_pandas

    frames = own_frames(error)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}: {(frames[-1].line or '').strip()}" if frames else ""
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
    of_spark = any(f"{os.sep}pyspark{os.sep}" in file for file in raised_in)
    needs_session = "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error) or (of_spark and isinstance(error, AssertionError))
    advice = _NEEDS_SESSION if needs_session else f"\n{NO_PANDAS_REMEDY}" if no_pandas(error) else ""
    if isinstance(error, SystemExit):
        advice = '\nWrite what a script does under: if __name__ == "__main__":'
    return f"{code} cannot be imported{at}\n{type(error).__name__}: {error}{advice}"
