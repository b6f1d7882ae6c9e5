"""The tags of a run: one that does not end by itself is not terminated for its age, and a recovery keeps the user's tags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._core.test_utils import instance_for_test
from dagster._daemon.monitoring.run_monitoring import check_run_timeout

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    bounded_source,
    build_pipeline_defs,
    stage,
    unbounded_source,
)
from dagster_checkpoints.plugin.runs import RETRY_NUMBER, repeated_tags, time_limit_tags
from dagster_checkpoints.plugin.stage_assets import REFUSED
from dagster_checkpoints.storage import CheckpointStorage, open_store


@pytest.fixture
def live_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("live")

    @unbounded_source
    def ticks(context):
        return context.spark.readStream.format("rate").option("rowsPerSecond", 5).load()

    @stage(sink=ParquetSink(folder / "copies"))
    def copies(ticks):
        return ticks

    return Pipeline("live", [ticks, copies])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"dagster/max_runtime": "0"}),
        ({"dagster/max_runtime": "3600"}, {}),
        ({"dagster/max_runtime_seconds": "3600"}, {}),
    ],
)
def test_a_run_that_does_not_end_by_itself_has_no_limit_but_the_users(
    live_pipeline: Pipeline, numbers_pipeline: Pipeline, given: dict[str, str], expected: dict[str, str]
) -> None:
    assert time_limit_tags(live_pipeline, given, "end") == expected
    assert time_limit_tags(live_pipeline, given, "caught_up") == {}
    assert time_limit_tags(numbers_pipeline, given, "end") == {}


def test_a_recovery_repeats_the_users_tags() -> None:
    users = {"team": "sales", "dagster/max_runtime": "60", "dagster/priority": "3", "dagster_checkpoints/pipeline": "live"}
    dagsters = {"dagster/run_key": "x", "dagster/sensor_name": "s", ".dagster/repository": "r", "dagster/root_run_id": "1"}
    assert repeated_tags({**users, **dagsters, REFUSED: "PipelineOwned"}) == users


def test_dagsters_monitor_leaves_a_live_run_alone(
    live_pipeline: Pipeline, coordinator: Callable[..., CheckpointCoordinatorResource]
) -> None:
    """The tag that a real run gets, and what Dagster's own check of ``run_monitoring.max_runtime_seconds`` does with it."""
    defs = build_pipeline_defs(live_pipeline, coordinator=coordinator(), drain_when=lambda rows: rows.get("copies", 0) > 0)
    job = defs.resolve_job_def("live_job")
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(instance=instance)
        run = instance.get_run_by_id(done.run_id)
        assert done.success and run is not None
        for tags, expected in ((run.tags, dg.DagsterRunStatus.STARTED), ({}, dg.DagsterRunStatus.FAILURE)):
            other = instance.create_run_for_job(job, tags=dict(tags))
            instance.report_dagster_event(
                dg.DagsterEvent(event_type_value="PIPELINE_START", job_name=job.name), run_id=other.run_id
            )
            record = instance.get_run_record_by_id(other.run_id)
            assert record is not None
            check_run_timeout(instance, record, logging.getLogger("test"), default_timeout_seconds=1e-9)
            after = instance.get_run_by_id(other.run_id)
            assert after is not None and after.status is expected


def test_dagster_does_not_retry_a_refused_run(
    tmp_path: Path, coordinator: Callable[..., CheckpointCoordinatorResource], assets_of: Callable[..., dg.AssetsDefinition]
) -> None:
    """Its retry would start the pipeline when the owner is terminated. Of a retry that is refused, the owner may be dead."""

    @bounded_source(sink=ParquetSink(tmp_path / "sales"), checks=[positive])
    def sales(context):
        return context.spark.range(5)

    assets = assets_of(Pipeline("sales_only", [sales]))
    checks_alone = dg.AssetSelection.checks(dg.AssetCheckKey(dg.AssetKey("sales"), "positive"))

    def tags_of_a_failed_run(
        instance: dg.DagsterInstance, tags: Mapping[str, str], selection: dg.AssetSelection | None = checks_alone
    ) -> Mapping[str, str]:
        resources = {"checkpoint_coordinator": coordinator(storage="/proc/no/storage")}
        result = dg.materialize(
            [assets], resources=resources, raise_on_error=False, selection=selection, instance=instance, tags=dict(tags)
        )
        run = instance.get_run_by_id(result.run_id)
        assert run is not None and run.status is dg.DagsterRunStatus.FAILURE
        return run.tags

    with instance_for_test(overrides={"run_retries": {"enabled": True, "max_retries": 2}}) as instance:
        refused = tags_of_a_failed_run(instance, {})
        assert (refused[REFUSED], refused["dagster/will_retry"]) == ("NoStageSelectedError", "false")
        retry = tags_of_a_failed_run(instance, {RETRY_NUMBER: "1"})
        assert (retry[REFUSED], retry["dagster/will_retry"]) == ("NoStageSelectedError", "true")
        again = tags_of_a_failed_run(instance, refused, None)
        assert (again[REFUSED], again["dagster/will_retry"]) == ("", "true"), "a person has launched it again, and it began"


def positive(rows: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("broken"), "FAILED"), (DagsterExecutionInterruptedError(), "CANCELED")],
)
def test_the_job_of_a_run_that_fails_has_failed_and_is_no_cancelled_one(
    live_pipeline: Pipeline, coordinator: Callable[..., CheckpointCoordinatorResource], error: BaseException, status: str
) -> None:
    """The check `healthy` is red for a failed job only."""

    def breaks(rows: Mapping[str, int]) -> bool:
        raise error

    settings = coordinator(interval=0.5)
    defs = build_pipeline_defs(live_pipeline, coordinator=settings, drain_when=breaks)
    with suppress(DagsterExecutionInterruptedError):
        assert not defs.resolve_job_def(f"{live_pipeline.name}_job").execute_in_process(raise_on_error=False).success
    with CheckpointStorage(open_store(str(settings.storage)), live_pipeline.name) as storage:
        state = storage.read_state()
    assert state is not None and (state.lease, state.job.status) == (None, status)
