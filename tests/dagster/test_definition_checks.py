"""Settings that prevent every start: refused where the resource is defined, or at start if their values are known only then."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource, PySparkResource

from dagster_checkpoints import CheckpointCoordinatorResource, Pipeline
from dagster_checkpoints.errors import InvalidStorageUrl
from dagster_checkpoints.plugin import resource
from dagster_checkpoints.spark.session.spark_session import SparkSettingError
from dagster_checkpoints.spark.session.work_directory import (
    RemoteDirectory,
    WorkDirectoryError,
    check_work_directory_named,
    parse_work_directory,
)

CLUSTER = {"spark.master": "spark://h:7077"}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"spark_config": CLUSTER}, WorkDirectoryError, "work_directory to be set, since Spark's master is spark://h:7077"),
        ({"spark_config": {"spark": {"master": "yarn"}}}, WorkDirectoryError, "Spark's master is yarn"),
        ({"spark": LazyPySparkResource(spark_config=CLUSTER)}, WorkDirectoryError, "Spark's master is spark://h:7077"),
        ({"spark": PySparkResource(spark_config=CLUSTER)}, WorkDirectoryError, "Spark's master is spark://h:7077"),
        ({"work_directory": "s3://bucket/work"}, WorkDirectoryError, "knows s3:// under the name s3a://"),
        ({"work_directory": "hdfs:/work"}, WorkDirectoryError, "found 'hdfs:/work': a URL has two slashes after hdfs:"),
        ({"work_directory": "gs://bucket/"}, WorkDirectoryError, "a path that is not empty"),
        ({"work_directory": "file:work"}, WorkDirectoryError, "three slashes and an absolute path"),
        ({"work_directory": "~no-such-user/work"}, WorkDirectoryError, "no-such-user"),
        ({"work_directory": ""}, WorkDirectoryError, "it is empty"),
        ({"storage": "hdfs:/x"}, InvalidStorageUrl, r"not supported \(hdfs:\)"),
        ({"storage": "s3:b"}, InvalidStorageUrl, "two slashes: s3://b"),
        (
            {"spark_config": {"spark.sql.streaming.minBatchesToRetain": 1}},
            SparkSettingError,
            "minBatchesToRetain=1: expected at least 2",
        ),
        ({"spark_config": {"spark.sql.streaming.minBatchesToRetain": "few"}}, SparkSettingError, "minBatchesToRetain=few"),
        ({"spark_config": {"spark.scheduler.mode": "FIFO"}}, SparkSettingError, "checkpoints need spark.scheduler.mode=FAIR"),
        (
            {"spark_config": {"spark.sql.streaming.queryEvolution.enableSourceEvolution": True}},
            SparkSettingError,
            "enableSourceEvolution=true: checkpoints need spark.sql.streaming.queryEvolution.enableSourceEvolution=false",
        ),
        (
            {"spark_config": {"spark.sql.streaming.statefulOperator.allowMultiple": False}},
            SparkSettingError,
            "allowMultiple=false: checkpoints need spark.sql.streaming.statefulOperator.allowMultiple=true",
        ),
        (
            {"spark_config": {"spark": {"sql": {"streaming": {"stateStore": {"rocksDB": {"trackTotalNumberOfRows": False}}}}}}},
            SparkSettingError,
            "need spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows=true",
        ),
        (
            {"spark_config": {"spark.sql.streaming.internal.stateStore.partitions": 5}},
            SparkSettingError,
            "expected that it is not set. It would replace the number of state partitions",
        ),
        (
            {"spark_config": {"spark.sql.streaming.numRecentProgressUpdates": 1}},
            SparkSettingError,
            "numRecentProgressUpdates=1: expected at least 2. Spark keeps one less",
        ),
        ({"spark_config": {"spark.remote": "sc://h"}}, SparkSettingError, "Spark Connect is not supported"),
    ],
)
def test_a_configuration_with_which_no_run_can_start_is_refused_at_its_definition(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CheckpointCoordinatorResource(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"spark_config": {"spark.master": "local"}},
        {"spark_config": {"spark.master": "local-cluster[2,1,1024]"}},
        {"spark_config": {"spark.sql.streaming.minBatchesToRetain": 2}},
        {"spark_config": CLUSTER, "work_directory": "/shared"},
        {"spark_config": CLUSTER, "work_directory": dg.EnvVar("WORK")},
        {"spark_config": {"spark.master": dg.EnvVar("MASTER")}},
        {"spark": LazyPySparkResource(spark_config=CLUSTER), "spark_config": {"spark.master": "local[2]"}},
        {"storage": dg.EnvVar("CHECKPOINT_STORAGE")},
        {"storage": "relative/path"},
        {"storage": "backup:2024"},
        {"storage": "S3://bucket"},
    ],
)
def test_valid_settings_and_those_not_known_yet_are_accepted(settings: dict[str, Any]) -> None:
    CheckpointCoordinatorResource(**settings)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/shared/work", "/shared/work"),
        ("file:///shared/with%20space", "/shared/with space"),
        ("FILE:///shared", "/shared"),
        ("~/work", os.path.expanduser("~/work")),
        ("work", "work"),
        ("a:b", "a:b"),
    ],
)
def test_ways_to_name_a_work_directory(text: str, path: str) -> None:
    assert parse_work_directory(text) == Path(path).absolute()


def test_a_work_directory_may_be_on_any_file_system_that_spark_reaches() -> None:
    for url in (
        "hdfs://namenode:8020/work",
        "hdfs:///work",
        "s3a://bucket/work",
        "abfss://c@a.dfs.core.windows.net/w",
        "viewfs://x/w",
    ):
        assert parse_work_directory(url) == RemoteDirectory(url)
    assert parse_work_directory("gs://bucket/work/") / "here" == RemoteDirectory("gs://bucket/work/here")


def test_executors_elsewhere_do_not_see_the_default_work_directory() -> None:
    for master in ("spark://h:7077", "yarn", "k8s://https://h:6443"):
        check_work_directory_named(master, named=True)
        with pytest.raises(WorkDirectoryError, match="under the same path"):
            check_work_directory_named(master, named=False)


@pytest.mark.parametrize(
    ("variables", "settings", "message"),
    [
        ({"WORK": "gs://bucket"}, {"work_directory": dg.EnvVar("WORK")}, "a path that is not empty"),
        ({"STORAGE": "s3:/b"}, {"storage": dg.EnvVar("STORAGE")}, "two slashes: s3://b"),
        ({"STORAGE": ""}, {"storage": dg.EnvVar("STORAGE")}, "found '': it is empty"),
    ],
)
def test_the_value_of_a_variable_is_checked_when_the_run_starts(
    variables: dict[str, str],
    settings: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    coordinator: Callable[..., CheckpointCoordinatorResource],
    numbers_pipeline: Pipeline,
    assets_of: Callable[..., dg.AssetsDefinition],
    materialize: Callable[..., dg.ExecuteInProcessResult],
) -> None:
    monkeypatch.setattr(resource, "build_session", lambda config: pytest.fail("Spark was started"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dg.DagsterResourceFunctionError) as raised:
        materialize(assets_of(numbers_pipeline), coordinator(**settings), raise_on_error=True)
    assert message in str(raised.value.__cause__)


@pytest.mark.parametrize("nested", [True, False])
def test_spark_settings_may_be_variables(
    nested: bool, monkeypatch: pytest.MonkeyPatch, coordinator: Callable[..., CheckpointCoordinatorResource]
) -> None:
    """Dagster hands them to a run as `{"env": ...}`: it knows nothing of the settings of Spark."""
    chosen = {"spark.master": dg.EnvVar("MASTER"), "spark.sql.shuffle.partitions": dg.EnvVar.int("PARTITIONS")}
    given: dict[str, Any] = {"spark": {"master": chosen["spark.master"]}} if nested else chosen
    found: dict[str, str] = {}

    define = dg.op(name="read", required_resource_keys={"of_spark"})
    read = define(lambda context: found.update(context.resources.of_spark.spark_settings()))

    @dg.job(resource_defs={"of_spark": coordinator(spark_config=given)})
    def reading() -> None:
        read()

    monkeypatch.setenv("PARTITIONS", "7")
    with pytest.raises(SparkSettingError, match=r"spark\.master: expected its value in the environment variable MASTER"):
        reading.execute_in_process()
    monkeypatch.setenv("MASTER", "local[3]")
    assert reading.execute_in_process().success
    assert found["spark.master"] == "local[3]"
    assert nested or found["spark.sql.shuffle.partitions"] == "7"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ("in_a_variable", None, 1, "local[3]")),
        ({}, ("in_a_variable", None, 1, "local[3]")),
        ({"retained": 2}, ("in_a_variable", None, 2, "local[3]")),
        ({"interval": 5.0, "storage": {"env": "OTHER"}}, ("other", 5.0, 1, "local[3]")),
        ({"spark_config": {"spark.master": "local[1]"}}, ("in_a_variable", None, 1, "local[1]")),
    ],
)
def test_a_run_that_replaces_some_settings_keeps_the_others(
    named: dict[str, Any] | None, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's own schema gives the others their defaults: the run would begin from nothing, in another storage, in silence."""
    monkeypatch.setenv("STORAGE", "in_a_variable")
    monkeypatch.setenv("OTHER", "other")
    defined = CheckpointCoordinatorResource(
        storage=dg.EnvVar("STORAGE"), interval=None, spark_config={"spark.master": "local[3]"}
    )
    found: list[CheckpointCoordinatorResource] = []
    read = dg.op(name="read", required_resource_keys={"settings"})(lambda context: found.append(context.resources.settings))

    @dg.job(resource_defs={"settings": defined})
    def reading() -> None:
        read()

    assert reading.execute_in_process({} if named is None else {"resources": {"settings": {"config": named}}}).success
    (settings,) = found
    assert (settings.storage, settings.interval, settings.retained, settings.spark_settings()["spark.master"]) == expected


