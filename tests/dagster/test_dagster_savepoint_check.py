"""The asset check: which savepoint it reads, and its result for a damaged or unsuitable savepoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
import pytest

from dagster_checkpoints import (
    Pipeline,
    bounded_source,
    build_savepoint_check_sensor,
    savepoint_asset,
    savepoint_check,
    stage,
)
from dagster_checkpoints.plugin.event_metadata import address_metadata
from dagster_checkpoints.plugin.stage_assets import PIPELINE

Owner = Callable[..., Any]
Check = Callable[..., dg.AssetCheckEvaluation]
KEY = dg.AssetKey(["savepoints", "meeting"])
PARTITIONS = "savepoints_meeting"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def defs(meeting_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition], coordinator: Any) -> dg.Definitions:
    savepoints = savepoint_asset(pipeline=meeting_pipeline, assets=assets_of(meeting_pipeline))
    check = savepoint_check(pipeline=meeting_pipeline, savepoints=savepoints)
    job = dg.define_asset_job("check_savepoint", selection=dg.AssetSelection.checks(check))
    return dg.Definitions(
        assets=[savepoints],
        asset_checks=[check],
        jobs=[job],
        resources={"checkpoint_coordinator": coordinator()},
        executor=dg.in_process_executor,
    )


@pytest.fixture
def check(defs: dg.Definitions, instance: dg.DagsterInstance) -> Check:
    """Runs only the check, as a job."""

    def run(savepoint: str = "") -> dg.AssetCheckEvaluation:
        config = {"ops": {"savepoints__meeting_restorable": {"config": {"savepoint": savepoint}}}} if savepoint else None
        result = defs.resolve_job_def("check_savepoint").execute_in_process(instance=instance, run_config=config)
        (evaluation,) = result.get_asset_check_evaluations()
        return evaluation

    return run


def record(instance: dg.DagsterInstance, partition: str, taken: dict[str, Any]) -> None:
    instance.add_dynamic_partitions(PARTITIONS, [partition])
    metadata = {"location": taken["location"], "checkpoint": taken["checkpoint_id"]}
    instance.report_runless_asset_event(dg.AssetMaterialization(KEY, partition=partition, metadata=metadata))


def files_of(taken: dict[str, Any]) -> list[Path]:
    return sorted((Path(urlsplit(taken["url"]).path) / "state").iterdir())


def test_nothing_to_restore_from_is_a_warning_that_names_the_storage_and_what_was_there(
    check: Check, instance: dg.DagsterInstance
) -> None:
    evaluation = check()
    assert not evaluation.passed and evaluation.severity is dg.AssetCheckSeverity.WARN
    assert re.fullmatch(r"file://\S+/meeting holds no savepoint to restore from\.", str(evaluation.description))
    record(instance, "gone", {"location": "savepoints/gone", "checkpoint_id": 3})  # deleted, or made in another storage
    assert re.search(
        r"from\. The newest one that Dagster has recorded was at file:\S+/meeting/savepoints/gone\.", str(check().description)
    )


def test_the_newest_savepoint_is_read_from_any_directory(
    check: Check, owner: Owner, meeting_pipeline: Pipeline, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    running = owner(meeting_pipeline)
    running.take_savepoint(1)
    second = running.take_savepoint(2)
    evaluation = check()
    assert evaluation.passed
    assert evaluation.metadata["savepoint"] == dg.MetadataValue.path(urlsplit(second["url"]).path)
    assert evaluation.metadata["files"].value == 4
    assert evaluation.metadata["total_bytes"].value == sum(file.stat().st_size for file in files_of(second))

    elsewhere = running.take_savepoint(3, target=str(tmp_path / "elsewhere"))
    record(instance, "far", elsewhere)
    assert check().metadata["savepoint"] == address_metadata(elsewhere["url"])
    running.take_savepoint(4)
    assert check().metadata["checkpoint"].value == 4


def test_the_newest_savepoint_is_that_of_a_new_job_whose_ids_count_from_1_again(
    check: Check, owner: Owner, meeting_pipeline: Pipeline, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    running = owner(meeting_pipeline)
    record(instance, "drained", running.take_savepoint(500))  # of the job before
    far = running.take_savepoint(7, target=str(tmp_path / "elsewhere"))
    record(instance, "far", far)
    assert check().metadata["savepoint"] == address_metadata(far["url"])


def test_a_savepoint_that_was_deleted_is_not_the_newest(
    check: Check, owner: Owner, meeting_pipeline: Pipeline, instance: dg.DagsterInstance
) -> None:
    running = owner(meeting_pipeline)
    running.take_savepoint(1)
    deleted = running.take_savepoint(2)
    record(instance, "deleted", deleted)
    running.storage.open_savepoint(deleted["location"]).delete()
    assert check().metadata["checkpoint"].value == 1


def test_the_check_reads_the_savepoint_that_is_named(
    check: Check, owner: Owner, meeting_pipeline: Pipeline, instance: dg.DagsterInstance
) -> None:
    running = owner(meeting_pipeline)
    first = running.take_savepoint(1)
    running.take_savepoint(2)
    record(instance, "before-upgrade", first)
    for name in ("before-upgrade", first["location"], first["url"], urlsplit(first["url"]).path):
        assert check(name).metadata["checkpoint"].value == 1


def test_with_the_asset_the_check_reads_the_savepoint_just_taken(
    defs: dg.Definitions, owner: Owner, meeting_pipeline: Pipeline, instance: dg.DagsterInstance
) -> None:
    running = owner(meeting_pipeline)
    running.take_savepoint(7)
    running.answer_with_savepoints()  # from 1 again: older than the other, by its id
    running.serve_forever()
    instance.add_dynamic_partitions(PARTITIONS, ["now"])
    result = defs.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance, partition_key="now")
    (evaluation,) = result.get_asset_check_evaluations()
    assert evaluation.passed and evaluation.metadata["checkpoint"].value == 1


def test_the_sensor_checks_savepoints_that_the_asset_has_not_taken(
    defs: dg.Definitions,
    meeting_pipeline: Pipeline,
    owner: Owner,
    assets_of: Callable[..., dg.AssetsDefinition],
    coordinator: Any,
    instance: dg.DagsterInstance,
) -> None:
    """By the command line, a stop or a drain: the pipeline's own run records it, and no check runs with it."""
    savepoints = savepoint_asset(pipeline=meeting_pipeline, assets=assets_of(meeting_pipeline))
    check = savepoint_check(pipeline=meeting_pipeline, savepoints=savepoints)
    sensor = build_savepoint_check_sensor(pipeline=meeting_pipeline, savepoints=savepoints, check=check)
    defs = dg.Definitions(
        assets=[savepoints],
        asset_checks=[check],
        sensors=[sensor],
        resources={"checkpoint_coordinator": coordinator()},
        executor=dg.in_process_executor,
    )
    dg.Definitions.validate_loadable(defs)
    running = owner(meeting_pipeline)
    cursor: str | None = None

    def tick() -> list[dg.RunRequest]:
        nonlocal cursor
        with dg.build_sensor_context(instance=instance, cursor=cursor) as context:
            result = sensor.evaluate_tick(context)
        cursor = result.cursor
        return list(result.run_requests or [])

    def recorded_by_a_run(taken: dict[str, Any], tags: dict[str, str]) -> None:
        """Record a savepoint as the pipeline's own run does, or as the asset's run: the run's tags distinguish them."""

        @dg.op
        def record_it(context):  # type: ignore[no-untyped-def]
            name = taken["location"].rpartition("/")[2]
            instance.add_dynamic_partitions(PARTITIONS, [name])
            metadata = {"location": taken["location"], "checkpoint": taken["checkpoint_id"]}
            context.log_event(dg.AssetMaterialization(KEY, partition=name, metadata=metadata))

        @dg.job
        def recording() -> None:
            record_it()

        assert recording.execute_in_process(instance=instance, tags=tags).success

    assert tick() == []
    of_the_pipeline = {PIPELINE: "meeting"}
    recorded_by_a_run(running.take_savepoint(1, "earlier"), of_the_pipeline)
    first = running.take_savepoint(2, "by-hand")
    recorded_by_a_run(first, of_the_pipeline)
    earlier, request = tick()
    assert earlier.run_key != request.run_key
    recorded_by_a_run(running.take_savepoint(3, "by-the-asset"), {})  # its check has run with it
    second = running.take_savepoint(4, "of-the-drain")
    recorded_by_a_run(second, of_the_pipeline)
    (another,) = tick()
    assert tick() == [] and request.run_key != another.run_key
    recorded_by_a_run(running.take_savepoint(5, "beside"), {PIPELINE: "another_pipeline_of_the_run"})
    (newest,) = tick()
    cursor = None
    assert [request.run_key for request in tick()] == [newest.run_key], "at its first tick, the newest one"

    job = defs.resolve_job_def("meeting_savepoint_check_job")
    for asked, taken in ((request, first), (another, second)):
        result = job.execute_in_process(instance=instance, run_config=asked.run_config)
        (evaluation,) = result.get_asset_check_evaluations()
        assert evaluation.passed and evaluation.metadata["savepoint"] == address_metadata(taken["url"])


