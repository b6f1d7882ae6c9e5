"""Refusals before Spark starts: storage, ownership, run configuration, settings."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from dagster._core.instance import InstanceType
from dagster._core.instance.ref import InstanceRef
from dagster_aws.s3 import S3Resource
from dagster_pyspark import LazyPySparkResource, PySparkResource
from pydantic import ValidationError

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    SavepointConfig,
    bounded_source,
    pipeline_assets,
)
from dagster_checkpoints.cli.app import app
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.plugin import resource
from dagster_checkpoints.plugin.run_config import PipelineRunConfig
from dagster_checkpoints.plugin.savepoints.check import SavepointCheckConfig
from dagster_checkpoints.plugin.savepoints.retention import SavepointRetention
from dagster_checkpoints.plugin.settings import InvalidSettingError, UnknownSettingError
from dagster_checkpoints.plugin.stage_assets import REFUSED, NotAPipelineAssetError
from dagster_checkpoints.spark.session.spark_session import SparkSettingError
from dagster_checkpoints.storage import CheckpointStorage, open_store
from dagster_checkpoints.storage.ownership import LeaseRenewer
from dagster_checkpoints.storage.root import NoStorageError

Materialize = Callable[..., dg.ExecuteInProcessResult]
Coordinator = Callable[..., CheckpointCoordinatorResource]
AssetsOf = Callable[..., dg.AssetsDefinition]
FailureOf = Callable[[dg.ExecuteInProcessResult], Any]


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(resource, "build_session", refuse)


@pytest.mark.usefixtures("no_spark")
def test_unreachable_storage_is_named_before_spark_starts(
    coordinator: Coordinator,
    numbers_pipeline: Pipeline,
    assets_of: AssetsOf,
    materialize: Materialize,
    failure_of: FailureOf,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    s3 = S3Resource(
        endpoint_url=nowhere,
        region_name="us-east-1",
        max_attempts=1,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    result = materialize(assets_of(numbers_pipeline), coordinator(storage="s3://bucket/prefix", s3=s3))
    failure = failure_of(result)
    assert "s3://bucket/prefix" in failure.description
    assert nowhere in failure.description  # the cause, in boto3's words


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize("status", [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELED, None])
def test_a_second_run_is_refused_while_the_first_is_alive(
    status: dg.DagsterRunStatus | None,
    tmp_path: Path,
    coordinator: Coordinator,
    numbers_pipeline: Pipeline,
    assets_of: AssetsOf,
    materialize: Materialize,
    failure_of: FailureOf,
) -> None:
    with CheckpointStorage(open_store(str(tmp_path / "storage")), "numbers") as storage:
        ownership = storage.acquire(Owner(run_id="the-first-run", host="a-machine", pid=1), 9.0)
        renewer = LeaseRenewer(ownership, lambda error: None)
        renewer.start()
        try:
            with dg.DagsterInstance.ephemeral() as instance:
                if status is not None:  # else it was deleted
                    instance.add_run(dg.DagsterRun("numbers_job", "the-first-run", status=status))
                refused = materialize(assets_of(numbers_pipeline), coordinator(), instance=instance)
                lines = [entry.user_message for entry in instance.all_logs(refused.run_id)]
            failure = failure_of(refused)
        finally:
            renewer.stop(5.0)
        (waits,) = [line for line in lines if "watches the lease" in line]
        assert "owned by run the-first-run on host a-machine" in waits and "takes the pipeline over within 9 s" in waits
        assert "the-first-run" in failure.description
        assert failure.metadata["error"].value == "PipelineOwned"
        forced = "Dagster shows that run as CANCELED and cannot terminate it any more, but its process goes on: suspend it"
        assert (forced in failure.description) is (status is dg.DagsterRunStatus.CANCELED)
        deleted = (
            "This Dagster instance does not know that run: it was deleted, or is of another instance, but its process goes on"
        )
        assert (deleted in failure.description) is (status is None)
        state = storage.read_state()
        assert state is not None and state.lease is not None and state.lease.owner.run_id == "the-first-run"


@dg.asset(deps=["numbers"])
def between() -> None: ...


@dg.multi_asset(specs=[dg.AssetSpec("first"), dg.AssetSpec("last", deps=["middle"])], can_subset=True, name="ends")
def ends(context):
    yield from (dg.MaterializeResult(key) for key in context.selected_asset_keys)


@dg.asset(deps=["first"])
def middle() -> None: ...


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("deps", "others", "steps", "why"),
    [
        (
            {"total": ["between"]},
            [between],
            ["pipeline_op has 'doubled', 'numbers'", "pipeline_op_2 has 'total'"],
            "one reads and another depends on: between. Leave them out of the job, or out of deps=",
        ),
        (
            {"doubled": ["last"]},
            [ends, middle],
            ["pipeline_op has 'doubled', 'total'", "pipeline_op_2 has 'numbers'"],
            "Other assets of the job depend on each other so that it had to",
        ),
    ],
    ids=["an asset between two stages", "a division of another op"],
)
def test_a_job_in_which_dagster_divides_the_pipeline_is_refused(
    coordinator: Coordinator,
    numbers_pipeline: Pipeline,
    assets_of: AssetsOf,
    failure_of: FailureOf,
    deps: dict[str, list[str]],
    others: list[dg.AssetsDefinition],
    steps: list[str],
    why: str,
) -> None:
    assets = assets_of(numbers_pipeline, deps=deps)
    with dg.DagsterInstance.ephemeral() as instance:
        resources = {"checkpoint_coordinator": coordinator()}
        result = dg.materialize([assets, *others], resources=resources, raise_on_error=False, instance=instance)
        failure, run = failure_of(result), instance.get_run_by_id(result.run_id)
    assert failure.metadata["error"].value == "SelectionError"
    assert f"Dagster has divided them: {'; '.join(steps)}." in failure.description
    assert why in failure.description
    assert run is not None and run.tags[REFUSED] == "SelectionError"


@pytest.mark.usefixtures("no_spark")
def test_a_run_without_a_configured_storage_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    coordinator: Coordinator,
    numbers_pipeline: Pipeline,
    assets_of: AssetsOf,
    materialize: Materialize,
    failure_of: FailureOf,
) -> None:
    monkeypatch.delenv("CHECKPOINT_STORAGE", raising=False)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    failure = failure_of(materialize(assets_of(numbers_pipeline), coordinator(storage=None)))
    assert "CHECKPOINT_STORAGE" in failure.description


POSTGRES = "storage:\n  postgres:\n    postgres_url: postgresql://user:secret@nowhere.invalid/dagster\n"
KUBERNETES = "run_launcher:\n  module: dagster_k8s\n  class: K8sRunLauncher\n"
DOCKER = "run_launcher:\n  module: dagster_docker\n  class: DockerRunLauncher\n"
OLD_RUN_STORAGE = "run_storage:\n  module: dagster_mysql.run_storage\n  class: MySQLRunStorage\n"


@pytest.mark.parametrize(
    ("configuration", "found"),
    [
        (KUBERNETES, "its run launcher is K8sRunLauncher of dagster_k8s"),
        (DOCKER, "its run launcher is DockerRunLauncher of dagster_docker"),
        (POSTGRES, "its storage is DagsterPostgresStorage of dagster_postgres"),
        (KUBERNETES + POSTGRES, "K8sRunLauncher of dagster_k8s and its storage is DagsterPostgresStorage"),
        (OLD_RUN_STORAGE, "its run storage is MySQLRunStorage of dagster_mysql.run_storage"),
    ],
)
def test_a_dagster_on_several_machines_needs_a_configured_storage(
    configuration: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, numbers_pipeline: Pipeline
) -> None:
    """A directory in DAGSTER_HOME would vanish with the container of each run. The check does not need the packages."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.delenv("CHECKPOINT_STORAGE", raising=False)
    (tmp_path / "dagster.yaml").write_text(configuration)
    instance = _Instance(tmp_path)
    coordinator = CheckpointCoordinatorResource()
    with pytest.raises(NoStorageError) as refused:  # the call with which runs, sensors, schedules and savepoint assets begin
        coordinator.control(numbers_pipeline, instance=instance, asked_by="a test")
    assert found in str(refused.value)
    assert "CHECKPOINT_STORAGE" in str(refused.value) and "storage= of CheckpointCoordinatorResource" in str(refused.value)

    listed = CliRunner().invoke(app, ["list"])
    assert listed.exit_code == 2 and found in listed.stderr and "--storage" in listed.stderr

    assert CheckpointCoordinatorResource(storage="/elsewhere")._storage_url(instance) == "/elsewhere"
    monkeypatch.setenv("CHECKPOINT_STORAGE", "s3://bucket/prefix")
    assert coordinator._storage_url(instance) == "s3://bucket/prefix"


