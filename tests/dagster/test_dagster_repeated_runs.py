"""The start point of a retry or re-execution whose configuration names a checkpoint; and which pipeline owns a storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run_iterator
from dagster._core.storage.tags import PARENT_RUN_ID_TAG, RETRY_NUMBER_TAG, ROOT_RUN_ID_TAG
from dagster._core.utils import make_new_run_id

from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    ParquetSink,
    Pipeline,
    pipeline_assets,
    stage,
    unbounded_source,
)
from dagster_checkpoints.execution.pipeline_state import Job, Owner, PipelineState
from dagster_checkpoints.execution.start_point import is_repeated_start
from dagster_checkpoints.plugin import resource
from dagster_checkpoints.plugin.runs import RECOVERS, earlier_runs, retried_runs
from dagster_checkpoints.plugin.stage_assets import FINISHED_BEFORE, REFUSED
from dagster_checkpoints.spark.errors import NothingToRestoreError
from dagster_checkpoints.spark.job.events import CheckpointDone, JobStarted, SavepointDone
from dagster_checkpoints.storage import CheckpointStorage, open_store

Coordinator = Callable[..., CheckpointCoordinatorResource]


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A persistent Dagster instance: its id distinguishes it from others."""
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as made:
        yield made


class Runs:
    """Runs of a live pipeline in this process. Each fails as soon as it has reached its purpose."""

    def __init__(self, folder: Path, coordinator: CheckpointCoordinatorResource, instance: dg.DagsterInstance) -> None:
        @unbounded_source
        def live(context):  # type: ignore[no-untyped-def]
            return context.spark.readStream.schema("id long").json(str(folder / "input"))

        @stage(sink=ParquetSink(folder / "squares"))
        def squares(live):  # type: ignore[no-untyped-def]
            return live.selectExpr("id * id AS id")

        self.pipeline = Pipeline("numbers", [live, squares])
        self._folder, self._coordinator, self._instance = folder, coordinator, instance
        self._files = 0
        (folder / "input").mkdir()

    def run(self, restore_from: str = "latest", *, savepoint: bool = False, repeats: tuple[str, ...] = ()) -> dict[str, Any]:
        """A run that reads a new file, and fails after its first checkpoint, or after a savepoint. Returns its events.

        Args:
            repeats: The runs that it repeats, the first one first: Dagster's run retries and re-executions have these tags.
        """
        self._files += 1
        new = self._folder / "input" / f".{self._files}"
        new.write_text(json.dumps({"id": self._files}) + "\n")
        new.rename(new.with_name(f"{self._files}.json"))
        seen: dict[str, Any] = {}

        def on_event(event: Any) -> None:
            match event:
                case JobStarted():
                    seen["from"] = event.restored_location
                case SavepointDone():
                    seen["savepoint"] = event.location
                    raise RuntimeError("the run breaks off here")
                case CheckpointDone() if "checkpoint" not in seen:
                    seen["checkpoint"] = event.location
                    if not savepoint:
                        raise RuntimeError("the run breaks off here")
                    control = self._coordinator.control(self.pipeline, instance=self._instance, asked_by="a test")
                    control.savepoint(name="here")

        @pipeline_assets(pipeline=self.pipeline)
        def live_op(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):  # type: ignore[no-untyped-def]
            yield from checkpoint_coordinator.run(self.pipeline, context=context, on_event=on_event)

        tags = {}
        if repeats:
            tags = {ROOT_RUN_ID_TAG: repeats[0], PARENT_RUN_ID_TAG: repeats[-1], RETRY_NUMBER_TAG: str(len(repeats))}
        result = dg.materialize(
            [live_op],
            resources={"checkpoint_coordinator": self._coordinator},
            run_config={"ops": {"live_op": {"config": {"restore_from": restore_from}}}},
            instance=self._instance,
            tags=tags,
            raise_on_error=False,
        )
        assert "checkpoint" in seen, [event.message for event in result.all_events]
        with self._coordinator.checkpoint_storage(self.pipeline, instance=self._instance) as storage:
            state = storage.read_state()
            assert state is not None and state.newest is not None
            seen["newest"] = state.newest.location  # one more may have completed while the run failed
        seen["run"] = result.run_id
        seen["log"] = "\n".join(entry.user_message for entry in self._instance.all_logs(result.run_id))
        return seen


