"""The savepoint asset: the materialization of one of its partitions takes a savepoint of the running pipeline."""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dagster_checkpoints.control.pipeline_control import PipelineControl, RequestFailed, RequestHandle
from dagster_checkpoints.control.requests import Answer
from dagster_checkpoints.errors import DagsterCheckpointsError, UnknownRequest
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.event_metadata import address_metadata
from dagster_checkpoints.plugin.interrupts import interrupts_delayed
from dagster_checkpoints.plugin.runs import retried_runs
from dagster_checkpoints.plugin.savepoints.metadata import LOCATION, MADE_BY, TRIGGERED, describe, read_savepoint, resume_metadata
from dagster_checkpoints.plugin.savepoints.recording import (
    DEFAULT_PREFIX,
    SAVEPOINTS_OF,
    SavepointAsset,
    location_of,
    partition_of,
    request_of,
)
from dagster_checkpoints.plugin.savepoints.retention import STAMP, RecordedSavepoint, SavepointRetention, delete_expired
from dagster_checkpoints.plugin.settings import KnownSettings
from dagster_checkpoints.plugin.stage_assets import last_stages
from dagster_checkpoints.storage.checkpoints import CheckpointStorage

if TYPE_CHECKING:
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource

RESOURCE = "checkpoint_coordinator"
"""The default key of the coordinator's resource in assets, checks and sensors."""
_GRACE_SECONDS = 60.0
"""Seconds that the answer may take after the request's deadline, when the pipeline gives up."""
_LOG_EVERY_SECONDS = 30.0


class SavepointTakenError(DagsterCheckpointsError):
    """The name of the requested savepoint belongs to another savepoint."""


class SeveralSavepointsError(DagsterCheckpointsError):
    """One run is to take the savepoints of several partitions."""


class Stop(enum.Enum):
    """Whether the pipeline stops with the savepoint, and how."""

    none = "none"
    """The pipeline runs on."""
    suspend = "suspend"
    """The pipeline ends with the savepoint; the next run continues from it."""
    drain = "drain"
    """Every source ends, every window is emitted, and the pipeline ends for good."""


class Bounded(enum.Enum):
    """What a drain does with bounded sources."""

    cut = "cut"
    """They end where they are."""
    finish = "finish"
    """They are read to their end first, while unbounded sources go on."""


class SavepointConfig(KnownSettings, dg.Config):
    """How a savepoint is taken.

    Examples:
        >>> dg.RunConfig(ops={"savepoints__flights": SavepointConfig(stop=Stop.suspend)})
    """

    stop: Stop = Stop.none
    """`none`: the pipeline runs on. `suspend`: it ends with the savepoint, and the next run continues from it. `drain`: all
    sources end first, every window is emitted, and the next run is a new start."""
    bounded: Bounded = Bounded.cut
    """Of a drain: `cut` ends bounded sources where they are; `finish` waits until they have been read to their end, while
    unbounded sources go on, and drains then."""
    path: str = ""
    """Directory in which the savepoint is made: `s3://...`, `file:///...` or an absolute path; empty for the pipeline's own
    `savepoints/`."""
    deadline: float = Field(default=600.0, gt=0)
    """Longest time that the pipeline may take, in seconds."""
    retention: SavepointRetention | None = None
    """Of a schedule: which of its earlier savepoints are deleted; None to delete none."""