@pytest.mark.parametrize(
    "configuration",
    [
        None,
        "telemetry:\n  enabled: false\n",
        "storage:\n  sqlite:\n    base_dir: elsewhere\n",
        "run_coordinator:\n  module: dagster\n  class: QueuedRunCoordinator\n",
        "run_launcher:\n  module: dagster._core.launcher\n  class: DefaultRunLauncher\n",
        "run_monitoring:\n  enabled: true\n",
    ],
)
def test_a_dagster_on_one_machine_stores_in_its_home(
    configuration: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.delenv("CHECKPOINT_STORAGE", raising=False)
    if configuration is not None:
        (tmp_path / "dagster.yaml").write_text(configuration)
    assert CheckpointCoordinatorResource()._storage_url(_Instance(tmp_path)) == str(tmp_path / "checkpoints")
    listed = CliRunner().invoke(app, ["list"])
    assert str(tmp_path / "checkpoints") in listed.stderr and "run launcher" not in listed.stderr


class _Instance(dg.DagsterInstance):
    """An instance as in a run's process, without the packages of its components, which this test does not use."""

    def __init__(self, home: Path) -> None:
        self._instance_type = InstanceType.PERSISTENT
        self._ref = InstanceRef.from_dir(str(home))

    @property
    def root_directory(self) -> str:
        return str(self._ref.local_artifact_storage_data.config_dict["base_dir"])


def test_the_order_in_which_the_storage_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = CheckpointCoordinatorResource()._storage_url
    with dg.DagsterInstance.ephemeral() as instance:
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
        monkeypatch.setenv("CHECKPOINT_STORAGE", "s3://bucket/prefix")
        assert url(instance) == "s3://bucket/prefix"
        monkeypatch.delenv("CHECKPOINT_STORAGE")
        assert url(instance) == str(tmp_path / "checkpoints")
        assert CheckpointCoordinatorResource(storage="/elsewhere")._storage_url(instance) == "/elsewhere"


@pytest.mark.usefixtures("no_spark")
def test_a_pipeline_is_run_by_its_own_assets_only(
    coordinator: Coordinator, numbers_pipeline: Pipeline, materialize: Materialize, failure_of: FailureOf
) -> None:
    @dg.multi_asset(specs=[dg.AssetSpec("numbers")])
    def not_decorated(context, checkpoint_coordinator: CheckpointCoordinatorResource):
        yield from checkpoint_coordinator.run(numbers_pipeline, context=context)

    assert "@pipeline_assets" in failure_of(materialize(not_decorated, coordinator())).description


@pytest.mark.usefixtures("no_spark")
def test_a_function_that_yields_no_results_fails(coordinator: Coordinator, materialize: Materialize) -> None:
    """Dagster took the run of a single stage for a success, and nothing had run."""

    @bounded_source(sink=ParquetSink("/nowhere"))
    def alone(context): ...

    alone_pipeline = Pipeline("alone", [alone])

    @pipeline_assets(pipeline=alone_pipeline)
    def without_yield(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):
        checkpoint_coordinator.run(alone_pipeline, context=context)

    with pytest.raises(NotAPipelineAssetError, match=r"'without_yield' yields the results of run\(\) of pipeline 'alone'"):
        materialize(without_yield, coordinator(), raise_on_error=True)


@pytest.mark.usefixtures("no_spark")
def test_a_run_of_checks_alone_is_refused_and_is_no_run_of_the_pipeline(
    tmp_path: Path, coordinator: Coordinator, assets_of: AssetsOf, materialize: Materialize, failure_of: FailureOf
) -> None:
    """The page of a check offers to execute it; the rows of a commit are checked by the run that commits them."""

    def positive(rows: object) -> bool:
        return True

    @bounded_source(sink=ParquetSink(tmp_path / "sales"), checks=[positive])
    def sales(context):  # type: ignore[no-untyped-def]
        return context.spark.range(5)

    check = dg.AssetCheckKey(dg.AssetKey("sales"), "positive")
    with dg.DagsterInstance.ephemeral() as instance:
        assets = assets_of(Pipeline("sales_only", [sales]))
        result = materialize(assets, coordinator(), selection=dg.AssetSelection.checks(check), instance=instance)
        failure, run = failure_of(result), instance.get_run_by_id(result.run_id)
    assert "it has selected checks alone: sales:positive" in failure.description
    assert failure.metadata["error"].value == "NoStageSelectedError"
    assert run is not None and run.tags[REFUSED] == "NoStageSelectedError"


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize("selection", [["history", "copied", "live", "joined"], "*"], ids=["alone", "beside another step"])
def test_a_pipeline_without_an_end_warns_of_other_steps_in_its_run(
    coordinator: Coordinator, meeting_pipeline: Pipeline, assets_of: AssetsOf, selection: Any
) -> None:
    @dg.asset(deps=["joined"])
    def report() -> None: ...

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [assets_of(meeting_pipeline), report],
            selection=selection,
            resources={"checkpoint_coordinator": coordinator()},
            instance=instance,
            raise_on_error=False,
        )
        lines = [entry.user_message for entry in instance.all_logs(result.run_id)]
    warned = [line for line in lines if "has no end of its own, and this run has other steps, too: report" in line]
    assert len(warned) == (selection == "*")


