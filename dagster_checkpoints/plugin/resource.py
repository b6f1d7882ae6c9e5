"""`CheckpointCoordinatorResource`: the settings of storage, checkpoints and Spark, and the run of a pipeline.

Every process has its own copy of the resource: only storage is authoritative. It must not know the content of a checkpoint.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import dagster as dg
from dagster_aws.s3 import S3Resource
from dagster_pyspark import LazyPySparkResource, PySparkResource
from pydantic import Field, ValidationInfo, field_validator, model_validator

from dagster_checkpoints.control.metrics import check_metrics_available
from dagster_checkpoints.control.pipeline_control import PipelineControl
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.errors import InvalidCheckpointConfig
from dagster_checkpoints.coordination.restarts import (
    ExponentialDelayRestart,
    FailoverStrategy,
    FailureRateRestart,
    FixedDelayRestart,
    NoRestart,
    RestartStrategy,
)
from dagster_checkpoints.definitions.instance import shared_parts
from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.execution.source_limits import BATCH_SECONDS
from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.input_assets import input_assets
from dagster_checkpoints.plugin.interrupts import interrupts_delayed
from dagster_checkpoints.plugin.run_config import PipelineRunConfig
from dagster_checkpoints.plugin.runs import (
    cleared_tags,
    earlier_runs,
    has_no_end,
    origin_of,
    other_steps,
    retried_runs,
    tag_refusal,
    time_limit_tags,
)
from dagster_checkpoints.plugin.settings import (
    KnownSettings,
    check_definition,
    flat_settings,
    refuse_unknown,
    replacing_schema,
    run_settings,
)
from dagster_checkpoints.plugin.stage_assets import PIPELINE, StageAssets
from dagster_checkpoints.spark.job.job_options import JobOptions
from dagster_checkpoints.spark.session.spark_session import build_session, session_config
from dagster_checkpoints.spark.session.work_directory import RemoteDirectory, check_work_directory_named, parse_work_directory
from dagster_checkpoints.state.claim import ClaimMode
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.root import storage_root

if TYPE_CHECKING:
    from dagster_checkpoints.spark.job.events import JobEvent
    from dagster_checkpoints.spark.job.job_execution import JobExecution


class CheckpointCoordinatorResource(KnownSettings, dg.ConfigurableResource):
    """Runs pipelines under consistent checkpoints, and holds their settings. In YAML None is `null`.

    Raises:
        pydantic.ValidationError: A setting is outside its range.
        UnknownSettingError: There is no setting of that name, also of `spark` or `s3`; the error names the nearest one.
        InvalidStorageUrl: `storage` is a URL of a kind that is not supported.
        WorkDirectoryError: `work_directory` is a URL of a kind that is not supported, or is missing although Spark's master is
            not a local one.
        MetricsUnavailableError: `metrics` is set, and the extra `otel` is not installed.
        SparkSettingError: Checkpoints do not work with one of the Spark settings.

    Examples:
        >>> CheckpointCoordinatorResource(storage=dg.EnvVar("CHECKPOINT_STORAGE"), interval=30.0)
    """

    storage: str | None = None
    """Root of the checkpoints of all pipelines: `s3://bucket/prefix`, `file:///path` or a path; `dg.EnvVar` may be used. Default:
    the environment variable CHECKPOINT_STORAGE, else the directory `checkpoints` below DAGSTER_HOME, if Dagster keeps its runs on
    one machine."""
    interval: float | None = Field(default=60.0, gt=0)
    """Seconds between periodic checkpoints. None: there are none; sinks commit when the job ends, and a failure before that
    restarts the job from its beginning."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds after which an incomplete checkpoint is aborted."""
    initial_delay: float | None = Field(default=None, ge=0)
    """Seconds from the moment when all stages run to the first periodic checkpoint, also after a restart; None for `interval`.
    Not with `interval=None`."""
    min_pause: float = Field(default=0.0, ge=0)
    """Least seconds between the end of a checkpoint and the beginning of the next periodic one. Not with `interval=None`."""
    max_concurrent: int = Field(default=1, ge=1)
    """Maximum number of checkpoints in progress at the same time, without savepoints. With more than one, a checkpoint that takes
    longer than `interval` to be stored does not delay the next; when a newer one completes first, the older is aborted
    (`CHECKPOINT_SUBSUMED`), and no record is lost."""
    mode: Literal["exactly_once", "at_least_once"] = "exactly_once"
    """What a stage with several inputs does. "exactly_once": it waits for the barriers of all of them. "at_least_once": it never
    waits, and after a failure rows may be counted, and written to sinks, twice."""
    unaligned: bool | None = None
    """Whether barriers overtake the records that wait in front of a slow stage: these records become part of the checkpoint.
    None: yes, with "exactly_once" and one checkpoint at a time; other settings refuse True. Savepoints never overtake."""
    aligned_checkpoint_timeout: float | None = Field(default=None, ge=0)
    """Seconds from its trigger after which a checkpoint overtakes; 0: at once. None: at once with `unaligned=True`, else after
    0.25 seconds. Not with `unaligned=False`."""
    interval_during_backlog: float | None = Field(default=None, ge=0)
    """Seconds between periodic checkpoints while a bounded source has not ended: at least `interval`, or 0 for none; None for
    `interval`."""
    backlog_rows: int | None = Field(default=None, ge=1)
    """With `interval_during_backlog`: number of unread messages from which a Kafka source counts as a backlog, too; None: only
    bounded sources count."""
    tolerable_failed_checkpoints: int = Field(default=3, ge=0)
    """Number of consecutive checkpoints that may fail; one more fails the run."""
    retained: int = Field(default=1, ge=1)
    """Number of completed checkpoints that are kept."""
    restart_strategy: Literal["fixed_delay", "exponential_delay", "failure_rate"] = "fixed_delay"
    """The failures after which the unfinished stages of a run restart from the latest checkpoint; they are counted for the whole
    run. "fixed_delay": the first `restart_attempts` failures; use another one for a pipeline that runs for months.
    "exponential_delay": `restart_attempts` consecutive failures, after growing delays; after `restart_interval` seconds without a
    failure, count and delay begin again. "failure_rate": `restart_attempts` failures within any `restart_interval` seconds."""
    restart_attempts: int | None = Field(default=3, ge=0)
    """Maximum number of restarts; 0 for none. None for no limit, with "exponential_delay" only. Some errors are not tried
    again."""
    restart_delay: float = Field(default=1.0, ge=0)
    """Seconds before a restart; with "exponential_delay" before the first of consecutive restarts."""
    restart_delay_multiplier: float = Field(default=1.5, ge=1)
    """Factor by which an exponential delay grows from restart to restart, at least 1."""
    restart_delay_maximum: float = Field(default=60.0, ge=0)
    """Most seconds of an exponential delay."""
    restart_interval: float = Field(default=3600.0, ge=0)
    """Period of "failure_rate" and of "exponential_delay", in seconds; see `restart_strategy`."""
    failover_strategy: FailoverStrategy = "region"
    """The stages that restart. "region": those connected with the stage that failed, by inputs in either direction and over any
    number of stages; the others go on. "full": all."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Seconds without a renewal of its lease after which another run may take the pipeline over; at once if the process that held
    the lease is known to have ended."""
    work_directory: str | None = None
    """Directory of records between stages and of Spark's own files: a path, `~`, `file:///path`, or a URL of Hadoop's (`hdfs://`,
    `s3a://`). The driver and all of Spark's executors must see it under the same path, which is checked at start. It needs no
    backup. Default: a directory for temporary files, with a local Spark only; required with any other master."""
    max_queued_bytes: int = Field(default=256 * 1024 * 1024, gt=0)
    """Size of the records of a channel that its consumer has not read, in bytes, from which the stage waits."""
    batch_seconds: float = Field(default=BATCH_SECONDS, gt=0)
    """Seconds that a micro-batch of fused sources is to take at most: the durations of earlier ones decide how much it reads of
    files and of Kafka's topics without limits of their own."""
    observe_every: float = Field(default=300.0, ge=0)
    """Seconds between two observations of a running stage, and of the checkpoints (`checkpoints/<pipeline>`); every 30 seconds in
    the first five minutes, and one twelfth as often while nothing changes. With the default, at most 297 for each of them on the
    first day of a run, and 288 on every other day."""
    materialize_every: float | None = Field(default=60.0, ge=0)
    """Least seconds between two materializations of a stage whose sink commits while the stage runs, so that assets downstream,
    freshness policies and checks see its rows; what was committed in between is shown by the next one. 0: each commit. None: a
    stage is materialized only when it has finished."""
    sample_rows: int = Field(default=0, ge=0, le=100)
    """Number of rows of a commit that its materialization shows, as a table; they are taken from one instance, and stored in
    Dagster's event log: not for personal data."""
    savepoint_on_termination: bool = False
    """Whether a run that Dagster terminates suspends the pipeline first, with a savepoint from which the next run continues.
    Otherwise the next run continues from the newest checkpoint."""
    termination_timeout: float = Field(default=60.0, gt=0)
    """Seconds for that savepoint; after that the run is cancelled without it."""
    request_poll_seconds: float | None = Field(default=None, gt=0)
    """Seconds between two polls for control requests in storage (one LIST each); None for 1 on S3, and 0.02 in a directory."""
    status_seconds: float = Field(default=5.0, gt=0)
    """Seconds between two versions of `status.json` in storage, which sensors and displays read (one PUT each)."""
    metrics: bool = False
    """Whether each run sends its numbers to the OpenTelemetry collector that environment variables (`OTEL_...`) name; needs the
    extra `otel`."""
    trace: str | None = None
    """For bug reports: the directory below which each run writes the events and actions of its state machines, as
    `<pipeline>/<run id>-e<epoch>.trace`; `dagster-checkpoints replay FILE` shows it. None for no trace."""
    share_java_classes: bool = True
    """Whether Spark starts with an archive of its Java classes (class data sharing), which halves the processor time of its
    start. A run that finds none makes it in the user's cache directory: about 200 MB."""
    spark_config: dict[str, Any] = Field(default={})
    """Settings of the Spark session, such as `{"spark.master": "local[4]"}`, nested or flat; values may be `dg.EnvVar`."""
    spark: LazyPySparkResource | None = None
    """A `dagster_pyspark` resource, instead of `spark_config` or beside it, whose settings then come before those of the same
    names. Only its `spark_config` is used: the session is created on another thread than Dagster's, where Dagster cannot
    interrupt it in the middle of a call."""
    s3: S3Resource | None = None
    """The `dagster_aws` resource whose client is used for `s3://` storage: endpoint, region, credentials. None for a client with
    boto3's own configuration."""

    @field_validator("spark", "s3", mode="before")
    @classmethod
    def _refuse_unknown_of_a_resource(cls, value: Any, field: ValidationInfo) -> Any:
        if isinstance(value, dict):  # as a component's YAML has it
            kind: Any = LazyPySparkResource if field.field_name == "spark" else S3Resource
            refuse_unknown(kind, value)
        return value

    @field_validator("spark", mode="before")
    @classmethod
    def _never_on_the_main_thread(cls, value: Any) -> Any:
        # PySparkResource creates its session when Dagster sets it up, on the main thread.
        return LazyPySparkResource(spark_config=value.spark_config) if isinstance(value, PySparkResource) else value

    @model_validator(mode="after")
    def _checked_where_it_is_defined(self) -> Self:
        check_definition(self.storage, self.work_directory, self._chosen_spark_config())
        if self.restart_attempts is None and self.restart_strategy != "exponential_delay":
            raise ValueError(
                f"restart_attempts is None with restart_strategy={self.restart_strategy!r}; expected a number. Only restarts "
                'with growing delays ("exponential_delay") may have no limit.'
            )
        if self.metrics:
            check_metrics_available()
        _check_unused(self)
        _checkpoint_config(self)
        _restart_strategy(self)
        return self

    def get_resource_definition(self) -> Any:
        """Dagster's definition of the resource; its description is the first paragraph of the class's documentation.

        The editors of Dagster's UI show the description in one piece above the configuration, and each setting's own below it.
        A run's configuration replaces the settings that it names: with Dagster's own schema all others would lose their values.
        """
        definition = super().get_resource_definition()
        definition._description = (inspect.getdoc(type(self)) or "").partition("\n\n")[0]
        definition._config_schema = replacing_schema(self._schema, self._resolved_config_dict)
        return definition

    def run(
        self,
        pipeline: Pipeline,
        *,
        context: dg.AssetExecutionContext,
        config: PipelineRunConfig | None = None,
        drain_when: Callable[[Mapping[str, int]], bool] | None = None,
        on_event: Callable[[JobEvent], None] | None = None,
    ) -> Iterator[dg.MaterializeResult[Any]]:
        """Run a pipeline to its end, in the body of a function decorated with :func:`pipeline_assets`.

        All stages run at the same time, on separate threads; a stage is materialized when it has finished and committed all its
        rows, and the stages that it reads are materialized. When Dagster terminates the run, Spark is stopped, and the
        checkpoints are kept, so that the next run can continue from them.

        Args:
            pipeline: The pipeline to run.
            context: The context of the asset function.
            config: The start point; default: the run configuration of the op.
            drain_when: Called about once a second after the start, on Dagster's thread, with the number of rows that each stage
                has emitted since the job began, a :class:`StageRows`. After it has returned True bounded sources are read to
                their end; then every source ends as if its input were exhausted: windows are emitted, all rows are committed,
                and the run ends successfully.
            on_event: Receives every event of the job (`dagster_checkpoints.spark.job.events`), on Dagster's thread.

        Raises:
            dagster.Failure: The job cannot start or has failed; text and metadata name the cause and the remedy.
        """
        # The engine is not needed to define anything: what only lists definitions starts half a second earlier.
        from dagster_checkpoints.plugin.job_run import JobRun, JobThread
        from dagster_checkpoints.plugin.run_events import ReportIntervals, RunReporter, failure

        with interrupts_delayed():
            # The recovery sensor finds the run by it, whatever its job is.
            context.instance.add_run_tags(context.run.run_id, {PIPELINE: pipeline.name, **cleared_tags(context)})
        try:
            assets = StageAssets.of(context, pipeline)
            settings = config or PipelineRunConfig.of(context.op_execution_context.op_config)
            with interrupts_delayed():
                limits = time_limit_tags(pipeline, context.run.tags, settings.until)
                context.instance.add_run_tags(context.run.run_id, limits)
                if has_no_end(pipeline, settings.until) and (others := other_steps(context)):
                    context.log.warning(_beside(pipeline, others))
            thread = JobThread(
                lambda events, log: self._job(pipeline, context, settings, assets, events, log), name=pipeline.name
            )
            reporter = RunReporter(
                context,
                pipeline,
                assets,
                intervals=ReportIntervals(self.observe_every, self.materialize_every, self.interval),
                progress=thread.job.progress,
                storage=lambda: self.checkpoint_storage(pipeline, instance=context.instance),
            )
        except (DagsterCheckpointsError, ValueError) as error:
            tag_refusal(context, error)
            raise failure(pipeline, error, None) from None
        suspend_seconds = self.termination_timeout if self.savepoint_on_termination else None
        job_run = JobRun(pipeline, context, thread, reporter, suspend_seconds=suspend_seconds)
        try:
            with interrupts_delayed():
                thread.start()
            yield from job_run.follow(drain_when, on_event)
        except dg.Failure:
            raise
        except BaseException as error:  # Dagster's interrupt among them: no thread may continue after the run
            job_run.terminate(error if isinstance(error, Exception) else None)
            raise

    def job_status(self, pipeline: Pipeline, *, context: dg.AssetExecutionContext) -> str | None:
        """The status of the pipeline's latest job; None if the pipeline never ran with this storage.

        The next run after a FINISHED job is a new start, after any other status it continues the job: a job that was suspended
        has the status SUSPENDED.

        Raises:
            StorageError: Storage cannot be read.
        """
        with self.checkpoint_storage(pipeline, instance=context.instance) as storage:
            state = storage.read_state()
        if state is None or state.job.status == "NONE":
            return None
        return "SUSPENDED" if state.job.ended_by == "suspend" else state.job.status

    def control(self, pipeline: Pipeline, *, instance: dg.DagsterInstance, asked_by: str) -> PipelineControl:
        """Control of a running pipeline from any process: checkpoint, savepoint, stop, end of a source.

        Args:
            pipeline: The pipeline, which may run on any machine.
            instance: The Dagster instance, whose directory is used if neither the resource nor the environment names the storage.
            asked_by: Description of the requester, such as the name of a sensor or a run.

        Raises:
            NoStorageError: No storage is configured, or only a directory that runs on other machines would not see.
        """
        return PipelineControl(self.checkpoint_storage(pipeline, instance=instance), asked_by=asked_by)

    def checkpoint_storage(self, pipeline: Pipeline, *, instance: dg.DagsterInstance) -> CheckpointStorage:
        """The storage of the pipeline's checkpoints and savepoints; this call reads nothing.

        Args:
            pipeline: The pipeline.
            instance: The Dagster instance, whose directory is used if neither the resource nor the environment names the storage.

        Raises:
            NoStorageError: No storage is configured, or only a directory that runs on other machines would not see.
        """
        root = self.open_store(self._storage_url(instance))
        return CheckpointStorage(root, pipeline.name, open_elsewhere=self.open_store)

    def open_store(self, url: str) -> ObjectStore:
        """The object store at any URL or path; with this resource's S3 client for an S3 URL.

        Raises:
            InvalidStorageUrl: The URL is of another kind.
        """
        return open_store(url, client_factory=self.s3.get_client if self.s3 else None)

    # From the settings to a job

    def _job(
        self,
        pipeline: Pipeline,
        context: dg.AssetExecutionContext,
        config: PipelineRunConfig,
        assets: StageAssets,
        on_event: Callable[[JobEvent], None],
        log: logging.Logger,
    ) -> JobExecution:
        from dagster_checkpoints.spark.job.job_execution import JobExecution

        storage = self.checkpoint_storage(pipeline, instance=context.instance)
        spark_config = self.spark_settings()
        check_work_directory_named(spark_config["spark.master"], named=bool(self.work_directory))
        return JobExecution(
            pipeline,
            storage=storage,
            options=self._options(pipeline, config, storage, context, assets),
            session=lambda: build_session(spark_config, share_classes=self.share_java_classes),
            on_event=on_event,
            run_id=context.run.run_id,
            log=log,
        )

    def _options(
        self,
        pipeline: Pipeline,
        config: PipelineRunConfig,
        storage: CheckpointStorage,
        context: dg.AssetExecutionContext,
        assets: StageAssets,
    ) -> JobOptions:
        work_directory, scratch = self._work_directories(storage)
        all_selected = assets.selected == {stage.name for stage in pipeline.stages}
        return JobOptions(
            _checkpoint_config(self),
            _restart_strategy(self),
            work_directory,
            scratch_directory=scratch,
            work_directory_named=bool(self.work_directory),
            restore_from=config.restore_from,
            selection=None if all_selected else assets.selected,
            until=config.until,
            allow_non_restored_state=config.allow_non_restored_state,
            allow_older_checkpoint=config.allow_older_checkpoint,
            allow_changed_plan=config.allow_changed_plan,
            repartition_state=config.repartition_state,
            lease_seconds=self.lease_seconds,
            max_queued_bytes=self.max_queued_bytes,
            batch_seconds=self.batch_seconds,
            claim_mode=ClaimMode(config.claim_mode),
            request_poll_seconds=self.request_poll_seconds,
            status_seconds=self.status_seconds,
            metrics=self.metrics,
            trace=Path(self.trace).expanduser().absolute() if self.trace else None,
            origin=origin_of(context, assets),
            allow_moved_pipeline=config.allow_moved_pipeline,
            earlier_runs=earlier_runs(context),
            retried_runs=retried_runs(context),
            assets=input_assets(context, assets),
            sample_rows=self.sample_rows,
            failover=self.failover_strategy,
        )

    def _work_directories(self, storage: CheckpointStorage) -> tuple[Path | RemoteDirectory, Path]:
        """The work directory, and the directory for files that only this machine uses."""
        # Pipelines of the same name on another storage are other pipelines; a bucket has the same name at another endpoint.
        storage_id = hashlib.sha256(repr(storage.store).encode()).hexdigest()[:12]
        own = Path(tempfile.gettempdir()).absolute() / f"dagster-checkpoints-{os.getuid()}" / storage_id
        return (parse_work_directory(self.work_directory) / storage_id if self.work_directory else own), own

    def spark_settings(self) -> dict[str, str]:
        """The complete configuration of the Spark session of a run.

        Raises:
            SparkSettingError: Checkpoints do not work with one of the settings, or its environment variable is not set.
        """
        return session_config(run_settings(self._chosen_spark_config()))

    def _chosen_spark_config(self) -> dict[str, Any]:
        shared = self.spark.spark_config if isinstance(self.spark, LazyPySparkResource) else {}
        return {**flat_settings(shared), **flat_settings(self.spark_config)}

    def _storage_url(self, instance: dg.DagsterInstance) -> str:
        directory = None if instance.is_ephemeral else instance.root_directory
        return storage_root(
            self.storage,
            instance_directory=directory,
            setting="storage= of CheckpointCoordinatorResource",
            shared_parts=lambda: shared_parts(instance),
        )


