"""The asset check of savepoints: whether a savepoint is complete and fits the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_checkpoints.errors import InvalidKey, InvalidStorageUrl
from dagster_checkpoints.pipeline import Pipeline
from dagster_checkpoints.plugin.event_metadata import address_metadata
from dagster_checkpoints.plugin.savepoints.asset import RESOURCE
from dagster_checkpoints.plugin.savepoints.recording import SavepointAsset, location_of
from dagster_checkpoints.plugin.settings import KnownSettings
from dagster_checkpoints.spark.session.spark_version import installed_version
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.locating import absolute_location
from dagster_checkpoints.storage.verification import VerificationReport, verify_savepoint

if TYPE_CHECKING:
    from dagster_checkpoints.plugin.resource import CheckpointCoordinatorResource


class SavepointCheckConfig(KnownSettings, dg.Config):
    """The savepoint that is checked."""

    savepoint: str = ""
    """A partition of the savepoint asset, or a savepoint's location, URL or path. By default the savepoint that the same run has
    taken, else the newest one."""


def savepoint_check(
    *,
    pipeline: Pipeline,
    savepoints: dg.AssetsDefinition,
    name: str = "restorable",
    resource_key: str = RESOURCE,
) -> dg.AssetChecksDefinition:
    """An asset check that a savepoint can be restored into the pipeline as it is defined now.

    Reads the whole savepoint: its metadata can be read, no file is missing, sizes and sha256 match, and PROTOCOL 8.1 allows the
    restore. The check runs with every materialization of the asset; executed alone, it checks the newest savepoint. To check
    another savepoint, define a job as in the example and name the savepoint in its launchpad.

    Args:
        pipeline: The pipeline.
        savepoints: The asset that :func:`savepoint_asset` made.
        name: Name of the check.
        resource_key: Key of the :class:`CheckpointCoordinatorResource`.

    Examples:
        >>> check = savepoint_check(pipeline=flights, savepoints=flights_savepoints)
        >>> job = dg.define_asset_job("check_savepoint", selection=dg.AssetSelection.checks(check))
    """
    partitions = savepoints.partitions_def
    assert isinstance(partitions, dg.DynamicPartitionsDefinition)
    asset = SavepointAsset(savepoints.key, str(partitions.name))

    def check(context: dg.AssetCheckExecutionContext, config: SavepointCheckConfig) -> dg.AssetCheckResult:
        coordinator: CheckpointCoordinatorResource = getattr(context.resources, resource_key)
        run = context.op_execution_context
        chosen = config.savepoint or (run.partition_key if run.has_partition_key else "")
        with coordinator.checkpoint_storage(pipeline, instance=context.instance) as storage:
            location = _location(asset, chosen, context.instance) if chosen else _newest(asset, storage, context.instance)
            if location is None:
                found = f"{storage.url} holds no savepoint to restore from.{_recorded_before(asset, storage, context.instance)}"
                return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description=found)
            try:
                report = verify_savepoint(storage, location, pipeline, spark_version=installed_version())
            except (InvalidKey, InvalidStorageUrl) as error:  # the configured text cannot be a savepoint's location
                raise dg.Failure(str(error), allow_retries=False) from None
        return _result(report)

    check.__annotations__ = {"context": dg.AssetCheckExecutionContext, "config": SavepointCheckConfig}
    return dg.asset_check(
        asset=savepoints.key,
        name=name,
        description="No file is missing or changed, and the savepoint fits the pipeline.",
        required_resource_keys={resource_key},
    )(check)


def _result(report: VerificationReport) -> dg.AssetCheckResult:
    shown: dict[str, Any] = {
        "savepoint": address_metadata(report.url),
        "files": report.files,
        "total_bytes": report.bytes,
    }
    if report.metadata is not None:
        shown["checkpoint"] = report.metadata.checkpoint_id
    if report.ok:
        return dg.AssetCheckResult(passed=True, description="The savepoint is complete and fits the pipeline.", metadata=shown)
    shown["problems"] = dg.MetadataValue.table(
        records=[dg.TableRecord({"kind": p.kind, "what": p.what, "where": p.where, "remedy": p.remedy}) for p in report.problems]
    )
    number = len(report.problems)
    count = "1 problem" if number == 1 else f"{number} problems, the first"
    return dg.AssetCheckResult(
        passed=False,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"{count}: {report.problems[0].what}",
        metadata=shown,
    )


def _location(asset: SavepointAsset, chosen: str, instance: dg.DagsterInstance) -> str:
    recorded = asset.find(instance, chosen)
    return (location_of(recorded) if recorded is not None else None) or chosen


def _recorded_before(asset: SavepointAsset, storage: CheckpointStorage, instance: dg.DagsterInstance) -> str:
    """The newest savepoint that Dagster has recorded, if storage has none: it was deleted, or the storage is another one."""
    recorded = _newest_recorded(asset, instance)
    return f" The newest one that Dagster has recorded was at {storage.url_of(recorded[0])}." if recorded is not None else ""


def _newest_recorded(asset: SavepointAsset, instance: dg.DagsterInstance) -> tuple[str, float] | None:
    """Its location, and its time in seconds since 1970."""
    record = asset.newest(instance)
    location = location_of(record.asset_materialization) if record is not None and record.asset_materialization else None
    return (location, record.timestamp) if record is not None and location is not None else None


def _newest(asset: SavepointAsset, storage: CheckpointStorage, instance: dg.DagsterInstance) -> str | None:
    """The newest savepoint: in the pipeline's directory, or the one elsewhere that Dagster has recorded after it.

    By time: the ids of a new job count from 1 again.
    """
    stored = storage.list_savepoints()
    recorded = _newest_recorded(asset, instance)
    if recorded is None or absolute_location(recorded[0]) is None:
        return stored[0].location if stored else None
    location, at = recorded
    return stored[0].location if stored and stored[0].modified.timestamp() >= at else location
