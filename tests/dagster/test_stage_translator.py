"""Stages as assets: what a user's translator says of them, and the hash of a stage's code. Nothing is run."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import dagster as dg
import pytest

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    DagsterStageTranslator,
    ParquetSink,
    Pipeline,
    Stage,
    bounded_source,
    build_pipeline_defs,
)
from dagster_checkpoints import stage as pipeline_stage
from dagster_checkpoints.definitions.pipelines import pipelines_of
from dagster_checkpoints.plugin.stage_assets import (
    DuplicateAssetKeyError,
    PartitionedStageError,
    StageAssets,
    StageDependencyError,
    stage_keys,
)
from dagster_checkpoints.plugin.stage_translator import code_version

API_PAGE = Path(__file__).resolve().parents[2] / "docs/api.md"
HOURLY = dg.AutomationCondition.on_cron("0 * * * *")
FRESH = dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=1))


class Translator(DagsterStageTranslator):
    def get_asset_key(self, stage):
        return dg.AssetKey(["warehouse", stage.name]) if stage.sink is not None else super().get_asset_key(stage)

    def get_description(self, stage):
        return f"Stage {stage.name}."

    def get_metadata(self, stage):
        return {"runbook": "https://example.com", "sink": "not the plugin's"}

    def get_tags(self, stage):
        return {"tier": "gold"} if stage.sink is not None else {}

    def get_group_name(self, stage):
        return "tables" if stage.sink is not None else None

    def get_owners(self, stage):
        return ["team:numbers"]

    def get_code_version(self, stage):
        return "7"

    def get_automation_condition(self, stage):
        return HOURLY

    def get_freshness_policy(self, stage):
        return FRESH


def test_a_translator_says_what_an_asset_is(numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> None:
    common: dict[str, Any] = {"key_prefix": "demo", "group_name": "small", "tags": {"tier": "bronze", "cost": "low"}}
    assets = assets_of(numbers_pipeline, translator=Translator(), **common)
    assert {name: key.path for name, key in stage_keys(assets, numbers_pipeline).items()} == {
        "numbers": ["demo", "numbers"],
        "doubled": ["demo", "doubled"],
        "total": ["demo", "warehouse", "total"],
    }
    specs = {spec.key.path[-1]: spec for spec in assets.specs}
    total, doubled = specs["total"], specs["doubled"]
    assert [dep.asset_key.path for dep in total.deps] == [["demo", "doubled"]]
    assert (total.group_name, doubled.group_name) == ("tables", "small")
    assert {name: total.tags[name] for name in ("tier", "cost")} == {"tier": "gold", "cost": "low"}
    assert doubled.tags["tier"] == "bronze"
    assert (total.description, list(total.owners), total.code_version) == ("Stage total.", ["team:numbers"], "7")
    assert total.automation_condition is HOURLY and total.freshness_policy == FRESH
    assert total.metadata["runbook"] == "https://example.com" and "ParquetSink" in total.metadata["sink"]


def test_a_translator_may_change_the_whole_asset(
    numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    class Whole(Translator):
        def get_asset_spec(self, stage):
            spec = super().get_asset_spec(stage)
            return spec.replace_attributes(kinds={*spec.kinds, "gold"}, deps=["seen"], owners=["team:whole"])

    assets = assets_of(numbers_pipeline, translator=Whole(), key_prefix="demo", tags={"cost": "low"})
    total = next(spec for spec in assets.specs if spec.key.path[-1] == "total")
    assert total.key.path == ["demo", "warehouse", "total"], "the other methods count, too"
    assert [dep.asset_key.path for dep in total.deps] == [["demo", "doubled"], ["seen"]]
    assert (total.kinds, list(total.owners)) == ({"spark", "parquet", "gold"}, ["team:whole"])
    assert {name: total.tags[name] for name in ("tier", "cost")} == {"tier": "gold", "cost": "low"}
    assert total.tags["dagster_checkpoints/bounded"] == "true"
    assert total.metadata["runbook"] == "https://example.com" and "ParquetSink" in total.metadata["sink"]


def recommended_condition() -> dg.AutomationCondition[dg.AssetKey]:
    """The one that the API page recommends for all stages."""
    (code,) = re.findall(r"`(dg\.AutomationCondition\.[^`]+)`", API_PAGE.read_text(encoding="utf-8"))
    condition: dg.AutomationCondition[dg.AssetKey] = eval(code, {"dg": dg})
    return condition


@pytest.mark.parametrize("deps", [None, {"live": ["raw"]}], ids=["no asset outside", "an asset in front of one source"])
@pytest.mark.parametrize("newest", [None, "joined"], ids=["no run", "a stage is materialized just before the tick"])
@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (recommended_condition, lambda deps, newest: True),
        (lambda: HOURLY, lambda deps, newest: deps is None and newest is None),
        (lambda: recommended_condition().since_last_handled(), lambda deps, newest: newest is None),
    ],
    ids=["recommended", "on_cron", "since_last_handled"],
)
def test_the_recommended_condition_requests_all_stages_at_each_tick_of_cron(
    meeting_pipeline: Pipeline,
    assets_of: Callable[..., dg.AssetsDefinition],
    deps: dict[str, list[str]] | None,
    newest: str | None,
    condition: Callable[[], dg.AutomationCondition[dg.AssetKey]],
    holds: Callable[..., bool],
) -> None:
    class Scheduled(DagsterStageTranslator):
        def get_automation_condition(self, stage):
            return condition()

    @dg.asset
    def raw() -> None: ...

    assets = assets_of(meeting_pipeline, translator=Scheduled(), deps=deps)
    defs = dg.Definitions(assets=[assets, raw], resources={"checkpoint_coordinator": CheckpointCoordinatorResource()})
    cursor, requested = None, []
    with dg.DagsterInstance.ephemeral() as instance:
        for minutes in (0, 31, 35, 92):  # the ticks of cron are at 30 and 90 minutes
            if newest is not None and minutes == 92:
                instance.report_runless_asset_event(dg.AssetMaterialization(newest))
            moment = datetime(2026, 1, 1, 10, 30, tzinfo=UTC) + timedelta(minutes=minutes)
            result = dg.evaluate_automation_conditions(defs, instance, cursor=cursor, evaluation_time=moment)
            cursor = result.cursor
            requested.append({each.key for each in result.results if each.true_subset.size})
    stages = set(stage_keys(assets, meeting_pipeline).values())
    assert (requested == [set(), stages, set(), stages]) is holds(deps, newest), requested
    assert holds(deps, newest) or any(set() < part < stages for part in requested), "a run of these stages is refused"


def test_a_stage_has_no_partitions(numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> None:
    class Daily(DagsterStageTranslator):
        def get_asset_spec(self, stage):
            daily = dg.DailyPartitionsDefinition("2026-01-01")
            return super().get_asset_spec(stage).replace_attributes(partitions_def=daily)

    with pytest.raises(PartitionedStageError, match=r"without partitions for stage 'numbers'.* get_asset_spec of Daily"):
        assets_of(numbers_pipeline, translator=Daily())


def test_partitions_that_post_processing_adds_are_refused(
    numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    """The run of each partition would be a job of its own, and write all rows."""
    days = dg.StaticPartitionsDefinition(["monday", "tuesday"])
    assets = assets_of(numbers_pipeline).map_asset_specs(lambda spec: spec.replace_attributes(partitions_def=days))
    found = r"without partitions for stage 'numbers', found .*that map_asset_specs or post-processing has added"
    with pytest.raises(PartitionedStageError, match=found):
        build_pipeline_defs(numbers_pipeline, assets=assets)
    resources = {"checkpoint_coordinator": CheckpointCoordinatorResource(storage="/nowhere")}
    with pytest.raises(dg.Failure, match=found):
        dg.materialize([assets], partition_key="monday", resources=resources)
    with pytest.raises(PartitionedStageError, match=found):
        pipelines_of(dg.Definitions(assets=[assets]))  # of the command line


def test_two_stages_with_one_key_are_refused(numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> None:
    class One(DagsterStageTranslator):
        def get_asset_key(self, stage):
            return dg.AssetKey("one")

    with pytest.raises(DuplicateAssetKeyError, match=r"'one' for both 'numbers' and 'doubled'\. Change get_asset_key of One"):
        assets_of(numbers_pipeline, translator=One())


@pytest.fixture
def apart() -> Pipeline:
    """Two sources with a sink each, one of them that of a stage which reads it."""

    def read(context): ...  # type: ignore[no-untyped-def]

    sinks = [ParquetSink(f"/nowhere/{name}") for name in ("left", "right")]
    left, right = bounded_source(name="left")(read), bounded_source(name="right", sink=sinks[1])(read)
    return Pipeline("apart", [left, right, pipeline_stage(name="both", sink=sinks[0])(lambda left: left)])


def test_a_dependency_within_the_pipeline_is_one_of_the_pipeline(
    apart: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    """Dagster would fail the run when the stage ends before the other, and each run that continues the job."""

    class Further(DagsterStageTranslator):
        def get_asset_spec(self, stage):
            return super().get_asset_spec(stage).replace_attributes(deps=["right", "outside"] if stage.name == "both" else [])

    assert assets_of(apart, deps={"both": ["outside", "left"]})
    found = r"of stage 'both', found its stage 'right' \(right\), which 'both' does not read"
    for settings in ({"deps": {"both": ["right"]}}, {"translator": Further()}):
        with pytest.raises(StageDependencyError, match=found):
            assets_of(apart, **settings)
    with pytest.raises(StageDependencyError, match="of stage 'left', found its stage 'both'"):
        assets_of(apart, deps={"left": ["both"]})


@pytest.mark.parametrize("deps", ["raw", ["raw"], {"left": "raw"}, {"left": dg.AssetKey(["a", "b"])}, {"left": None}])
def test_dependencies_are_lists_by_stage(deps: Any, apart: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> None:
    """A text became the assets `r`, `a` and `w`."""
    with pytest.raises(StageDependencyError, match=r"pipeline 'apart': expected .*deps= "):
        assets_of(apart, deps=deps)


def test_a_dependency_that_post_processing_adds_is_refused_by_a_check_and_when_a_run_begins(
    apart: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    assets = assets_of(apart).map_asset_specs(
        lambda spec: spec.replace_attributes(deps=["right"]) if spec.key.path == ["both"] else spec
    )

    class Context:
        assets_def = assets
        selected_asset_keys = assets.keys
        selected_asset_check_keys: frozenset[dg.AssetCheckKey] = frozenset()

    with pytest.raises(StageDependencyError, match="post-processing"):
        StageAssets.of(Context(), apart)  # type: ignore[arg-type]
    with pytest.raises(StageDependencyError, match="post-processing"):
        pipelines_of(dg.Definitions(assets=[assets]))  # of the command line


def test_a_stage_must_not_have_the_key_of_the_events_beside_it(assets_of: Callable[..., dg.AssetsDefinition]) -> None:
    def numbers(context):  # type: ignore[no-untyped-def]
        return context.spark.range(5)

    parallel = bounded_source(instances=["left", "right"], sink=ParquetSink("/nowhere/one"))(numbers)
    other = bounded_source(name="numbers_instances", sink=ParquetSink("/nowhere/two"))(numbers)
    found = r"'numbers_instances' for both 'numbers_instances' and the instances of stage 'numbers'"
    with pytest.raises(DuplicateAssetKeyError, match=found):
        assets_of(Pipeline("p", [parallel, other]))
    both = Pipeline("numbers", [parallel])  # a pipeline and a stage of one name
    assert assets_of(both)
    with pytest.raises(DuplicateAssetKeyError, match="'checkpoints/numbers' for both 'numbers' and the checkpoints of pipeline"):
        assets_of(both, key_prefix="checkpoints")


def test_without_a_translator_a_stage_has_a_code_version_and_nothing_else(
    numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    specs = list(assets_of(numbers_pipeline).specs)
    assert all(spec.code_version and not spec.owners and spec.automation_condition is None for spec in specs)
    assert len({spec.code_version for spec in specs}) == 3


# Code versions


def defined(text: str, folder: Path, **names: Any) -> Stage:
    """The stage called `s` of a new module with this text."""
    name = f"user_module_{uuid4().hex}"
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    vars(module).update({"stage": pipeline_stage, "Stage": Stage, **names})
    spec.loader.exec_module(module)
    found: Stage = module.s
    return found


FUNCTION = "@stage\ndef s(a):\n    return a.where('x > 1')\n"


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("@stage\ndef s(a):\n    # more than one\n    return a.where(\n        'x > 1'\n    )\n", True),
        ('\n\n@stage\ndef s(a):\n    return a.where("x > 1")\n', True),
        ("@stage\ndef s(a):\n    return a.where('x > 2')\n", False),
        ("@stage\ndef s(b):\n    return b.where('x > 1')\n", False),
        ("@stage(instances=['l', 'r'])\ndef s(a):\n    return a.where('x > 1')\n", False),
        ("@stage(output_mode='update')\ndef s(a):\n    return a.where('x > 1')\n", False),
    ],
)
def test_a_code_version_changes_with_code_and_settings_and_not_with_layout(tmp_path: Path, other: str, same: bool) -> None:
    first, second = code_version(defined(FUNCTION, tmp_path)), code_version(defined(other, tmp_path))
    assert first is not None and second is not None
    assert (first == second) is same


def test_settings_count_if_the_source_does_not_show_them(tmp_path: Path) -> None:
    text = "@stage(instances=NAMES, sink=SINK)\ndef s(a):\n    return a\n"
    names = {"NAMES": ["l"], "SINK": ParquetSink("/data/here")}
    version = code_version(defined(text, tmp_path, **names))
    assert code_version(defined(text, tmp_path, **{**names, "SINK": ParquetSink("/data/there")})) == version
    assert code_version(defined(text, tmp_path, **{**names, "NAMES": ["r"]})) != version
    assert code_version(defined(text, tmp_path, **{**names, "SINK": None})) != version


def test_the_classes_of_a_stage_count_down_to_the_plugins_own(tmp_path: Path) -> None:
    text = (
        "class Base(Stage):\n    def limit(self):\n        return {}\n\n"
        "class Sub(Base):\n    def transform(self, context, a):\n        return a.limit(self.limit())\n\ns = Sub()\n"
    )
    versions = [code_version(defined(text.format(number), tmp_path)) for number in (1, 1, 2)]
    assert versions[0] == versions[1] != versions[2]


def test_a_stage_without_source_code_has_no_code_version() -> None:
    module: dict[str, Any] = {"stage": pipeline_stage}
    exec(FUNCTION, module)
    assert code_version(module["s"]) is None