@pytest.mark.parametrize("value", ["lates", "", "chk", "-1", "4 2", "s3:/b/p/x", -1, 4.2, True, None, ["latest"], {"id": 42}])
def test_an_invalid_restore_from_is_refused_before_launch(
    value: Any, coordinator: Coordinator, numbers_pipeline: Pipeline, assets_of: AssetsOf
) -> None:
    with pytest.raises(ValidationError, match="restore_from"):
        PipelineRunConfig(restore_from=value)
    with pytest.raises(dg.DagsterInvalidConfigError, match="restore_from"):
        dg.materialize(
            [assets_of(numbers_pipeline)],
            resources={"checkpoint_coordinator": coordinator()},
            run_config={"ops": {"pipeline_op": {"config": {"restore_from": value}}}},
        )


@pytest.mark.parametrize("value", ["latest", "none", "42", "chk-42", "chk-42-3", "checkpoints/chk-42-3", "s3://b/p/x"])
def test_valid_and_invalid_values_of_restore_from(value: str) -> None:
    assert PipelineRunConfig(restore_from=value).restore_from == value


def test_the_number_of_a_checkpoint_needs_no_quotes_in_the_launchpad(assets_of: AssetsOf, numbers_pipeline: Pipeline) -> None:
    given: Any = 42
    assert PipelineRunConfig(restore_from=given).restore_from == "42"
    assets = assets_of(numbers_pipeline)
    defs = dg.Definitions(
        assets=[assets],
        jobs=[dg.define_asset_job("numbers", dg.AssetSelection.assets(assets))],
        resources={"checkpoint_coordinator": CheckpointCoordinatorResource()},
    )
    config = {"ops": {"pipeline_op": {"config": {"restore_from": 42}}}}
    checked: Any = dg.validate_run_config(defs.resolve_job_def("numbers"), config)
    assert checked["ops"]["pipeline_op"]["config"]["restore_from"] == "42"


