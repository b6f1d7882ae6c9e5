"""`build_pipeline_defs` and the component: what they define, what they refuse, and a run."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    CheckpointedPipelineComponent,
    ParquetSink,
    Pipeline,
    bounded_source,
    build_pipeline_defs,
    commit_check,
    pipeline_assets,
    stage,
    unbounded_source,
)
from dagster_checkpoints.control.health import HealthThresholds, InvalidThresholdError
from dagster_checkpoints.pipeline.errors import InvalidNameError
from dagster_checkpoints.plugin import pipeline_defs
from dagster_checkpoints.plugin.component import ComponentAttributeError
from dagster_checkpoints.plugin.health_check import health_check
from dagster_checkpoints.plugin.pipeline_defs import ConflictingDefinitionsError
from dagster_checkpoints.plugin.settings import UnknownSettingError
from dagster_checkpoints.plugin.stage_assets import NotAPipelineAssetError
from dagster_checkpoints.sensors import live_lag_zero

COMPONENT = "dagster_checkpoints.CheckpointedPipelineComponent"


def shop(*, live: bool = True, name: str = "shop") -> Pipeline:
    def source(context: Any) -> Any: ...

    def sales(source: Any) -> Any: ...

    named: Any = (unbounded_source if live else bounded_source)(name="source")
    check = commit_check(name="sold")(lambda rows: True)
    return Pipeline(name, [named(source), stage(checks=[check], sink=ParquetSink("unused"))(sales)])


@pytest.fixture
def resource(coordinator: Callable[..., CheckpointCoordinatorResource]) -> CheckpointCoordinatorResource:
    return coordinator()


def automation(defs: dg.Definitions) -> dict[str, bool]:
    """Sensors and schedules, with whether they are on from the start."""
    repository = defs.get_repository_def()
    return {each.name: each.default_status.value == "RUNNING" for each in (*repository.sensor_defs, *repository.schedule_defs)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"recovery_attempts": 0}, {}),
        ({}, {"shop_recovery": False}),
        ({"drain_when": live_lag_zero()}, {"shop_recovery": False, "shop_drain": True}),
        ({"drain_when": lambda rows: True}, {"shop_recovery": False}),
        ({"suspend_when": live_lag_zero()}, {"shop_recovery": False, "shop_suspend": True}),
        ({"reroot": True, "automation": True}, {"shop_recovery": True, "shop_reroot": True}),
        ({"burst_schedule": "*/15 * * * *"}, {"shop_recovery": False, "shop_bursts": False}),
        (
            {"run_schedule": "0 3 * * *", "savepoint_schedule": "0 * * * *"},
            {"shop_recovery": False, "shop_runs": False, "shop_savepoints": False},
        ),
        (
            {"run_schedule": "0 3 * * *", "savepoint_schedule": "0 * * * *", "automation": True, "recovery_attempts": 0},
            {"shop_runs": True, "shop_savepoints": True},
        ),
    ],
)
def test_each_part_of_the_automation_is_switchable(
    resource: CheckpointCoordinatorResource, settings: dict[str, Any], expected: dict[str, bool]
) -> None:
    defs = build_pipeline_defs(shop(), coordinator=resource, **settings)
    dg.Definitions.validate_loadable(defs)
    assert automation(defs) == {"shop_savepoint_check": True, "shop_health": True, **expected}


def test_the_assets_are_those_of_the_single_builders(resource: CheckpointCoordinatorResource) -> None:
    defs = build_pipeline_defs(shop(), coordinator=resource, key_prefix="eu", tags={"team": "sales"})
    graph = defs.resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert keys == {"eu/source", "eu/sales", "checkpoints/shop", "savepoints/shop"}
    for key in (["checkpoints", "shop"], ["savepoints", "shop"]):
        assert graph.get(dg.AssetKey(key)).parent_keys == {dg.AssetKey(["eu", "sales"])}
    sales = graph.get(dg.AssetKey(["eu", "sales"]))
    assert (sales.group_name, sales.tags["team"]) == ("shop", "sales")
    checks = {key.to_user_string() for key in graph.asset_check_keys}
    assert checks == {"eu/sales:sold", "savepoints/shop:restorable", "checkpoints/shop:healthy"}
    assert defs.resolve_assets_def(dg.AssetKey(["eu", "sales"])).node_def.name == "shop_assets"


@pytest.mark.parametrize("job_name", ["shop_job", "shop_recovery_job"])
@pytest.mark.parametrize("live", [True, False])
def test_a_check_of_another_op_does_not_wait_in_the_run_for_a_stage_that_does_not_end(
    resource: CheckpointCoordinatorResource, live: bool, job_name: str
) -> None:
    @dg.asset_check(asset="sales", automation_condition=dg.AutomationCondition.eager())
    def plausible() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    pipeline_defs = build_pipeline_defs(shop(live=live), coordinator=resource)
    defs = dg.Definitions.merge(pipeline_defs, dg.Definitions(asset_checks=[plausible]))
    job = defs.resolve_job_def(job_name)
    assert {node.name for node in job.nodes} == ({"shop_assets"} if live else {"shop_assets", "sales_plausible"})
    assert "sold" in {key.name for key in job.asset_layer.asset_graph.asset_check_keys}


def test_the_job_begins_with_the_start_point_in_its_launchpad(resource: CheckpointCoordinatorResource) -> None:
    defs = build_pipeline_defs(shop(), coordinator=resource)
    assert defs.resolve_job_def("shop_job").run_config == {"ops": {"shop_assets": {"config": {"restore_from": "latest"}}}}


def test_the_job_and_what_schedules_launch_has_its_tags(resource: CheckpointCoordinatorResource) -> None:
    tags = {"load": "live", "dagster-k8s/config": {"container_config": {"resources": {"limits": {"memory": "8Gi"}}}}}
    settings: dict[str, Any] = {"run_schedule": "0 3 * * *", "burst_schedule": "*/15 * * * *", "job_tags": tags}
    defs = build_pipeline_defs(shop(), coordinator=resource, **settings)
    job = defs.resolve_job_def("shop_job")
    assert job.tags["load"] == "live" and "8Gi" in job.tags["dagster-k8s/config"]
    assert {each.job_name for each in defs.get_repository_def().schedule_defs} == {"shop_job"}


def test_pipelines_share_a_resource_or_have_their_own(resource: CheckpointCoordinatorResource) -> None:
    shared = build_pipeline_defs(shop(name="one"))
    other = build_pipeline_defs(shop(name="two"), key_prefix="two", coordinator=resource, resource_key="of_two")
    defs = dg.Definitions.merge(shared, other, dg.Definitions(resources={"checkpoint_coordinator": resource}))
    dg.Definitions.validate_loadable(defs)
    needed = defs.resolve_assets_def(dg.AssetKey(["two", "sales"])).required_resource_keys
    assert "checkpoint_coordinator" not in needed and needed >= {"of_two"}


def own_assets(pipeline: Pipeline, **settings: Any) -> dg.AssetsDefinition:
    @pipeline_assets(pipeline=pipeline, **settings)
    def mine(
        context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource
    ) -> Iterator[dg.MaterializeResult[Any]]:
        yield from checkpoint_coordinator.run(pipeline, context=context)

    return mine


def test_assets_of_ones_own(resource: CheckpointCoordinatorResource) -> None:
    pipeline = shop()
    defs = build_pipeline_defs(pipeline, coordinator=resource, assets=own_assets(pipeline, group_name="mine"))
    assert defs.resolve_job_def("shop_job").run_config == {"ops": {"mine": {"config": {"restore_from": "latest"}}}}
    for settings in ({"group_name": "x"}, {"pool": "x", "tags": {"a": "b"}}, {"drain_when": lambda rows: True}):
        with pytest.raises(ConflictingDefinitionsError, match=", ".join(sorted(settings))):
            build_pipeline_defs(pipeline, assets=own_assets(pipeline), **settings)  # type: ignore[arg-type]
    with pytest.raises(NotAPipelineAssetError, match="of pipeline 'shop'"):
        build_pipeline_defs(pipeline, assets=own_assets(shop(name="other")))


@pytest.mark.parametrize(
    "arguments",
    [
        {"health": {"late_rows": 5}},
        {"automation": "false"},
        {"reroot": 0},
        {"recovery_attempts": None},
        {"drain_when": 5},
        {"suspend_when": lambda rows: True},
    ],
)
def test_an_argument_of_another_kind_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"build_pipeline_defs\({next(iter(arguments))}=...\): expected"):
        build_pipeline_defs(shop(), **arguments)


# A run


def test_a_run_of_the_job_materializes_the_stages(numbers_pipeline: Pipeline, resource: CheckpointCoordinatorResource) -> None:
    defs = build_pipeline_defs(numbers_pipeline, coordinator=resource)
    done = defs.resolve_job_def("numbers_job").execute_in_process()
    stages = {"numbers", "doubled", "total"}
    assert stages <= {event.asset_key.to_user_string() for event in done.get_asset_materialization_events() if event.asset_key}


# The component


def test_the_scaffolded_component_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with create_defs_folder_sandbox() as sandbox:
        folder = sandbox.scaffold_component(component_cls=CheckpointedPipelineComponent, defs_path="shop")
        assert {file.name for file in folder.iterdir()} == {"defs.yaml", "pipeline.py"}
        with sandbox.load_component_and_build_defs(defs_path=folder) as (component, defs):
            assert isinstance(component, CheckpointedPipelineComponent)
            assert component.pipeline.name == "shop"
            dg.Definitions.validate_loadable(defs)
            stages = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
            assert {"shop/history", "shop/live", "shop/both", "shop/daily_sales", "checkpoints/shop", "savepoints/shop"} <= stages


def test_several_components_are_scaffolded_in_folders_of_any_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with create_defs_folder_sandbox() as sandbox:
        for folder in ("daily-sales", "größe", "class", "1st shop", "über"):
            sandbox.scaffold_component(component_cls=CheckpointedPipelineComponent, defs_path=folder)
        with sandbox.build_all_defs() as defs:
            dg.Definitions.validate_loadable(defs)
            jobs = {job.name for job in defs.jobs or ()}
    assert jobs == {"daily_sales_job", "gr__e_job", "class_job", "1st_shop_job", "ber_job"}


@pytest.mark.parametrize("name", ["my-shop", "_shop", 'a"b'])
def test_a_name_that_a_pipeline_cannot_have_is_refused_before_a_file_is_written(name: str) -> None:
    with create_defs_folder_sandbox() as sandbox:
        with pytest.raises(InvalidNameError, match=re.escape(repr(name))):
            sandbox.scaffold_component(
                component_cls=CheckpointedPipelineComponent, defs_path="shop", scaffold_params={"name": name}
            )
        assert not list((sandbox.defs_folder_path / "shop").iterdir())


PIPELINE = """
import dagster as dg
from dagster_checkpoints import DagsterStageTranslator, ParquetSink, Pipeline, unbounded_source
from dagster_checkpoints.sensors import live_lag_zero