def test_a_damaged_savepoint_is_reported_with_its_files(check: Check, owner: Owner, meeting_pipeline: Pipeline) -> None:
    running = owner(meeting_pipeline)
    flipped, gone, *_ = files_of(running.take_savepoint(1))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(bytes(data))
    gone.unlink()
    evaluation = check()
    assert not evaluation.passed and evaluation.severity is dg.AssetCheckSeverity.ERROR
    problems = {problem.data["kind"]: problem.data for problem in evaluation.metadata["problems"].records}
    assert set(problems) == {"wrong_content", "missing_file"}
    assert flipped.name in str(problems["wrong_content"]["what"])
    assert gone.name in str(problems["missing_file"]["where"])
    assert "live[" in str(evaluation.description) and "2 problems" in str(evaluation.description)


def test_truncated_metadata_is_reported_as_an_error(check: Check, owner: Owner, meeting_pipeline: Pipeline) -> None:
    running = owner(meeting_pipeline)
    metadata = Path(urlsplit(running.take_savepoint(1)["url"]).path) / "_metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    evaluation = check()
    assert not evaluation.passed and evaluation.severity is dg.AssetCheckSeverity.ERROR
    assert evaluation.metadata["problems"].records[0].data["kind"] == "corrupt_metadata"


def test_a_missing_savepoint_is_an_error_and_an_invalid_name_a_failure(
    check: Check, owner: Owner, meeting_pipeline: Pipeline
) -> None:
    owner(meeting_pipeline).take_savepoint(1)
    evaluation = check("savepoints/savepoint-9-gone")
    assert not evaluation.passed
    assert evaluation.metadata["problems"].records[0].data["kind"] == "missing_metadata"
    with pytest.raises(dg.Failure, match="ftp"):
        check("ftp://somewhere/savepoint-1")