ALIGNED_CHECKPOINT_TIMEOUT = 0.25
"""Seconds after which barriers overtake by default. A checkpoint for which nothing waits is complete by then, and costs nothing
more; with a longer time one under data would take longer."""


def _beside(pipeline: Pipeline, others: Sequence[str]) -> str:
    return (
        f"Pipeline {pipeline.name!r} has no end of its own, and this run has other steps, too: {', '.join(others)}. Those that "
        "read its stages begin when it has ended; with the in-process executor all do. If the pipeline fails, the recovery "
        "sensor starts it again only when they have ended. Launch the pipeline in a run of its own"
    )


def _checkpoint_config(settings: CheckpointCoordinatorResource) -> CheckpointConfig:
    """The settings of checkpoints.

    Raises:
        ValueError: Two of them do not go together.
    """
    unaligned, timeout = settings.unaligned, settings.aligned_checkpoint_timeout
    if unaligned is None:
        unaligned = settings.mode == "exactly_once" and settings.max_concurrent == 1
        timeout = ALIGNED_CHECKPOINT_TIMEOUT if unaligned and timeout is None else timeout
    try:
        return CheckpointConfig(
            interval=settings.interval,
            interval_during_backlog=settings.interval_during_backlog,
            backlog_rows=settings.backlog_rows,
            timeout=settings.timeout,
            min_pause=settings.min_pause,
            max_concurrent=settings.max_concurrent,
            initial_delay=settings.initial_delay,
            tolerable_failed_checkpoints=settings.tolerable_failed_checkpoints,
            retained=settings.retained,
            mode=settings.mode,
            unaligned=unaligned,
            aligned_checkpoint_timeout=timeout,
        )
    except InvalidCheckpointConfig as error:
        raise ValueError(str(error)) from None


