"""The metadata of a savepoint in Dagster, read from the savepoint itself.

It must not know how a savepoint is requested.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dagster as dg
import msgspec
from dagster_shared.check import CheckError
from dagster_shared.yaml_utils import dump_run_config_yaml

from dagster_checkpoints.errors import StorageError
from dagster_checkpoints.plugin.event_metadata import address_metadata
from dagster_checkpoints.plugin.run_config import PipelineRunConfig
from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    QuerySnapshot,
    StageMetadata,
    StateFile,
    task_files,
)
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.state.row_counts import rows_of_stage
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.savepoints import SavepointDirectory

LOCATION = "location"
"""Key in the metadata of a savepoint's materialization: its location, as `restore_from` takes it."""
TRIGGERED = "triggered"
MADE_BY = "made_by"
"""Key in the same metadata: name of the schedule that made the savepoint and may delete it."""
_OFFSETS_SHOWN = 300
_REPOSITORY = "__repository__"
_HIDDEN_JOB = "__ASSET_JOB"
_SELECTION_SHOWN = 20
"""Longest asset selection in a link: the query parser of the web page reads longer lists as something else."""


@dataclass(frozen=True)
class Savepoint:
    """A savepoint in storage.

    Attributes:
        location: Its location, as `restore_from` takes it: a path below the pipeline's directory, or a URL.
        url: Its URL, for people.
        metadata: Its metadata.
        offsets: The offsets up to which the savepoint covers the input, by stage, as the stage's Spark query counts them; only
            for stages whose input a query reads.
    """

    location: str
    url: str
    metadata: CheckpointMetadata
    offsets: Mapping[str, str]


def read_savepoint(storage: CheckpointStorage, location: str) -> Savepoint:
    """Read a savepoint's metadata, and the few small files with its offsets.

    Args:
        storage: Storage of the pipeline.
        location: Location, URL or path of the savepoint.

    Raises:
        MissingCheckpoint: The savepoint does not exist; the text names those that do.
        CorruptMetadata, UnknownMetadataVersion: The metadata cannot be read.
        StorageUnavailable: The storage does not answer.
    """
    directory = storage.open_savepoint(location)
    metadata = decode(directory.read_metadata(), directory.url)
    return Savepoint(directory.location, directory.url, metadata, _offsets(directory, metadata))


def describe(savepoint: Savepoint) -> dict[str, Any]:
    """The metadata of the savepoint's materialization that the savepoint itself contains."""
    metadata = savepoint.metadata
    files = {file.sha256: file.size for file in _files(metadata.chains)}
    shown: dict[str, Any] = {
        "path": address_metadata(savepoint.url),
        LOCATION: savepoint.location,
        "checkpoint": metadata.checkpoint_id,
        "pipeline": metadata.pipeline,
        "job": metadata.job_id,
        TRIGGERED: dg.MetadataValue.timestamp(metadata.triggered_at),
        "duration_seconds": round(max(metadata.completed_at - metadata.triggered_at, 0.0), 3),
        "total_bytes": sum(files.values()),
        "files": len(files),
        "stages": _table(savepoint),
        "spark_version": metadata.spark_version,
        "format_version": metadata.version,
    }
    if metadata.run_id:
        shown["run"] = dg.MetadataValue.dagster_run(metadata.run_id)
    return shown


def resume_metadata(context: dg.AssetExecutionContext, savepoint: Savepoint, assets: dg.AssetsDefinition) -> dict[str, Any]:
    """The run configuration that restores the savepoint, and a link to the launchpad with this configuration.

    Args:
        context: Context of the run that records the savepoint.
        savepoint: The savepoint to restore.
        assets: The assets of the pipeline.
    """
    run_id = savepoint.metadata.run_id
    run = context.instance.get_run_by_id(run_id) if run_id else None
    op_name = assets.node_def.name
    # Resources and the executor are left out: they are those of the code location at the time of the resume.
    config: dict[str, Any] = {"ops": copy.deepcopy(run.run_config.get("ops", {})) if run is not None else {}}
    settings = config["ops"].setdefault(op_name, {}).setdefault("config", {})
    for name, value in PipelineRunConfig().model_dump().items():
        if settings.get(name) == value:  # the launchpad writes all defaults into a run's configuration
            del settings[name]
    settings["restore_from"] = savepoint.location
    text = dump_run_config_yaml(config)
    link = _launchpad(context, run, assets, text) if run is not None else None
    return {
        **({"resume": dg.MetadataValue.md(f"[Open the launchpad with this savepoint]({link})")} if link is not None else {}),
        "run_config": dg.MetadataValue.md(f"```yaml\n{text}```"),
    }