class Owned(DagsterStageTranslator):
    def get_owners(self, stage):
        return ["team:sales"]

@unbounded_source(sink=ParquetSink("unused"))
def source(context): ...

shop = Pipeline("shop", [source])
quiet = live_lag_zero()

def many(rows):
    return rows["source"] > 1000

@dg.template_var
def seconds():
    return 45

@dg.template_var
def team():
    return {"team": "sales"}

@dg.template_var
def thresholds():
    return {"late_rows": 7}

@dg.template_var
def settings():
    return {"interval": 46}
"""


@pytest.fixture
def loaded() -> Iterator[Callable[..., dg.Definitions]]:
    """Definitions of a component with attributes, beside the file pipeline.py."""
    with create_defs_folder_sandbox() as sandbox:

        def load(**attributes: Any) -> dg.Definitions:
            contents = {"type": COMPONENT, "attributes": {"pipeline": ".pipeline.shop", **attributes}}
            contents["template_vars_module"] = ".pipeline"
            folder = sandbox.scaffold_component(
                component_cls=CheckpointedPipelineComponent, defs_path="shop", defs_yaml_contents=contents
            )
            (folder / "pipeline.py").write_text(PIPELINE)
            with sandbox.load_component_and_build_defs(defs_path=folder) as (_, defs):
                return defs

        yield load


def test_the_attributes_of_a_component_are_the_arguments_of_the_call() -> None:
    arguments = {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(build_pipeline_defs).parameters.items()
    }
    attributes = {
        each.name: None if each.default is dataclasses.MISSING else each.default
        for each in dataclasses.fields(CheckpointedPipelineComponent)
    }
    assert list(attributes.items()) == list(arguments.items())


def test_the_attributes_of_a_component_may_be_templates(loaded: Callable[..., dg.Definitions]) -> None:
    defs = loaded(coordinator={"interval": "{{ seconds }}"}, tags="{{ team }}")
    assert defs.resources is not None and defs.resources["checkpoint_coordinator"].interval == 45
    assert defs.resolve_asset_graph().get(dg.AssetKey("source")).tags["team"] == "sales"


def test_the_attributes_of_a_component(loaded: Callable[..., dg.Definitions], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_OF_SHOP", "/data/checkpoints")
    defs = loaded(
        coordinator={"storage": "{{ env.STORAGE_OF_SHOP }}", "interval": 60},
        drain_when=".pipeline.quiet",
        translator=".pipeline.Owned",
        savepoint_schedule="0 * * * *",
        key_prefix=["eu"],
        health={"late_rows": 100, "growing_lag": None},
    )
    resource: Any = (defs.resources or {})["checkpoint_coordinator"]
    assert (resource.storage, resource.interval) == ("/data/checkpoints", 60)
    assert automation(defs) == {
        "shop_savepoint_check": True,
        "shop_health": True,
        "shop_recovery": False,
        "shop_drain": True,
        "shop_savepoints": False,
    }
    assert defs.resolve_asset_graph().get(dg.AssetKey(["eu", "source"])).owners == ["team:sales"]


def test_an_asset_outside_of_a_components_pipeline_may_have_a_key_of_several_parts(loaded: Callable[..., dg.Definitions]) -> None:
    graph = loaded(coordinator={}, deps={"source": ["raw/events", "plain"]}).resolve_asset_graph()
    assert graph.get(dg.AssetKey("source")).parent_keys == {dg.AssetKey(["raw", "events"]), dg.AssetKey("plain")}


def test_a_component_that_extends_it_may_have_attributes_of_its_own() -> None:
    @dataclasses.dataclass
    class Owned(CheckpointedPipelineComponent):
        team: str = "sales"

    defs = Owned(shop()).build_defs(None)  # type: ignore[arg-type]
    assert [job.name for job in defs.jobs or ()] == ["shop_job"]


def test_a_template_may_be_the_whole_of_an_attribute(
    loaded: Callable[..., dg.Definitions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster leaves out an attribute's own conversion where a template is no text."""
    used: list[HealthThresholds] = []

    def check(*, thresholds: HealthThresholds, **given: Any) -> dg.AssetChecksDefinition:
        used.append(thresholds)
        return health_check(thresholds=thresholds, **given)

    monkeypatch.setattr(pipeline_defs, "health_check", check)
    monkeypatch.setenv("WITH_AUTOMATION", "false")
    monkeypatch.setenv("LATE", "8")
    defs = loaded(coordinator="{{ settings }}", health="{{ thresholds }}", automation="{{ env.WITH_AUTOMATION }}")
    assert (defs.resources or {})["checkpoint_coordinator"].interval == 46
    assert automation(defs) == {"shop_savepoint_check": True, "shop_health": True, "shop_recovery": False}
    loaded(health={"late_rows": "{{ env.LATE }}"})
    assert [thresholds.late_rows for thresholds in used] == [7, 8]