def test_a_retry_continues_and_does_not_restore_the_savepoint_that_its_first_run_named(
    tmp_path: Path,
    coordinator: Coordinator,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    materialize: Callable[..., dg.ExecuteInProcessResult],
    failure_of: Callable[..., Any],
) -> None:
    runs = Runs(tmp_path, coordinator(interval=0.5), instance)
    before = runs.run(savepoint=True)
    assert before["from"] is None
    named = before["savepoint"]

    first = runs.run(named)
    assert first["from"] == named
    retry = runs.run(named, repeats=(first["run"],))
    assert retry["from"] == first["newest"] != named
    assert f"Run {first['run']}, which this run repeats, has begun job 1 there" in retry["log"]
    assert "launch a new run instead of a retry or re-execution" in retry["log"]
    second_retry = runs.run(named, repeats=(first["run"], retry["run"]))
    assert second_retry["from"] == retry["newest"]

    # A launched run, which repeats no run, starts where its configuration says.
    assert runs.run(named)["from"] == named

    # Another pipeline of the name, in another Dagster, on the same storage: refused before Spark starts.
    monkeypatch.setattr(resource, "build_session", lambda config: pytest.fail("Spark was started"))
    other_home = tmp_path / "other"
    other_home.mkdir()
    (other_home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")

    @unbounded_source(sink=ParquetSink(tmp_path / "invoices"))
    def invoices(context):  # type: ignore[no-untyped-def]
        return context.spark.readStream.schema("id long").json(str(tmp_path / "input"))

    billing = Pipeline("numbers", [invoices])

    @pipeline_assets(pipeline=billing)
    def billing_op(context: dg.AssetExecutionContext, checkpoint_coordinator: CheckpointCoordinatorResource):  # type: ignore[no-untyped-def]
        yield from checkpoint_coordinator.run(billing, context=context)

    with dg.DagsterInstance.from_config(str(other_home)) as other:
        result = materialize(billing_op, coordinator(), instance=other)
        refused = failure_of(result)
        run = other.get_run_by_id(result.run_id)
    assert refused.metadata["error"].value == "PipelineNameTaken"
    assert run is not None and run.tags[REFUSED] == "PipelineNameTaken"
    for part in ("'numbers'", "with the assets invoices", "with the assets live, squares", "allow_moved_pipeline: true"):
        assert part in refused.description


def state(begun_by: str, **job: Any) -> PipelineState:
    return PipelineState(pipeline="x", epoch=1, token="t", job=Job(job_id=3, begun_by=begun_by, **job))


@pytest.mark.parametrize(
    ("restore_from", "begun_by", "repeated"),
    [
        ("42", "root", True),
        ("none", "root", True),  # a new start is not repeated either
        ("42", "sibling", True),
        ("latest", "root", False),
        ("42", "another", False),  # no run of this chain has begun the job
        ("42", "", False),  # an earlier release did not record it
    ],
)
def test_a_start_is_repeated_if_an_earlier_run_of_the_retries_has_begun_it(
    restore_from: str, begun_by: str, repeated: bool
) -> None:
    chain = {"root", "sibling"}
    assert is_repeated_start(restore_from, chain, state(begun_by, status="FAILED")) is repeated
    assert is_repeated_start(restore_from, chain, state(begun_by, status="FINISHED", ended_by="suspend")) is repeated
    assert is_repeated_start(restore_from, (), state(begun_by, status="FAILED")) is False
    if repeated:
        with pytest.raises(NothingToRestoreError, match="job 3 there, and that job is FINISHED"):
            is_repeated_start(restore_from, chain, state(begun_by, status="FINISHED", ended_by="drain"))


def test_a_recovery_repeats_the_runs_that_it_recovers_in_its_turn(instance: dg.DagsterInstance) -> None:
    """Whatever the sensor knew when it launched the run: the progress after a named checkpoint is not lost."""
    first, second, deleted = (make_new_run_id() for _ in range(3))
    for run_id, tags in ((first, {RECOVERS: deleted}), (second, {RECOVERS: first})):
        instance.add_run(dg.DagsterRun(job_name="nightly", run_id=run_id, tags=tags))
    third = dg.DagsterRun(job_name="nightly", run_id=make_new_run_id(), tags={RECOVERS: second})
    context: Any = SimpleNamespace(run=third, instance=instance)
    assert earlier_runs(context) == {third.run_id, second, first, deleted}


def test_a_recovery_repeats_the_runs_that_dagsters_retry_which_it_recovers_has_repeated(instance: dg.DagsterInstance) -> None:
    """The first run has begun the job; its retry failed before a checkpoint, so the recovery still names that start."""
    first, retry = make_new_run_id(), make_new_run_id()
    of_retries = {ROOT_RUN_ID_TAG: first, PARENT_RUN_ID_TAG: first}
    instance.add_run(dg.DagsterRun(job_name="nightly", run_id=first))
    instance.add_run(dg.DagsterRun(job_name="nightly", run_id=retry, root_run_id=first, parent_run_id=first, tags=of_retries))
    recovery = dg.DagsterRun(job_name="nightly", run_id=make_new_run_id(), tags={RECOVERS: retry})
    context: Any = SimpleNamespace(run=recovery, instance=instance)
    assert earlier_runs(context) == {recovery.run_id, first, retry}
    again = dg.DagsterRun(
        job_name="nightly",
        run_id=make_new_run_id(),
        tags={RECOVERS: retry},
        root_run_id=recovery.run_id,
        parent_run_id=recovery.run_id,
    )
    context = SimpleNamespace(run=again, instance=instance)
    assert earlier_runs(context) == {again.run_id, first, retry, recovery.run_id}


def test_a_run_that_dagster_resumes_on_another_worker_repeats_itself(instance: dg.DagsterInstance) -> None:
    """The op begins again in the same run, and does not know it: its number of retries is 0."""
    begun: list[tuple[int, frozenset[str]]] = []

    @dg.asset
    def numbers(context):  # type: ignore[no-untyped-def]
        begun.append((context.retry_number, earlier_runs(context)))

    definitions = dg.Definitions(assets=[numbers], jobs=[dg.define_asset_job("nightly", executor_def=dg.in_process_executor)])
    job = definitions.resolve_job_def("nightly")
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)  # and its first worker was lost
    for _ in execute_run_iterator(InMemoryJob(job), run, instance, resume_from_failure=True):
        pass
    assert begun == [(0, frozenset({run.run_id}))]


