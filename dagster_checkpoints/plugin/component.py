"""`CheckpointedPipelineComponent`: a pipeline's definitions from a YAML file, for projects with a ``defs`` folder.

It calls :func:`build_pipeline_defs`. Source: Dagster's documentation, "Creating and registering a component".
``dg scaffold defs`` writes a pipeline that runs as it is, to be changed.
"""

# Without `from __future__ import annotations`: Dagster reads the types of a component's attributes.

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Annotated, Any

import dagster as dg
from dagster.components.core.context import ComponentLoadContext
from pydantic import BaseModel, Field

from dagster_checkpoints.control.health import HealthThresholds
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.pipeline.names import check_name
from dagster_checkpoints.plugin.pipeline_defs import RowCondition, build_pipeline_defs, may_drain
from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.sensors.conditions import DrainCondition
from dagster_checkpoints.plugin.stage_translator import DagsterStageTranslator

_FILE = '''"""A pipeline with a backfill and a live feed under one checkpoint: replace its sources, stages and sink by yours."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dagster_checkpoints import ParquetSink, Pipeline, StageContext, bounded_source, stage, unbounded_source

# Example data: January is the backfill, February the live feed. New files in `live` are read while the pipeline runs.
DATA = Path("data", "PIPELINE").absolute()
SALES = "ts timestamp, shop string, amount double"
for folder, month in (("history", 1), ("live", 2)):
    if not (DATA / folder).exists():
        (DATA / folder).mkdir(parents=True)
        hours = [datetime(2026, month, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in range(240)]
        rows = pa.table({"ts": hours, "shop": ["north", "south"] * 120, "amount": [1.0] * 240})
        pq.write_table(rows, DATA / folder / f"{month}.parquet")

FILES = {"maxFilesPerTrigger": "10", "maxFileAge": "36500d"}


@bounded_source(watermark=("ts", "1 hour"))  # event time and allowed lateness; ends when everything has been read
def history(context: StageContext) -> DataFrame:
    return context.spark.readStream.schema(SALES).options(**FILES).parquet(str(DATA / "history"))


@unbounded_source(watermark=("ts", "1 hour"))  # runs until it is stopped
def live(context: StageContext) -> DataFrame:
    return context.spark.readStream.schema(SALES).options(**FILES).parquet(str(DATA / "live"))


@stage  # the names of the parameters are the stages upstream
def both(history: DataFrame, live: DataFrame) -> DataFrame:
    return history.unionByName(live)


@stage(sink=ParquetSink(DATA / "daily_sales"))
def daily_sales(both: DataFrame) -> DataFrame:
    days = both.groupBy(F.window("ts", "1 day"), "shop").agg(F.sum("amount").alias("amount"))
    return days.select(F.col("window.start").alias("day"), "shop", "amount")


pipeline = Pipeline("PIPELINE", [history, live, both, daily_sales])
'''


def pipeline_file(name: str) -> str:
    """The Python file, for a pipeline of this name."""
    return _FILE.replace("PIPELINE", name)


class ComponentAttributeError(DagsterCheckpointsError):
    """An attribute of a component names an object that is not there, or of another kind."""


def _object(context: dg.ResolutionContext, given: Any, attribute: str, fits: Callable[[Any], bool], what: str) -> Any:
    """The object at a Python path.

    Args:
        context: the component's.
        given: ``package.module.name``; ``.module.name`` is relative to the component's folder. Or a template that evaluates to
            the path, or to the object.
        attribute: the attribute of the component that has the path.
        fits: whether the attribute takes an object.
        what: the objects that it takes, for errors.

    Raises:
        ComponentAttributeError: There is no such object, or one of another kind.
    """
    expected = f"attribute {attribute!r}: expected the path of {what}, such as '.pipeline.name' or 'package.module.name'"
    path = context.resolve_value(given)
    found = _at(context, path, expected) if isinstance(path, str) else path
    if not fits(found):
        is_ = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
        raise ComponentAttributeError(f"{expected}, found {given!r}, which is {is_}")
    return found