def test_a_savepoint_that_does_not_fit_the_pipeline_is_reported(
    owner: Owner, coordinator: Any, assets_of: Callable[..., dg.AssetsDefinition], meeting_pipeline: Pipeline
) -> None:
    owner(meeting_pipeline).take_savepoint(1)

    @bounded_source
    def history(context):  # type: ignore[no-untyped-def]
        return context.spark.range(5)

    @stage(sink=meeting_pipeline.stage("joined").sink)
    def joined(history):  # type: ignore[no-untyped-def]
        return history

    smaller = Pipeline("meeting", [history, joined])
    savepoints = savepoint_asset(pipeline=smaller, assets=assets_of(smaller))
    check = savepoint_check(pipeline=smaller, savepoints=savepoints)
    defs = dg.Definitions(
        assets=[savepoints],
        asset_checks=[check],
        jobs=[dg.define_asset_job("alone", selection=dg.AssetSelection.checks(check))],
        resources={"checkpoint_coordinator": coordinator()},
        executor=dg.in_process_executor,
    )
    (evaluation,) = defs.resolve_job_def("alone").execute_in_process().get_asset_check_evaluations()
    assert not evaluation.passed
    assert "'live'" in str(evaluation.description) and "allow_non_restored_state" in str(evaluation.description)