def savepoint_asset(
    *,
    pipeline: Pipeline,
    assets: dg.AssetsDefinition,
    key_prefix: str | Sequence[str] = DEFAULT_PREFIX,
    group_name: str | None = "savepoints",
    pool: str | None = None,
    resource_key: str = RESOURCE,
) -> dg.AssetsDefinition:
    """The asset of a pipeline's savepoints, with one partition per savepoint.

    To take a savepoint, materialize a new partition: its key becomes the savepoint's name. Add the partition in Dagster's dialog
    ("Add a partition"); the run configuration (:class:`SavepointConfig`) is under "Config". In a run without a partition the
    savepoint's name is the current time. The metadata of the materialization shows the savepoint's content and a link that opens
    the launchpad to resume from it.

    The asset has its own group, so that *Materialize all* in the pipeline's group does not take a savepoint. In the lineage it
    follows the pipeline's last stages, those that no other stage reads; they need not have been materialized to take a savepoint,
    and those of a running pipeline are not.

    Args:
        pipeline: The pipeline whose savepoints are the partitions.
        assets: The assets that `@pipeline_assets` made from the pipeline.
        key_prefix: Prefix of the asset's key, before the pipeline's name.
        group_name: Name of the asset's group.
        pool: Concurrency pool of the op; not that of the pipeline's assets.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Raises:
        ValueError: The pool is that of the pipeline's assets.

    Examples:
        >>> flights_savepoints = savepoint_asset(pipeline=flights, assets=flights_assets)
        >>> defs = dg.Definitions(assets=[flights_assets, flights_savepoints])
    """
    if pool is not None and pool == assets.op.pool:
        raise ValueError(
            f"savepoint_asset(pool={pool!r}) of pipeline {pipeline.name!r}: expected another pool than that of the pipeline's "
            "assets, or none. The running pipeline holds a slot of it, and a savepoint, also one that is to stop the pipeline, "
            "would wait for that slot"
        )
    asset = SavepointAsset.named(pipeline, [key_prefix] if isinstance(key_prefix, str) else list(key_prefix))

    def take(context: dg.AssetExecutionContext, config: SavepointConfig) -> Iterator[dg.MaterializeResult[Any]]:
        chosen_key = context.partition_key if context.has_partition_key else None
        coordinator: CheckpointCoordinatorResource = getattr(context.resources, resource_key)
        try:
            if chosen_key is None and context.has_partition_key_range:
                raise SeveralSavepointsError(
                    f"expected one partition of {asset.key.to_user_string()} in a run, found those from "
                    f"{context.partition_key_range.start!r} to {context.partition_key_range.end!r}: a partition is one "
                    "savepoint. Materialize them with one run for each"
                )
            control = coordinator.control(pipeline, instance=context.instance, asked_by=f"run {context.run.run_id}")
            request = _request_of_retried_run(context, control)
            if request is None:
                if chosen_key is not None:
                    _refuse_to_replace(context, asset, chosen_key)
                request = _send(context, control, config, chosen_key or datetime.now(UTC).strftime(STAMP))
            answer, failed = _take(context, request, config)
        except DagsterCheckpointsError as error:
            if config.retention is not None and chosen_key is not None and asset.find(context.instance, chosen_key) is None:
                context.instance.delete_dynamic_partition(asset.partitions, chosen_key)  # a schedule's: not kept
            raise _failure(pipeline, error) from None
        with coordinator.checkpoint_storage(pipeline, instance=context.instance) as storage:
            metadata = {**_contents(context, storage, answer, assets), **_origin(context, config)}
            if failed is None and config.retention is not None and chosen_key is not None:
                taken = RecordedSavepoint(chosen_key, answer.location, metadata[TRIGGERED].value)
                delete_expired(context, storage, asset, config.retention, taken)
        partition = chosen_key or partition_of(answer.location)
        # Also a chosen one: a failed attempt of this run, or a later run of the schedule, may have deleted it.
        context.instance.add_dynamic_partitions(asset.partitions, [partition])
        if chosen_key is not None and failed is None:
            yield dg.MaterializeResult(metadata=metadata)
            return
        context.log_event(dg.AssetMaterialization(asset.key, partition=partition, metadata=metadata))
        if failed is not None:
            raise _failure(pipeline, failed)

    # Dagster does not accept types that are strings, as `from __future__ import annotations` makes them.
    take.__annotations__ = {"context": dg.AssetExecutionContext, "config": SavepointConfig}
    return dg.asset(
        key=asset.key,
        partitions_def=dg.DynamicPartitionsDefinition(name=asset.partitions),
        description=(
            f"The savepoints of pipeline {pipeline.name!r}, one per partition. Materialize a new partition to take a savepoint "
            "of the running pipeline: add a partition in the dialog; its key is the savepoint's name.\n\n"
            "To stop the pipeline with the savepoint, add this under Config. `suspend`: the next run continues from the "
            "savepoint; `drain`: every source ends, every window is emitted, and the next run is a new start.\n\n"
            f"```yaml\nops:\n  {'__'.join(asset.key.path)}:\n    config:\n      stop: suspend\n```"
        ),
        deps=last_stages(assets.specs),
        metadata={SAVEPOINTS_OF: pipeline.name},
        group_name=group_name,
        required_resource_keys={resource_key},
        output_required=False,
        pool=pool,
        kinds={"savepoint"},
    )(take)


def _refuse_to_replace(context: dg.AssetExecutionContext, asset: SavepointAsset, partition: str) -> None:
    earlier = asset.find(context.instance, partition)
    if earlier is not None:
        raise SavepointTakenError(
            f"expected the name of a new savepoint, found that partition {partition!r} of {asset.key.to_user_string()} was "
            f"taken already ({location_of(earlier) or 'its location is not recorded'}), and a savepoint never changes. Add a "
            "partition with another key and materialize it."
        )