def test_runs_that_no_person_has_launched_again(instance: dg.DagsterInstance) -> None:
    """A person's run, and Dagster's retry of it; the recovery of that one, and Dagster's retry of the recovery."""
    root, again, retry, recovery, last = (make_new_run_id() for _ in range(5))
    made = {
        root: dg.DagsterRun("nightly", root),
        again: dg.DagsterRun("nightly", again, parent_run_id=root, root_run_id=root),
        retry: dg.DagsterRun("nightly", retry, parent_run_id=again, root_run_id=root, tags={RETRY_NUMBER_TAG: "1"}),
        recovery: dg.DagsterRun("nightly", recovery, tags={RECOVERS: retry}),
        last: dg.DagsterRun(
            "nightly", last, parent_run_id=recovery, root_run_id=recovery, tags={RECOVERS: retry, RETRY_NUMBER_TAG: "1"}
        ),
    }
    for run in made.values():
        instance.add_run(run)

    def repeated_by(run: dg.DagsterRun) -> frozenset[str]:
        context: Any = SimpleNamespace(run=run, instance=instance, retry_number=0)
        return retried_runs(context)

    assert repeated_by(made[again]) == {again}
    assert repeated_by(made[last]) == {again, retry, recovery, last}
    by_hand = dg.DagsterRun("nightly", make_new_run_id(), parent_run_id=last, root_run_id=root, tags={RECOVERS: retry})
    assert repeated_by(by_hand) == {by_hand.run_id}
    instance.delete_run(again)
    assert repeated_by(made[last]) == {again, retry, recovery, last}