def _at(context: dg.ResolutionContext, path: str, expected: str) -> Any:
    module, _, name = path.rpartition(".")
    if path.startswith("."):
        load = ComponentLoadContext.from_resolution_context(context)
        module = load.defs_relative_module_name(load.path.parent if load.path.is_file() else load.path) + module
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that the named one imports
        raise ComponentAttributeError(f"{expected}, found {path!r}: there is no module {error.name!r}") from error
    except (AttributeError, ValueError) as error:
        raise ComponentAttributeError(f"{expected}, found {path!r}: module {module!r} has no {name!r}") from error


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, kind)


def _pipeline(context: dg.ResolutionContext, path: str) -> Pipeline:
    found: Pipeline = _object(context, path, "pipeline", _is(Pipeline), "a Pipeline")
    return found


def _assets(context: dg.ResolutionContext, path: str) -> dg.AssetsDefinition:
    found: dg.AssetsDefinition = _object(context, path, "assets", _is(dg.AssetsDefinition), "assets that @pipeline_assets made")
    return found


def _condition(context: dg.ResolutionContext, path: str) -> DrainCondition | RowCondition:
    what = "a condition of dagster_checkpoints.sensors, or of a function of the number of rows"
    found: DrainCondition | RowCondition = _object(context, path, "drain_when", may_drain, what)
    return found


def _suspend_condition(context: dg.ResolutionContext, path: str) -> DrainCondition:
    what = "a condition of dagster_checkpoints.sensors"
    found: DrainCondition = _object(context, path, "suspend_when", _is(DrainCondition), what)
    return found


def _translator(context: dg.ResolutionContext, path: str) -> DagsterStageTranslator:
    def fits(found: Any) -> bool:
        return isinstance(found, DagsterStageTranslator) or (
            isinstance(found, type) and issubclass(found, DagsterStageTranslator)
        )

    found: Any = _object(context, path, "translator", fits, "a DagsterStageTranslator, or of a class of them")
    translator: DagsterStageTranslator = found() if isinstance(found, type) else found
    return translator


def _coordinator(context: dg.ResolutionContext, given: Any) -> CheckpointCoordinatorResource:
    settings = context.resolve_value(given)
    if isinstance(settings, CheckpointCoordinatorResource):  # of a template
        return settings
    if not isinstance(settings, dict):
        raise ComponentAttributeError(
            f"attribute 'coordinator': expected settings of CheckpointCoordinatorResource, found {given!r}, which is {settings!r}"
        )
    return CheckpointCoordinatorResource(**settings)


def _switch(context: dg.ResolutionContext, given: Any) -> Any:
    """A truth value, or a text that is none, which :func:`build_pipeline_defs` refuses; a variable's value is always a text."""
    value = context.resolve_value(given)
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _health(context: dg.ResolutionContext, given: Any) -> Any:
    health = _switch(context, given)
    if not isinstance(health, dict):
        return health
    unknown = sorted(health.keys() - set(HealthThresholds.__struct_fields__))
    if unknown:
        known = ", ".join(HealthThresholds.__struct_fields__)
        raise ComponentAttributeError(f"attribute 'health': expected fields of HealthThresholds ({known}), found {unknown}")
    return HealthThresholds(**health)


_SWITCH = dg.Resolver(_switch, model_field_type=bool, inject_before_resolve=False)


def _path(resolve: Callable[[dg.ResolutionContext, str], Any], description: str) -> dg.Resolver:
    return dg.Resolver(resolve, model_field_type=str, inject_before_resolve=False, description=description)


_OTHER_CHARACTER = re.compile(r"[^A-Za-z0-9_]")


class PipelineScaffoldParams(BaseModel):
    """What the scaffolder asks for.

    Args:
        name: the pipeline's name; by default that of the folder, with an underscore for each character that a name cannot have.
    """

    name: str | None = Field(default=None, description="the pipeline's name; by default that of the folder")