def test_settings_of_spark_from_a_resource_and_beside_it_are_joined_by_name() -> None:
    cluster = LazyPySparkResource(spark_config={"spark": {"master": "local[2]", "driver": {"memory": "8g"}}})
    settings = CheckpointCoordinatorResource(spark=cluster, spark_config={"spark": {"driver": {"memory": "4g"}}}).spark_settings()
    assert (settings["spark.master"], settings["spark.driver.memory"]) == ("local[2]", "4g")


def test_the_work_directory_of_a_run(coordinator: Callable[..., CheckpointCoordinatorResource], tmp_path: Path) -> None:
    """Pipelines of one name on two storages have different work directories, also in buckets of one name at two endpoints."""
    from dagster_checkpoints.files.s3 import S3Store, create_client
    from dagster_checkpoints.storage import CheckpointStorage, open_store

    clients = [create_client(endpoint_url=f"http://localhost:{port}", region_name="us-east-1") for port in (9000, 9001)]
    stores = [open_store(str(tmp_path / name)) for name in "ab"] + [S3Store("bucket", "prefix", client=each) for each in clients]
    storages = [CheckpointStorage(store, "numbers") for store in stores]
    found = {coordinator(work_directory=tmp_path.as_uri())._work_directories(storage)[0] for storage in storages}
    assert len(found) == 4 and {path.parent for path in found} == {tmp_path}
    work, scratch = coordinator(work_directory=None)._work_directories(storages[0])
    assert work == scratch and scratch.is_relative_to(tempfile.gettempdir())
    work, elsewhere = coordinator(work_directory="hdfs://h:8020/work")._work_directories(storages[0])
    assert work == RemoteDirectory(f"hdfs://h:8020/work/{scratch.name}") and elsewhere == scratch