def _check_unused(settings: CheckpointCoordinatorResource) -> None:
    """Refuse a setting that another one leaves without effect.

    Raises:
        ValueError: A setting has another value than its default, and nothing uses it.
    """
    strategy = settings.restart_strategy
    uses = {
        "restart_interval": strategy != "fixed_delay",
        "restart_delay_multiplier": strategy == "exponential_delay",
        "restart_delay_maximum": strategy == "exponential_delay",
        "termination_timeout": settings.savepoint_on_termination,
    }
    for name, used in uses.items():
        value = getattr(settings, name)
        if not used and value != type(settings).model_fields[name].default:
            other = "savepoint_on_termination=False" if name == "termination_timeout" else f"restart_strategy={strategy!r}"
            raise ValueError(f"{name}={value!r} has no effect with {other}. Leave it out, or change the other setting.")


def _restart_strategy(settings: CheckpointCoordinatorResource) -> RestartStrategy:
    """The restart strategy after a task's failure.

    Raises:
        ValueError: Two settings do not go together.
    """
    if settings.restart_attempts == 0:
        return NoRestart()
    try:
        return _chosen_strategy(settings)
    except InvalidCheckpointConfig as error:
        names = ("restart_attempts", "restart_delay", "restart_delay_multiplier", "restart_delay_maximum", "restart_interval")
        given = ", ".join(f"{name}={getattr(settings, name)!r}" for name in names)
        raise ValueError(f"restart_strategy={settings.restart_strategy!r} with {given}: {error}") from None


def _chosen_strategy(settings: CheckpointCoordinatorResource) -> RestartStrategy:
    if settings.restart_strategy == "exponential_delay":
        return ExponentialDelayRestart(
            initial=settings.restart_delay,
            maximum=settings.restart_delay_maximum,
            multiplier=settings.restart_delay_multiplier,
            reset_after=settings.restart_interval,
            attempts=settings.restart_attempts,
        )
    assert settings.restart_attempts is not None, "checked where it is defined"
    if settings.restart_strategy == "failure_rate":
        return FailureRateRestart(settings.restart_attempts, settings.restart_interval, settings.restart_delay)
    return FixedDelayRestart(settings.restart_attempts, settings.restart_delay)