class PipelineScaffolder(dg.Scaffolder[PipelineScaffoldParams]):
    """Writes ``defs.yaml``, and a file with a pipeline that runs as it is."""

    @classmethod
    def get_scaffold_params(cls) -> type[PipelineScaffoldParams]:
        return PipelineScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[PipelineScaffoldParams]) -> None:
        # A folder may have characters that a pipeline's name cannot have; a name that was asked for is refused.
        name = check_name("pipeline", request.params.name or _OTHER_CHARACTER.sub("_", request.target_path.name).lstrip("_"))
        (request.target_path / "pipeline.py").write_text(pipeline_file(name), encoding="utf-8")
        attributes = {
            "pipeline": ".pipeline.pipeline",
            "key_prefix": name,  # a second scaffolded pipeline has stages of the same names, and a coordinator of its own
            "resource_key": f"coordinator_of_{name}",
            "coordinator": {"storage": "checkpoints", "interval": 10},
        }
        dg.scaffold_component(request, attributes)


@dg.scaffold_with(PipelineScaffolder)
@dataclass
class CheckpointedPipelineComponent(dg.Component, dg.Resolvable):
    """A pipeline of bounded and unbounded Spark stages under consistent checkpoints, with its job, savepoints and automation.

    The attributes are the arguments of :func:`dagster_checkpoints.build_pipeline_defs`. Objects are named by their Python path;
    ``.pipeline.shop`` is the object ``shop`` in the file ``pipeline.py`` beside ``defs.yaml``. Owners, automation conditions and
    other attributes of the assets are set by a translator, or by Dagster's ``post_processing``.

    Examples:

        .. code-block:: yaml

            type: dagster_checkpoints.CheckpointedPipelineComponent
            attributes:
              pipeline: .pipeline.shop
              coordinator:
                storage: "{{ env.CHECKPOINT_STORAGE }}"
              savepoint_schedule: "0 * * * *"

    Raises:
        ComponentAttributeError: A path names no object, or one of another kind.
    """

    pipeline: Annotated[Pipeline, _path(_pipeline, "path of the pipeline")]
    coordinator: Annotated[
        Any,  # CheckpointCoordinatorResource | None, whose fields Dagster's components do not take
        dg.Resolver(
            _coordinator,
            model_field_type=dict[str, Any],
            inject_before_resolve=False,
            description="settings of CheckpointCoordinatorResource; without them the code location defines the resource",
        ),
    ] = None
    resource_key: str = RESOURCE
    assets: Annotated[
        dg.AssetsDefinition | None,
        _path(_assets, "path of assets of your own that run the pipeline"),
    ] = None
    drain_when: Annotated[
        DrainCondition | RowCondition | None,
        _path(_condition, "path of the condition that drains the pipeline"),
    ] = None
    suspend_when: Annotated[
        DrainCondition | None,
        _path(_suspend_condition, "path of the condition that suspends the pipeline"),
    ] = None
    run_schedule: str | None = None
    burst_schedule: str | None = None
    recovery_attempts: int = 3
    savepoint_schedule: str | None = None
    keep_savepoints: int | None = 7
    reroot: Annotated[bool, _SWITCH] = False
    health: Annotated[
        HealthThresholds | bool,
        dg.Resolver(
            _health,
            model_field_type=dict[str, Any] | bool,
            inject_before_resolve=False,
            description="whether there is a check of its health; or the fields of HealthThresholds that differ",
        ),
    ] = True
    minimum_interval_seconds: int = 30
    execution_timezone: str | None = None
    automation: Annotated[bool, _SWITCH] = False
    key_prefix: str | list[str] | None = None
    group_name: str | None = None
    deps: dict[str, list[dg.ResolvedAssetKey]] | None = None
    tags: dict[str, str] | None = None
    translator: Annotated[
        DagsterStageTranslator | None,
        _path(_translator, "path of a DagsterStageTranslator, or of its class"),
    ] = None
    op_tags: dict[str, Any] | None = None
    pool: str | None = None
    job_tags: dict[str, Any] | None = None

    def build_defs(self, context: ComponentLoadContext) -> dg.Definitions:
        """Everything that Dagster needs for the pipeline."""
        own = (each.name for each in fields(CheckpointedPipelineComponent))  # a subclass may have further attributes
        return build_pipeline_defs(**{name: getattr(self, name) for name in own})
