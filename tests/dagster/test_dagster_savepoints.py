"""The savepoint asset: materializing it, its metadata and refusals; savepoints of other requesters; deletion by a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dagster as dg
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints import ParquetSink, Pipeline, PipelineRunConfig, bounded_source, savepoint_asset
from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.errors import StorageUnavailable
from dagster_checkpoints.files.urls import local_path
from dagster_checkpoints.plugin.savepoints import asset
from dagster_checkpoints.plugin.savepoints.metadata import TRIGGERED, read_savepoint, resume_metadata
from dagster_checkpoints.plugin.savepoints.recording import SavepointAsset, is_recorded_by_asker, record_savepoint, request_of
from dagster_checkpoints.plugin.savepoints.retention import RecordedSavepoint, SavepointRetention, delete_expired, expired
from dagster_checkpoints.spark.job.events import CheckpointDone, SavepointDone
from dagster_checkpoints.storage import CheckpointStorage

Owner = Callable[..., Any]
Take = Callable[..., dg.ExecuteInProcessResult]
KEY = dg.AssetKey(["savepoints", "meeting"])
OP = "savepoints__meeting"
PARTITIONS = "savepoints_meeting"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def savepoints(meeting_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]) -> dg.AssetsDefinition:
    return savepoint_asset(pipeline=meeting_pipeline, assets=assets_of(meeting_pipeline))


@pytest.fixture
def running(owner: Owner, meeting_pipeline: Pipeline) -> Any:
    """A run that answers every request for a savepoint."""
    made = owner(meeting_pipeline)
    made.answer_with_savepoints()
    made.serve_forever()
    return made


@pytest.fixture
def take(savepoints: dg.AssetsDefinition, instance: dg.DagsterInstance, coordinator: Callable[..., Any]) -> Take:
    """Materializes a partition, as the dialog does: it adds the partition first."""

    def materialize(partition: str | None, tags: Mapping[str, str] | None = None, **config: Any) -> dg.ExecuteInProcessResult:
        if partition is not None:
            instance.add_dynamic_partitions(PARTITIONS, [partition])
        return dg.materialize(
            [savepoints],
            partition_key=partition,
            tags=tags,
            instance=instance,
            resources={"checkpoint_coordinator": coordinator()},
            run_config={"ops": {OP: {"config": config}}} if config else None,
            raise_on_error=False,
        )

    return materialize


def recorded(instance: dg.DagsterInstance, partition: str) -> dict[str, Any]:
    """The metadata of a partition's materialization."""
    wanted = dg.AssetRecordsFilter(asset_key=KEY, asset_partitions=[partition])
    (record,) = instance.fetch_materializations(wanted, limit=5).records
    assert record.asset_materialization is not None
    return {name: value.value for name, value in record.asset_materialization.metadata.items()}


def test_materializing_takes_a_savepoint_and_shows_what_it_holds(running: Any, take: Take, instance: dg.DagsterInstance) -> None:
    result = take("before-upgrade")
    assert result.success
    (request,) = running.requests
    assert (request.kind, request.name, request.target) == ("savepoint", "before-upgrade", "")
    assert request.recorded_by_asker and request.asked_by == f"run {result.run_id}"
    assert request.request_id == request_of(result.run_id)

    shown = recorded(instance, "before-upgrade")
    (stored,) = running.storage.list_savepoints()
    assert shown["path"] == str(local_path(stored.url)) and stored.url.startswith("file://")
    assert shown["location"] == stored.location
    assert (shown["checkpoint"], shown["pipeline"], shown["run"]) == (1, "meeting", "run-1")
    assert (shown["trigger"], shown["duration_seconds"]) == ("request", 1.5)
    assert (shown["files"], shown["spark_version"], shown["format_version"]) == (4, "4.3.0", 1)
    rows = {record.data["stage"]: record.data for record in shown["stages"].records}
    assert [rows[name]["state"] for name in ("history", "copied", "live", "joined")] == [
        "finished",
        "finished",
        "running",
        "running",
    ]
    assert rows["live"]["offsets"] == 'left: {"logOffset":11}; right: {"logOffset":22}'
    assert rows["live"]["instances"] == 2 and rows["live"]["rows"] == 7
    assert rows["live"]["bytes"] == shown["total_bytes"] > 0 and rows["live"]["files"] == 4
    assert rows["joined"]["bytes"] == 0
    assert rows["copied"]["offsets"] == "in the query of history"
    assert f"restore_from: {stored.location}" in shown["run_config"]