def test_an_unknown_setting_of_the_run_is_refused(
    coordinator: Coordinator, numbers_pipeline: Pipeline, assets_of: AssetsOf
) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError, match="restore_form"):
        dg.materialize(
            [assets_of(numbers_pipeline)],
            resources={"checkpoint_coordinator": coordinator()},
            run_config={"ops": {"pipeline_op": {"config": {"restore_form": "none"}}}},
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"interval": 0},
        {"timeout": -1},
        {"retained": 0},
        {"lease_seconds": 0},
        {"initial_delay": -1},
        {"max_concurrent": 0},
        {"restart_attempts": -1},
        {"restart_attempts": None},
        {"restart_attempts": None, "restart_strategy": "failure_rate"},
        {"restart_strategy": "exponential"},
        {"restart_delay_multiplier": 0.9},
        {"restart_delay_maximum": -1},
        {"restart_interval": -1},
        {"mode": "twice"},
        {"unaligned": True, "mode": "at_least_once"},
        {"max_concurrent": 2, "unaligned": True},
        {"aligned_checkpoint_timeout": 3.0, "unaligned": False},
        {"aligned_checkpoint_timeout": 3.0, "mode": "at_least_once"},
        {"aligned_checkpoint_timeout": 3.0, "max_concurrent": 2},
        {"interval_during_backlog": 1.0},
        {"backlog_rows": 100},
        {"batch_seconds": 0},
    ],
)
def test_settings_have_ranges(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        CheckpointCoordinatorResource(**settings)


@pytest.mark.parametrize(
    ("settings", "overtakes", "after"),
    [
        ({}, True, 0.25),
        ({"aligned_checkpoint_timeout": 3.0}, True, 3.0),
        ({"aligned_checkpoint_timeout": 0.0}, True, 0.0),
        ({"unaligned": True}, True, None),
        ({"unaligned": True, "aligned_checkpoint_timeout": 3.0}, True, 3.0),
        ({"unaligned": False}, False, None),
        ({"mode": "at_least_once"}, False, None),
        ({"max_concurrent": 2}, False, None),
    ],
)
def test_when_barriers_overtake(settings: dict[str, Any], overtakes: bool, after: float | None) -> None:
    found = resource._checkpoint_config(CheckpointCoordinatorResource(**settings))
    assert (found.unaligned, found.aligned_checkpoint_timeout) == (overtakes, after)


@pytest.mark.parametrize(
    ("kind", "misspelt", "meant"),
    [
        (CheckpointCoordinatorResource, {"savepoint_on_terminaton": True}, "savepoint_on_termination"),
        (CheckpointCoordinatorResource, {"intervall": 5}, "interval"),
        (PipelineRunConfig, {"restore_form": "none"}, "restore_from"),
        (SavepointConfig, {"sotp": "drain"}, "stop"),
        (SavepointRetention, {"made_by": "x", "prefix": "y", "max_agee": 5}, "max_age"),
        (SavepointCheckConfig, {"savepont": "x"}, "savepoint"),
    ],
)
def test_a_misspelt_setting_is_refused_and_the_nearest_is_named(kind: Any, misspelt: dict[str, Any], meant: str) -> None:
    name = list(misspelt)[-1]
    with pytest.raises(UnknownSettingError, match=rf"{kind.__name__} has no setting '{name}'. Did you mean '{meant}'"):
        kind(**misspelt)


@pytest.mark.parametrize("variable", [dg.EnvVar("SECONDS"), dg.EnvVar.int("SECONDS")], ids=["text", "int"])
@pytest.mark.parametrize("setting", ["interval", "retained", "share_java_classes", "batch_seconds", "timeout"])
def test_a_variable_where_no_text_is_expected_is_refused_by_name(setting: str, variable: Any) -> None:
    """It was read as its own name, or as 0."""
    found = rf"\({setting}=\.\.\.\): expected a value, found dg.EnvVar of 'SECONDS'.*os.environ\['SECONDS'\]"
    with pytest.raises(InvalidSettingError, match=found):
        CheckpointCoordinatorResource(**{setting: variable})
    CheckpointCoordinatorResource(storage=dg.EnvVar("STORAGE"), work_directory=dg.EnvVar("WORK"))


class Ours(CheckpointCoordinatorResource):
    """A subclass of the resource with an additional setting."""

    team: str = ""


def test_a_subclass_of_the_resource_may_add_settings() -> None:
    @dg.op
    def look(checkpoint_coordinator: Ours) -> str:
        return f"{checkpoint_coordinator.team} {checkpoint_coordinator.interval}"

    @dg.job
    def job() -> None:
        look()

    result = job.execute_in_process(resources={"checkpoint_coordinator": Ours(team="flights", interval=5.0)})
    assert result.output_for_node("look") == "flights 5.0"
    with pytest.raises(UnknownSettingError, match="Did you mean 'team'"):
        Ours(teem="flights")


def test_a_spark_setting_that_breaks_checkpoints_is_refused(coordinator: Coordinator) -> None:
    with pytest.raises(SparkSettingError, match=r"spark\.sql\.streaming\.noDataMicroBatches\.enabled"):
        coordinator(spark_config={"spark": {"sql": {"streaming": {"noDataMicroBatches": {"enabled": "false"}}}}})


@pytest.mark.parametrize("kind", [PySparkResource, LazyPySparkResource])
def test_a_spark_resource_gives_its_settings_and_no_session(
    kind: type[PySparkResource] | type[LazyPySparkResource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PySparkResource would create a session on Dagster's main thread."""
    monkeypatch.setattr("dagster_pyspark.resources.spark_session_from_config", lambda config: pytest.fail("a session"))
    seen: list[dict[str, str]] = []

    @dg.op
    def look(checkpoint_coordinator: CheckpointCoordinatorResource) -> None:
        seen.append(checkpoint_coordinator.spark_settings())

    @dg.job
    def job() -> None:
        look()

    nested = kind(spark_config={"spark": {"executor": {"memory": "3g"}}})
    settings = CheckpointCoordinatorResource(spark=nested, spark_config={"spark.master": "local[3]"})
    assert job.execute_in_process(resources={"checkpoint_coordinator": settings}).success
    assert seen[0]["spark.executor.memory"] == "3g"
    assert seen[0]["spark.master"] == "local[3]"