def _request_of_retried_run(context: dg.AssetExecutionContext, control: PipelineControl) -> RequestHandle | None:
    """The request of the run that this one retries, unless it has failed; None if there is none.

    The pipeline carries it out although its run has died. A second one would stop the run of the pipeline that follows, too.
    """
    for run_id in retried_runs(context) - {context.run.run_id}:
        request = control.handle(request_of(run_id))
        try:
            answer, epoch = request.poll(), request.request.epoch
        except UnknownRequest:
            continue
        state = control.state()
        under_way = state is not None and state.lease is not None and state.epoch == epoch
        if under_way if answer is None or not answer.final else answer.status == "done":
            context.log.info(f"Run {run_id}, which this run retries, has requested the savepoint (request {request.request_id}).")
            return request
    return None


def _send(context: dg.AssetExecutionContext, control: PipelineControl, config: SavepointConfig, name: str) -> RequestHandle:
    options: dict[str, Any] = {
        "target": config.path,
        "name": name,
        "request_id": request_of(context.run.run_id),
        "deadline": config.deadline,
        "recorded_by_asker": True,
    }
    if config.stop is Stop.none:
        request = control.savepoint(**options)
    else:
        request = control.stop(drain=config.stop is Stop.drain, bounded=config.bounded.value, **options)
    context.log.info(f"Requested savepoint {name!r} (request {request.request_id}, stop: {config.stop.value}).")
    return request


def _take(
    context: dg.AssetExecutionContext, request: RequestHandle, config: SavepointConfig
) -> tuple[Answer, RequestFailed | None]:
    """Wait for the answer to the request for the savepoint.

    Returns:
        The answer; and an error if the savepoint was made and the stop failed afterwards, else None.
    """
    try:
        return _wait(context, request, config.deadline + _GRACE_SECONDS), None
    except RequestFailed as error:
        if error.answer is not None and error.answer.location:
            return error.answer, error
        raise


def _wait(context: dg.AssetExecutionContext, request: RequestHandle, seconds: float) -> Answer:
    """Wait for the answer on another thread, so that Dagster's interrupts do not break the reading of storage."""
    outcomes: queue.Queue[Answer | Exception] = queue.Queue()

    def wait() -> None:
        try:
            outcomes.put(request.wait(seconds))
        except Exception as error:
            outcomes.put(error)

    threading.Thread(target=wait, name="wait for a savepoint", daemon=True).start()
    result: Answer | Exception | None = None
    while result is None:
        try:
            result = outcomes.get(timeout=_LOG_EVERY_SECONDS)
        except queue.Empty:
            context.log.info(f"Waiting for the pipeline's answer to request {request.request_id}.")
        except BaseException:  # Dagster's interrupt
            with interrupts_delayed():
                context.log.warning(
                    f"This run ends, but not its request {request.request_id}: the pipeline carries it out, and its own run "
                    "records the savepoint."
                )
            raise
    if isinstance(result, Exception):
        raise result
    return result


def _origin(context: dg.AssetExecutionContext, config: SavepointConfig) -> dict[str, Any]:
    trigger = "request" if config.stop is Stop.none else config.stop.value
    if config.retention is not None:
        return {"trigger": trigger, "asked_by": f"schedule {config.retention.made_by}", MADE_BY: config.retention.made_by}
    return {"trigger": trigger, "asked_by": f"run {context.run.run_id}"}


def _contents(
    context: dg.AssetExecutionContext, storage: CheckpointStorage, answer: Answer, assets: dg.AssetsDefinition
) -> dict[str, Any]:
    """The content of the savepoint, from its metadata; from the answer if the metadata cannot be read now."""
    try:
        savepoint = read_savepoint(storage, answer.location)
    except DagsterCheckpointsError as error:
        context.log.warning(f"Savepoint {answer.location} is complete, but cannot be described: {error}")
        return {
            "path": address_metadata(answer.url),
            LOCATION: answer.location,
            "checkpoint": answer.checkpoint_id,
            TRIGGERED: dg.MetadataValue.timestamp(answer.answered_at),
        }
    return {**resume_metadata(context, savepoint, assets), **describe(savepoint)}


def _failure(pipeline: Pipeline, error: DagsterCheckpointsError) -> dg.Failure:
    metadata: dict[str, Any] = {"pipeline": pipeline.name, "error": type(error).__name__}
    if isinstance(error, RequestFailed):
        metadata["reason"] = error.reason
        if error.url:
            metadata["savepoint"] = address_metadata(error.url)
    return dg.Failure(str(error), metadata=metadata, allow_retries=False)