def test_a_savepoint_does_not_wait_in_a_pool_for_the_run_that_it_is_taken_of(
    meeting_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    assets = assets_of(meeting_pipeline, pool="spark")
    assert savepoint_asset(pipeline=meeting_pipeline, assets=assets, pool="savepoints").op.pool == "savepoints"
    with pytest.raises(ValueError, match=r"savepoint_asset\(pool='spark'\) of pipeline 'meeting': expected another pool"):
        savepoint_asset(pipeline=meeting_pipeline, assets=assets, pool="spark")
    assert savepoint_asset(pipeline=meeting_pipeline, assets=assets_of(meeting_pipeline)).op.pool is None


def test_a_run_of_several_partitions_is_refused(running: Any, take: Take, instance: dg.DagsterInstance) -> None:
    """Dagster's dialog offers one run for a range of partitions."""
    instance.add_dynamic_partitions(PARTITIONS, ["first", "second"])
    result = take(None, tags={"dagster/asset_partition_range_start": "first", "dagster/asset_partition_range_end": "second"})
    assert not result.success and running.requests == []
    data = result.failure_data_for_node(OP)
    assert data is not None and data.user_failure_data is not None
    assert "those from 'first' to 'second': a partition is one savepoint" in str(data.user_failure_data.description)


@pytest.mark.parametrize(("stop", "drain"), [("suspend", False), ("drain", True)])
def test_a_savepoint_can_stop_the_pipeline_and_be_stored_in_another_directory(
    running: Any, take: Take, instance: dg.DagsterInstance, tmp_path: Path, stop: str, drain: bool
) -> None:
    assert take("last", stop=stop, path=str(tmp_path / "backup"), deadline=30.0).success
    (request,) = running.requests
    assert (request.kind, request.drain, request.deadline_seconds) == ("stop", drain, 30.0)
    shown = recorded(instance, "last")
    assert shown["trigger"] == stop
    assert Path(shown["path"]).as_uri() == shown["location"]
    assert Path(shown["path"]).parent == tmp_path / "backup"
    assert Path(shown["path"], "_metadata").exists()


def test_the_description_has_the_configuration_of_a_stop(take: Take, savepoints: dg.AssetsDefinition, running: Any) -> None:
    description = savepoints.descriptions_by_key[KEY]
    shown = yaml.safe_load(description.partition("```yaml\n")[2].partition("```")[0])
    assert take("last", **shown["ops"][OP]["config"]).success
    assert running.requests[0].kind == "stop" and not running.requests[0].drain


def test_a_savepoint_is_never_replaced(
    running: Any, take: Take, instance: dg.DagsterInstance, failure_of: Callable[..., Any]
) -> None:
    assert take("daily").success
    failure = failure_of(take("daily"))
    assert "'daily'" in failure.description and "another key" in failure.description
    assert recorded(instance, "daily")["location"] in failure.description
    assert len(running.requests) == 1


def test_a_failed_savepoint_may_be_repeated_under_its_key(
    owner: Owner, meeting_pipeline: Pipeline, take: Take, instance: dg.DagsterInstance, failure_of: Callable[..., Any]
) -> None:
    failure = failure_of(take("daily"))
    assert "not running" in failure.description and "never run here" in failure.description
    assert failure.metadata["error"].value == "NoRunningPipeline"
    assert instance.has_dynamic_partition(PARTITIONS, "daily")  # the user's own savepoint

    running = owner(meeting_pipeline)
    running.answers["savepoint"] = lambda request: running.failed(request, "CHECKPOINT_EXPIRED", "after 600 s")
    running.serve_forever()
    failure = failure_of(take("daily"))
    assert "after 600 s" in failure.description
    assert failure.metadata["reason"].value == "CHECKPOINT_EXPIRED"
    running.answer_with_savepoints()
    assert take("daily").success


def retried(run: dg.ExecuteInProcessResult) -> dict[str, str]:
    """The tags with which Dagster retries a run."""
    return {"dagster/parent_run_id": run.run_id, "dagster/root_run_id": run.run_id, "dagster/retry_number": "1"}


def test_a_retry_of_a_run_that_died_after_its_request_does_not_stop_the_pipeline_again(
    owner: Owner, meeting_pipeline: Pipeline, take: Take, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Any:
        raise RuntimeError("the process has died")

    first = owner(meeting_pipeline)
    first.answer_with_savepoints()
    first.serve_forever()
    with monkeypatch.context() as patched:
        patched.setattr("dagster_checkpoints.plugin.savepoints.asset._wait", dies)
        died = take("before-upgrade", stop="suspend")
    assert not died.success
    PipelineControl(first.storage, asked_by="a test").handle(request_of(died.run_id)).wait(30)
    first.end("FINISHED", ended_by="suspend")
    second = owner(meeting_pipeline, "run-2")
    second.answer_with_savepoints()
    second.serve_forever()
    assert take("before-upgrade", tags=retried(died), stop="suspend").success
    assert second.requests == []
    assert recorded(instance, "before-upgrade")["checkpoint"] == 1
    again = {name: value for name, value in retried(died).items() if name != "dagster/retry_number"}
    assert not take("before-upgrade", tags=again, stop="suspend").success, "a person's re-execution takes another one"


def test_a_retry_of_a_failed_savepoint_requests_another_one(running: Any, take: Take, instance: dg.DagsterInstance) -> None:
    running.answers["savepoint"] = lambda request: running.failed(request, "CHECKPOINT_EXPIRED", "after 600 s")
    failed = take("again")
    assert not failed.success
    running.answer_with_savepoints()
    assert take("again", tags=retried(failed)).success
    assert len({request.request_id for request in running.requests}) == 2


def test_a_key_that_cannot_be_a_name_is_refused(running: Any, take: Take, failure_of: Callable[..., Any]) -> None:
    assert "savepoint's name" in failure_of(take("before upgrade/1")).description


def test_a_savepoint_whose_stop_failed_is_kept_and_shown(
    owner: Owner, meeting_pipeline: Pipeline, take: Take, instance: dg.DagsterInstance, failure_of: Callable[..., Any]
) -> None:
    running = owner(meeting_pipeline)
    running.answers["stop"] = lambda request: running.failed(
        request, "CHECKPOINT_COORDINATOR_SHUTDOWN", "a commit raised", **running.take_savepoint(3, request.name)
    )
    running.serve_forever()
    failure = failure_of(take("last", stop="suspend"))
    assert "a commit raised" in failure.description
    assert recorded(instance, "last")["checkpoint"] == 3
    assert failure.metadata["savepoint"].value == recorded(instance, "last")["path"]


def test_without_a_partition_the_savepoint_gets_a_name(running: Any, take: Take, instance: dg.DagsterInstance) -> None:
    assert take(None).success
    (partition,) = instance.get_dynamic_partitions(PARTITIONS)
    assert partition.startswith("savepoint-1-")
    assert recorded(instance, partition)["location"] == f"savepoints/{partition}"


def test_a_savepoint_whose_metadata_cannot_be_read_now_is_recorded(
    monkeypatch: pytest.MonkeyPatch, running: Any, take: Take, instance: dg.DagsterInstance
) -> None:
    def unreachable(self: CheckpointStorage, location: str) -> None:
        raise StorageUnavailable("the bucket is on the moon.")

    monkeypatch.setattr(CheckpointStorage, "open_savepoint", unreachable)
    assert take("daily").success
    assert recorded(instance, "daily")["checkpoint"] == 1


# Savepoints that were taken in other ways


@pytest.fixture
def record(instance: dg.DagsterInstance, meeting_pipeline: Pipeline, tmp_path: Path) -> Callable[[SavepointDone], str]:
    """Reports a savepoint in a run of the pipeline."""

    def report(event: SavepointDone) -> str:
        partitions = []

        @dg.asset(name="pipeline_op")
        def a_stage(context):  # type: ignore[no-untyped-def]
            from dagster_checkpoints.storage import open_store

            def storage() -> CheckpointStorage:
                return CheckpointStorage(open_store(str(tmp_path / "storage")), "meeting")

            partitions.append(record_savepoint(context, meeting_pipeline, event, storage))

        a_stage_result = dg.materialize([a_stage], instance=instance)
        assert a_stage_result.success
        return partitions[0]

    return report


def done(number: int, location: str, **fields: Any) -> SavepointDone:
    checkpoint = CheckpointDone(number, location, ("live",), (), 0.5, 0.1, 0.2, 0.0, 100, 200, {})
    values: dict[str, Any] = {"stops": "", "request_id": "r", "asked_by": "me@host", "recorded_by_asker": False, **fields}
    return SavepointDone(location=location, checkpoint=checkpoint, **values)


def test_savepoints_that_the_asset_has_not_taken_are_partitions_as_well(
    owner: Owner, meeting_pipeline: Pipeline, record: Any, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    running = owner(meeting_pipeline)
    location = running.take_savepoint(4, "by-hand")["location"]
    partition = record(done(4, location, stops="suspend"))
    assert location == f"savepoints/{partition}"
    assert instance.get_dynamic_partitions(PARTITIONS) == [partition]
    shown = recorded(instance, partition)
    assert (shown["checkpoint"], shown["trigger"], shown["asked_by"]) == (4, "suspend", "me@host")
    assert "pipeline_op" in shown["run_config"]

    elsewhere = running.take_savepoint(5, "far", str(tmp_path / "far away"))["location"]
    assert elsewhere.startswith("file://")
    assert record(done(5, elsewhere)) == elsewhere.rpartition("/")[2]


@pytest.mark.parametrize(
    ("status", "itself"),
    [("STARTED", True), ("CANCELING", False), ("CANCELED", False), ("FAILURE", False), (None, True)],
)
def test_a_savepoint_whose_run_was_terminated_is_recorded_by_the_pipelines_run(
    instance: dg.DagsterInstance, status: str | None, itself: bool
) -> None:
    """Its request goes on. Without a record Dagster does not show the savepoint, although it may have stopped the pipeline."""
    asker = dg.DagsterRun("take", status=dg.DagsterRunStatus(status or "STARTED"))
    if status is not None:  # else of another Dagster instance
        instance.add_run(asker)
    event = done(4, "savepoints/x", stops="drain", request_id=request_of(asker.run_id), recorded_by_asker=True)
    assert is_recorded_by_asker(instance, event) is itself
    assert not is_recorded_by_asker(instance, done(4, "savepoints/x"))


def test_recording_never_fails_the_run(record: Any, instance: dg.DagsterInstance) -> None:
    partition = record(done(9, "savepoints/savepoint-9-gone"))
    shown = recorded(instance, partition)
    assert (shown["checkpoint"], shown["total_bytes"], shown["location"]) == (9, 200, "savepoints/savepoint-9-gone")


def test_the_asset_of_a_code_location_is_found_under_its_own_key(
    meeting_pipeline: Pipeline, numbers_pipeline: Pipeline, assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    mine = savepoint_asset(pipeline=meeting_pipeline, assets=assets_of(meeting_pipeline), key_prefix=["prod", "kept"])
    defs = dg.Definitions(assets=[mine], resources={"checkpoint_coordinator": 1})
    context: Any = SimpleNamespace(repository_def=defs.get_repository_def())
    found = SavepointAsset.of(context, meeting_pipeline)
    assert found == SavepointAsset(dg.AssetKey(["prod", "kept", "meeting"]), "prod/kept/meeting")
    assert SavepointAsset.of(context, numbers_pipeline).key == dg.AssetKey(["savepoints", "numbers"])


# Resuming from a savepoint


@pytest.fixture
def resume(
    owner: Owner, meeting_pipeline: Pipeline, instance: dg.DagsterInstance, assets_of: Callable[..., dg.AssetsDefinition]
) -> Callable[..., Any]:
    """The metadata about resuming, for a pipeline that a job of this name has run."""
    from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

    running = owner(meeting_pipeline)
    savepoint = read_savepoint(running.storage, running.take_savepoint(2, "x")["location"])
    assets = assets_of(meeting_pipeline)
    job = dg.define_asset_job("nightly", selection=dg.AssetSelection.assets(assets))
    another = _another()
    wider = dg.define_asset_job("a_wider_one", selection=dg.AssetSelection.assets(assets, another))
    resources = {"checkpoint_coordinator": 1}
    repositories = {
        has_job: dg.Definitions(
            assets=[assets, another], jobs=[job, wider] if has_job else [wider], resources=resources
        ).get_repository_def()
        for has_job in (True, False)
    }

    def make(
        job_name: str, repository: str = "__repository__", selection: frozenset[dg.AssetKey] | None = None, has_job: bool = True
    ) -> tuple[Any, Any, str]:
        origin = RemoteJobOrigin(RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("the location"), repository), job_name)
        defaults = PipelineRunConfig().model_dump()  # as the launchpad fills them in
        config = {
            "ops": {"pipeline_op": {"config": {**defaults, "restore_from": "none", "allow_older_checkpoint": True}}},
            "resources": {"checkpoint_coordinator": {"config": {"interval": 1.0}}},
        }
        with dg.DagsterInstance.ephemeral() as other:
            other.add_run(
                dg.DagsterRun(
                    job_name=job_name, run_id="run-1", run_config=config, remote_job_origin=origin, asset_selection=selection
                )
            )
            context: Any = SimpleNamespace(instance=other, repository_def=repositories[has_job])
            shown = resume_metadata(context, savepoint, assets)
        text = shown["resume"].value if "resume" in shown else ""
        link = urlsplit(text[text.index("(") + 1 : text.index(")")]) if text else None
        return link, yaml.safe_load(shown["run_config"].value.strip("`").removeprefix("yaml")), savepoint.location

    return make


def _another() -> dg.AssetsDefinition:
    @dg.asset
    def another() -> None: ...

    return another


def test_the_link_opens_the_launchpad_of_the_job_that_ran_the_pipeline(resume: Callable[..., Any]) -> None:
    link, config, location = resume("some_job")
    assert link.path == "/locations/the%20location/jobs/some_job/playground/setup"
    assert yaml.safe_load(parse_qs(link.query)["config"][0]) == config
    assert config == {"ops": {"pipeline_op": {"config": {"restore_from": location, "allow_older_checkpoint": True}}}}
    assert resume("some_job", "a_repository")[0].path.startswith("/locations/a_repository@the%20location/jobs/")


def test_the_link_takes_a_job_of_the_users_instead_of_dagsters_own(resume: Callable[..., Any]) -> None:
    """The launchpad of Dagster's own job ignores a link's configuration, and offers all assets."""
    everything = frozenset(dg.AssetKey(name) for name in ("history", "live", "copied", "joined"))
    link, _, _ = resume("__ASSET_JOB", selection=everything)
    assert "/jobs/nightly/" in link.path
    assert set(parse_qs(link.query)) == {"config"}
    link, _, _ = resume("__ASSET_JOB", selection=frozenset({dg.AssetKey("joined")}))
    assert parse_qs(link.query)["assetSelection[0][assetKey][path][0]"] == ["joined"]
    link, config, location = resume("__ASSET_JOB", has_job=False)
    assert link is None
    assert config["ops"]["pipeline_op"]["config"]["restore_from"] == location


# Deletion by a schedule

AGES = st.lists(st.integers(0, 100), min_size=1, max_size=12, unique=True)


@given(AGES, st.none() | st.integers(1, 12), st.none() | st.integers(1, 100))
def test_the_newest_is_always_kept_and_the_rest_by_number_and_age(
    ages: list[int], count: int | None, max_age: int | None
) -> None:
    made = [RecordedSavepoint(f"p-{age}", f"l-{age}", 1000.0 - age) for age in ages]
    retention = SavepointRetention(made_by="s", prefix="p-", count=count, max_age=max_age)
    newest = max(made, key=lambda savepoint: savepoint.triggered)
    deleted = {one.partition for one in expired([each for each in made if each is not newest], newest, retention)}
    kept = sorted(age for age in ages if f"p-{age}" not in deleted)
    assert kept[0] == min(ages)
    assert count is None or len(kept) <= count
    assert max_age is None or all(age - min(ages) <= max_age for age in kept)
    wanted = [age for age in sorted(ages)[: count or len(ages)] if max_age is None or age - min(ages) <= max_age]
    assert kept == wanted


@given(AGES, AGES, st.none() | st.integers(1, 12), st.none() | st.integers(1, 100))
def test_savepoints_of_a_later_time_than_the_one_just_taken_are_kept_and_count_for_nothing(
    ages: list[int], later: list[int], count: int | None, max_age: int | None
) -> None:
    """The clock was set back: the schedule would delete what it has just taken, or all that it takes until then."""
    newest = RecordedSavepoint("p-newest", "l-newest", 1000.0)
    made = [RecordedSavepoint(f"p-{age}", f"l-{age}", 999.0 - age) for age in ages]
    future = [RecordedSavepoint(f"p-later-{age}", f"l-later-{age}", 1001.0 + age) for age in later]
    retention = SavepointRetention(made_by="s", prefix="p-", count=count, max_age=max_age)
    assert expired([*future, *made], newest, retention) == expired(made, newest, retention)


def test_a_schedule_keeps_the_savepoint_that_it_has_taken_after_the_clock_was_set_back(
    running: Any, take: Take, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        assert take(periodic(number), **scheduled(number)).success

    def an_hour_less(recorded: dg.AssetMaterialization, name: str) -> Any:
        value = recorded.metadata.get(name)
        return None if value is None else value.value + 3600 if name == TRIGGERED else value.value

    monkeypatch.setattr("dagster_checkpoints.plugin.savepoints.retention._value", an_hour_less)
    assert take(periodic(3), **scheduled(3)).success
    assert recorded(instance, periodic(3))["location"] in {each.location for each in running.storage.list_savepoints()}


def scheduled(number: int, **changes: Any) -> dict[str, Any]:
    return {"retention": {"made_by": "hourly", "prefix": "periodic-", "count": 2, **changes}}


def periodic(number: int) -> str:
    return f"periodic-20260504T03020{number}Z"


def test_a_schedule_deletes_no_partition_of_another_pipelines_savepoints(instance: dg.DagsterInstance) -> None:
    """Dagster's dynamic partitions have a name, which all assets of the instance share."""

    def shop(context: Any) -> Any: ...

    source = bounded_source(sink=ParquetSink("/nowhere"))(shop)
    asset = SavepointAsset.named(Pipeline("shop", [source]), ["savepoints", "eu"])
    other = SavepointAsset.named(Pipeline("eu_shop", [source]))
    instance.add_dynamic_partitions(other.partitions, ["periodic-20260101T000000Z"])
    context: Any = SimpleNamespace(instance=instance, log=logging.getLogger(__name__))
    storage: Any = SimpleNamespace(list_savepoints=lambda: (), read_state=lambda: None)
    newest = RecordedSavepoint("periodic-20260101T010000Z", "savepoints/2", 3600.0)
    delete_expired(context, storage, asset, SavepointRetention(made_by="hourly", prefix="periodic-", count=1), newest)
    assert instance.get_dynamic_partitions(other.partitions) == ["periodic-20260101T000000Z"]


def test_a_schedule_deletes_only_its_own_old_savepoints(running: Any, take: Take, instance: dg.DagsterInstance) -> None:
    assert take("by-hand").success
    assert take(periodic(0), retention={"made_by": "another", "prefix": "periodic-", "count": 2}).success
    instance.add_dynamic_partitions(
        PARTITIONS, ["periodic-notes", periodic(1)]
    )  # a user's savepoint, and one of a tick that failed
    for number in (2, 3, 4):
        assert take(periodic(number), **scheduled(number)).success
    assert set(instance.get_dynamic_partitions(PARTITIONS)) == {
        "by-hand",
        "periodic-notes",
        periodic(0),
        periodic(3),
        periodic(4),
    }
    there = {savepoint.checkpoint_id for savepoint in running.storage.list_savepoints()}
    assert there == {1, 2, 4, 5}
    assert recorded(instance, periodic(4))["made_by"] == "hourly"
    assert recorded(instance, periodic(4))["asked_by"] == "schedule hourly"
    assert recorded(instance, periodic(2))["checkpoint"] == 3  # the record of deleted savepoints stays


def test_a_savepoint_that_a_restart_would_need_is_kept(running: Any, take: Take, instance: dg.DagsterInstance) -> None:
    assert take(periodic(1), **scheduled(1, count=1)).success
    location = recorded(instance, periodic(1))["location"]
    running.ownership.complete(9, location, kind="savepoint")  # the pipeline was restored from it
    assert take(periodic(2), **scheduled(2, count=1)).success
    assert take(periodic(3), **scheduled(3, count=1)).success
    assert set(instance.get_dynamic_partitions(PARTITIONS)) == {periodic(1), periodic(3)}
    assert location in {savepoint.location for savepoint in running.storage.list_savepoints()}


def test_savepoints_that_were_deleted_before_are_skipped(running: Any, take: Take, instance: dg.DagsterInstance) -> None:
    for number in (1, 2):
        assert take(periodic(number), **scheduled(number)).success
    running.storage.open_savepoint(recorded(instance, periodic(1))["location"]).delete()
    assert take(periodic(3), **scheduled(3)).success
    assert set(instance.get_dynamic_partitions(PARTITIONS)) == {periodic(2), periodic(3)}


def test_a_failed_savepoint_leaves_no_partition(take: Take, instance: dg.DagsterInstance) -> None:
    assert not take(periodic(1), **scheduled(1)).success
    assert instance.get_dynamic_partitions(PARTITIONS) == []


def test_a_savepoint_has_a_partition_although_another_run_has_deleted_it(
    running: Any, take: Take, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed run of which this one is the retry (`run_retries`), for example."""
    taking = asset._take

    def deleted_meanwhile(*given: Any) -> Any:
        instance.delete_dynamic_partition(PARTITIONS, periodic(0))
        return taking(*given)

    with monkeypatch.context() as patched:
        patched.setattr(asset, "_take", deleted_meanwhile)
        assert take(periodic(0), **scheduled(0)).success
    assert instance.get_dynamic_partitions(PARTITIONS) == [periodic(0)]
    for number in (1, 2):
        assert take(periodic(number), **scheduled(number)).success
    assert len(running.storage.list_savepoints()) == 2  # without its partition the first one would be stored for ever


@pytest.mark.parametrize(("status", "kept"), [(dg.DagsterRunStatus.STARTED, True), (dg.DagsterRunStatus.FAILURE, False)])
def test_the_partition_of_an_earlier_tick_stays_while_its_run_may_take_the_savepoint(
    running: Any, take: Take, instance: dg.DagsterInstance, status: dg.DagsterRunStatus, kept: bool
) -> None:
    """Or its savepoint would be in no partition, and would never be deleted."""
    instance.add_dynamic_partitions(PARTITIONS, [periodic(1)])
    instance.add_run(dg.DagsterRun("hourly_job", status=status, tags={"dagster/partition": periodic(1)}))
    assert take(periodic(2), **scheduled(2)).success
    assert instance.has_dynamic_partition(PARTITIONS, periodic(1)) is kept


def test_a_savepoint_whose_run_was_deleted_in_dagster_is_told_once(
    running: Any, take: Take, instance: dg.DagsterInstance
) -> None:
    first = take(periodic(1), **scheduled(1))
    location = recorded(instance, periodic(1))["location"]
    instance.delete_run(first.run_id)
    for number, told in ((2, 1), (3, 0)):
        messages = [entry.user_message for entry in instance.all_logs(take(periodic(number), **scheduled(number)).run_id)]
        assert sum(f"{location} has no record in Dagster any more" in message for message in messages) == told
    assert location in {stored.location for stored in running.storage.list_savepoints()}


def test_deletion_that_fails_does_not_fail_the_savepoint(
    monkeypatch: pytest.MonkeyPatch, running: Any, take: Take, instance: dg.DagsterInstance
) -> None:
    for number in (1, 2):
        assert take(periodic(number), **scheduled(number)).success

    def unreachable(self: CheckpointStorage) -> None:
        raise StorageUnavailable("the bucket is on the moon.")

    with monkeypatch.context() as patched:
        patched.setattr("dagster_checkpoints.storage.savepoints.SavepointDirectory.delete", unreachable)
        assert take(periodic(3), **scheduled(3)).success
    assert len(instance.get_dynamic_partitions(PARTITIONS)) == 3
    assert take(periodic(4), **scheduled(4)).success
    assert set(instance.get_dynamic_partitions(PARTITIONS)) == {periodic(3), periodic(4)}


def test_the_assets_description_explains_its_use(savepoints: dg.AssetsDefinition) -> None:
    (spec,) = savepoints.specs
    assert spec.key == KEY and spec.group_name == "savepoints"
    assert [dep.asset_key for dep in spec.deps] == [
        dg.AssetKey("joined")
    ]  # the lineage links it to the last stages of its pipeline
    assert "add a partition" in str(spec.description)