def _launchpad(context: dg.AssetExecutionContext, run: dg.DagsterRun, assets: dg.AssetsDefinition, config: str) -> str | None:
    """Link to the launchpad of a job that runs the pipeline, with a run configuration: a path below the webserver's address."""
    job_name = _job_of(context, run, assets)
    if run.remote_job_origin is None or job_name is None:
        return None
    repository = run.remote_job_origin.repository_origin
    location = repository.code_location_origin.location_name
    name = repository.repository_name
    repository_path = location if name == _REPOSITORY else f"{name}@{location}"
    chosen = run.asset_selection
    is_subset = chosen is not None and chosen < assets.keys and len(chosen) <= _SELECTION_SHOWN
    selection = "".join(
        f"&assetSelection[{number}][assetKey][path][{part}]={quote(text, safe='')}"
        for number, key in enumerate(sorted(chosen or ()) if is_subset else ())
        for part, text in enumerate(key.path)
    )
    page = f"/locations/{quote(repository_path, safe='@')}/jobs/{quote(job_name)}/playground/setup"
    link = f"{page}?config={quote(config, safe='')}{selection}"
    return link.replace("(", "%28").replace(")", "%29")


def _job_of(context: dg.AssetExecutionContext, run: dg.DagsterRun, assets: dg.AssetsDefinition) -> str | None:
    """Name of the job that ran the pipeline or, if a user did not define that job, of one that runs only the pipeline.

    The launchpad of Dagster's hidden asset job takes no configuration from a link, and offers all assets.
    """
    if not run.job_name.startswith(_HIDDEN_JOB):
        return run.job_name
    try:
        jobs = context.repository_def.get_all_jobs()
    except CheckError:  # no code location
        return None
    names = [job.name for job in jobs if set(job.graph.node_dict) == {assets.node_def.name}]
    return min((name for name in names if not name.startswith(_HIDDEN_JOB)), default=None)


# Stages


def _table(savepoint: Savepoint) -> dg.TableMetadataValue:
    columns = [
        dg.TableColumn("stage"),
        dg.TableColumn("state", description="running, or how many of its instances have finished"),
        dg.TableColumn("instances", "int"),
        dg.TableColumn("bytes", "int", description="state, and records on their way to the stage"),
        dg.TableColumn("files", "int"),
        dg.TableColumn("rows", "int", description="emitted since the job began; empty if not known"),
        dg.TableColumn("offsets", description="offsets up to which the savepoint covers the input"),
    ]
    records = [_row(savepoint, stage) for stage in savepoint.metadata.stages]
    return dg.MetadataValue.table(records=records, schema=dg.TableSchema(columns=columns))


def _row(savepoint: Savepoint, stage: StageMetadata) -> dg.TableRecord:
    # Stages that share a query share its state; it is shown once, with the first stage of the chain.
    led = [chain for chain in savepoint.metadata.chains if chain.stages[:1] == (stage.name,)]
    shared = [chain.stages[0] for chain in savepoint.metadata.chains if stage.name in chain.stages[1:]]
    files = {file.sha256: file.size for file in _files(led)}
    if stage.fully_finished:
        state = "finished"
    elif stage.finished:
        state = f"{len(stage.finished)} of {stage.parallelism} finished"
    else:
        state = "running"
    offsets = savepoint.offsets.get(stage.name, "")
    if shared:
        offsets = f"in the query of {shared[0]}"
    return dg.TableRecord(
        {
            "stage": stage.name,
            "state": state,
            "instances": stage.parallelism,
            "bytes": sum(files.values()),
            "files": len(files),
            "rows": rows_of_stage(savepoint.metadata, stage),
            "offsets": offsets,
        }
    )


def _files(chains: Iterable[ChainMetadata]) -> list[StateFile]:
    return [file for chain in chains for task in chain.tasks.values() for file in task_files(task)]


# Offsets


def _offsets(directory: SavepointDirectory, metadata: CheckpointMetadata) -> dict[str, str]:
    """The offsets up to which each chain's query has read, by the chain's first stage, from Spark's offset log."""
    queries = {
        f"{number}/{index}": task.query
        for number, chain in enumerate(metadata.chains)
        for index, task in chain.tasks.items()
        if task.query is not None and _offset_files(task.query)
    }
    with tempfile.TemporaryDirectory(prefix="savepoint-offsets-") as folder:
        files = [
            msgspec.structs.replace(file, path=f"{task}/{file.path}")
            for task, query in queries.items()
            for file in _offset_files(query)
        ]
        try:
            directory.fetch_state(files, Path(folder))
        except (StorageError, OSError):
            return {}  # for display only; the asset check verifies that the savepoint is complete
        read = {task: _read_offsets(Path(folder, task), query.batch_id) for task, query in queries.items()}
    instances = {stage.name: stage.instances for stage in metadata.stages}
    shown = {}
    for number, chain in enumerate(metadata.chains):
        names = instances.get(chain.stages[0], ())
        offsets_of = {index: read[f"{number}/{index}"] for index in sorted(chain.tasks) if f"{number}/{index}" in read}
        text = "; ".join(f"{names[index]}: {offsets}" if len(names) > 1 else offsets for index, offsets in offsets_of.items())
        shown[chain.stages[0]] = text if len(text) <= _OFFSETS_SHOWN else f"{text[:_OFFSETS_SHOWN]}…"
    return shown


def _offset_files(query: QuerySnapshot) -> list[StateFile]:
    return [file for file in query.files if file.path == f"offsets/{query.batch_id}"]


def _read_offsets(folder: Path, batch_id: int) -> str:
    try:
        return QueryLog(folder).planned(batch_id).offsets
    except (OSError, ValueError, LookupError):
        return "unreadable"