@pytest.mark.parametrize(
    ("attributes", "error", "text"),
    [
        ({"automation": "off"}, ValueError, r"build_pipeline_defs\(automation=...\): expected True or False, found 'off'"),
        ({"reroot": "{{ team }}"}, ValueError, "reroot.*found {'team': 'sales'}"),
        ({"health": "no"}, ValueError, "health.*found 'no'"),
        ({"recovery_attempts": ""}, ValueError, "recovery_attempts.*expected a whole number of at least 0, found ''"),
        ({"drain_when": "{{ team }}"}, ComponentAttributeError, "attribute 'drain_when'.*which is dict"),
        ({"coordinator": "{{ seconds }}"}, ComponentAttributeError, "attribute 'coordinator'.*which is 45"),
        (
            {"pipeline": ".pipeline.missing"},
            ComponentAttributeError,
            "attribute 'pipeline': expected .*has no 'missing'",
        ),
        ({"pipeline": ".pipeline.quiet"}, ComponentAttributeError, r"'\.pipeline\.quiet', which is _LiveLagZero"),
        ({"pipeline": "no_such_package.shop"}, ComponentAttributeError, "there is no module 'no_such_package'"),
        ({"pipeline": "shop"}, ComponentAttributeError, "expected the path of a Pipeline, such as"),
        ({"drain_when": ".pipeline.shop"}, ComponentAttributeError, "attribute 'drain_when'.*which is Pipeline"),
        ({"drain_when": ".pipeline.Owned"}, ComponentAttributeError, "attribute 'drain_when'.*which is the class Owned"),
        ({"suspend_when": ".pipeline.Owned"}, ComponentAttributeError, "attribute 'suspend_when'.*which is the class Owned"),
        ({"suspend_when": ".pipeline.many"}, ComponentAttributeError, "attribute 'suspend_when'.*which is function"),
        ({"translator": ".pipeline.ParquetSink"}, ComponentAttributeError, "attribute 'translator'.*which is the class ParquetS"),
        ({"translator": ".pipeline.shop"}, ComponentAttributeError, "attribute 'translator'.*which is Pipeline"),
        ({"assets": ".pipeline.shop"}, ComponentAttributeError, "attribute 'assets'.*which is Pipeline"),
        ({"health": {"late_row": 5}}, ComponentAttributeError, "attribute 'health'.*late_rows.*found .'late_row'"),
        ({"health": {"late_rows": -5}}, InvalidThresholdError, "late_rows=-5"),
        ({"coordinator": {"intervall": 5}}, UnknownSettingError, "interval"),
        ({"coordinator": {"s3": {"endpoint": "http://minio:9000"}}}, UnknownSettingError, "S3Resource has no .*'endpoint_url'"),
        ({"coordinator": {"spark": {"spark.master": "yarn"}}}, UnknownSettingError, "LazyPySparkResource.*'spark_config'"),
    ],
)
def test_what_a_component_refuses(
    loaded: Callable[..., dg.Definitions], attributes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(Exception) as refused:
        loaded(**attributes)
    causes = [refused.value]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)  # type: ignore[arg-type]
    (found,) = [str(cause) for cause in causes if type(cause) is error]
    assert re.search(text, found)