def end_job(storage: Path, run_id: str, **end: Any) -> None:
    """What a run leaves in storage that has brought the job to its end."""
    with CheckpointStorage(open_store(str(storage)), "numbers") as pipeline:
        ownership = pipeline.acquire(Owner(run_id=run_id, host="a-machine", pid=1), 9.0)
        ownership.begin_job(resume=False)
        ownership.end_job("FINISHED", **end)
        ownership.release()


@pytest.mark.parametrize("way", ["run_retries", "recovery", "in the same run"])
def test_a_retry_of_a_run_that_had_brought_the_job_to_its_end_begins_no_other_job(
    tmp_path: Path,
    coordinator: Coordinator,
    numbers_pipeline: Pipeline,
    assets_of: Callable[[Pipeline], dg.AssetsDefinition],
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """The first run died when its job had ended, before Dagster knew of it. A new start would write all rows again."""
    monkeypatch.setattr(resource, "build_session", lambda *args, **options: pytest.fail("Spark was started"))
    first, own = make_new_run_id(), make_new_run_id()
    end_job(tmp_path / "storage", own if way == "in the same run" else first, ended_by="drain")
    of_retry = {PARENT_RUN_ID_TAG: first, ROOT_RUN_ID_TAG: first, RETRY_NUMBER_TAG: "1"}
    tags = {"run_retries": of_retry, "recovery": {RECOVERS: first}}.get(way, {})
    definitions = dg.Definitions([assets_of(numbers_pipeline)], resources={"checkpoint_coordinator": coordinator()})
    job = definitions.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(instance=instance, tags=tags, run_id=own)
    ends = result.asset_materializations_for_node("pipeline_op")
    assert [end.asset_key.to_user_string() for end in ends] == ["numbers", "doubled", "total"]
    assert {(end.metadata["job"].value, end.metadata[FINISHED_BEFORE].value) for end in ends} == {(1, True)}
    log = [entry.user_message for entry in instance.all_logs(own)]
    assert any("which this run repeats, has brought job 1 to its end: all its rows are committed" in line for line in log)
    with CheckpointStorage(open_store(str(tmp_path / "storage")), "numbers") as storage:
        state = storage.read_state()
    assert state is not None and (state.job.job_id, state.job.status, state.lease) == (1, "FINISHED", None)


@pytest.mark.parametrize("asked_by", ["request", "caught_up"])
def test_a_retry_of_a_run_that_was_suspended_on_request_does_not_continue_the_job(
    tmp_path: Path,
    coordinator: Coordinator,
    numbers_pipeline: Pipeline,
    assets_of: Callable[[Pipeline], dg.AssetsDefinition],
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    asked_by: Any,
) -> None:
    """The first run died, or could not write its end into Dagster's storage, after the suspend that a person had asked for."""
    monkeypatch.setattr(resource, "build_session", lambda *args, **options: pytest.fail("Spark was started"))
    first, retry = make_new_run_id(), make_new_run_id()
    end_job(tmp_path / "storage", first, ended_by="suspend", stop_asked_by=asked_by)
    tags = {PARENT_RUN_ID_TAG: first, ROOT_RUN_ID_TAG: first, RETRY_NUMBER_TAG: "1"}
    definitions = dg.Definitions([assets_of(numbers_pipeline)], resources={"checkpoint_coordinator": coordinator()})
    job = definitions.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(instance=instance, tags=tags, run_id=retry)
    assert result.success and not result.asset_materializations_for_node("pipeline_op"), "no stage has finished"
    log = [entry.user_message for entry in instance.all_logs(retry)]
    assert any(f"Run {first}, which this run repeats, had suspended job 1" in line for line in log)
    with CheckpointStorage(open_store(str(tmp_path / "storage")), "numbers") as storage:
        state = storage.read_state()
    assert state is not None and (state.job.ended_by, state.job.stop_asked_by, state.lease) == ("suspend", asked_by, None)
