"""Verifies that a checkpoint or savepoint is complete, and that a pipeline can be restored from it.

Reads the metadata, then every state file, and compares its size and sha256. The asset check and the command line use it; it must
not import Dagster or Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from dagster_checkpoints.errors import MissingCheckpoint, NotFound
from dagster_checkpoints.files.urls import validate_directory
from dagster_checkpoints.state.errors import CorruptMetadata, RestoreError, RestoreProblem, UnknownMetadataVersion
from dagster_checkpoints.state.metadata import CheckpointMetadata, StateFile, task_files
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.state.restore import RestorePlan, validate_restore
from dagster_checkpoints.state.spark_versions import check_spark_version
from dagster_checkpoints.state.views import PipelineView
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.state_files import NO_OBJECT, StateFileProblem, state_file_problem

ProblemKind = Literal[
    "missing_metadata",
    "corrupt_metadata",
    "unknown_version",
    "missing_file",
    "wrong_size",
    "wrong_content",
    RestoreProblem,
    "plan_not_built",
]
"""The first three end the verification; the next three concern one file each; the last ones the pipeline."""

_PARALLEL_READS = 8
_FILE_REMEDY = "Restore from another checkpoint or savepoint, or put the file back from a copy"


@dataclass(frozen=True)
class Problem:
    """One problem of a checkpoint or savepoint.

    Attributes:
        kind: kind of the problem.
        what: explanation for people: what was expected and found; for a file also the tasks that need it.
        where: URL of the file; "" if the problem concerns the pipeline.
        remedy: what to do; "" if `what` says it.
    """

    kind: ProblemKind
    what: str
    where: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """The result of a verification.

    Attributes:
        url: URL of the checkpoint or savepoint.
        problems: the problems; empty if there are none.
        metadata: the metadata; None if it cannot be read.
        files: number of distinct state files that the metadata names.
        bytes: size of these files, as the metadata says.
        plan: the plan of the restore; None without a pipeline, or if the checkpoint does not fit it.
    """

    url: str
    problems: tuple[Problem, ...]
    metadata: CheckpointMetadata | None
    files: int
    bytes: int
    plan: RestorePlan | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def changes(self) -> tuple[str, ...]:
        """What a restore does with the state where the pipeline has changed: a line for each rule that changes something."""
        return self.plan.changes if self.plan is not None else ()


def verify_savepoint(
    storage: CheckpointStorage,
    location: str,
    pipeline: PipelineView | None = None,
    *,
    allow_non_restored_state: bool = False,
    spark_version: str = "",
) -> VerificationReport:
    """Read a whole savepoint or checkpoint, and report its problems.

    Args:
        storage: storage of the pipeline; its owner may be another process.
        location: location as in `state.json`, or location, URL or absolute path of a savepoint.
        pipeline: the pipeline that is to be restored from it; None to verify the files alone.
        allow_non_restored_state: whether state of stages that the pipeline no longer has is allowed.
        spark_version: version of the Spark that is to restore it; "" if that is not to be checked.

    Raises:
        StorageUnavailable: the storage does not answer, so the result is unknown.
        InvalidKey, InvalidStorageUrl: `location` cannot be a location.
        MissingCheckpoint: the pipeline has deleted the checkpoint meanwhile, as its retention says.
    """
    is_savepoint = storage.is_savepoint(location)
    url = _url(storage, location, is_savepoint)
    where = f"{url}/_metadata"
    try:
        metadata = decode(storage.read_metadata(location), url)
    except NotFound as error:
        return _unreadable(url, Problem("missing_metadata", str(error), where))
    except CorruptMetadata as error:
        return _unreadable(url, Problem("corrupt_metadata", str(error), where))
    except UnknownMetadataVersion as error:
        return _unreadable(url, Problem("unknown_version", str(error), where))
    sizes = file_sizes(metadata)
    file_problems = storage.open_savepoint(location).verify(sizes) if is_savepoint else _verify_shared(storage, metadata)
    if file_problems and not is_savepoint:
        _check_still_there(storage, location, url)
    needed_by = _needed_by(metadata)
    problems = [_file_problem(problem, sizes[problem.sha256], needed_by[problem.sha256]) for problem in file_problems]
    plan = None
    checks: list[Callable[[], RestorePlan | None]] = []
    if spark_version:
        checks.append(lambda: check_spark_version(metadata, spark_version))
    if pipeline is not None:
        checks.append(lambda: validate_restore(pipeline, metadata, allow_non_restored_state))
    for check in checks:
        try:
            plan = check()
        except RestoreError as error:
            problems.append(Problem(error.kind, str(error)))
    return VerificationReport(url, tuple(problems), metadata, len(sizes), sum(sizes.values()), plan)


def file_sizes(metadata: CheckpointMetadata) -> dict[str, int]:
    """The size in bytes of every distinct state file that the metadata names, by sha256, in the order of the metadata."""
    return {file.sha256: file.size for _, file in _files(metadata)}


def _url(storage: CheckpointStorage, location: str, is_savepoint: bool) -> str:
    """The URL of the directory of a checkpoint or savepoint, which need not exist."""
    directory = location.removesuffix("/_metadata").rstrip("/")
    if is_savepoint and ("://" in directory or directory.startswith("/")):
        return validate_directory(directory)
    return storage.url_of(storage.relative(directory))


def _files(metadata: CheckpointMetadata) -> list[tuple[str, StateFile]]:
    """Every file that the metadata names, with the task that needs it."""
    instances = {stage.name: stage.instances for stage in metadata.stages}
    files = []
    for chain in metadata.chains:
        names = instances.get(chain.stages[0], ()) if chain.stages else ()
        for index, task in sorted(chain.tasks.items()):
            name = names[index] if index < len(names) else str(index)
            files += [(f"{chain.name}[{name}]", file) for file in task_files(task)]
    return files


def _needed_by(metadata: CheckpointMetadata) -> dict[str, str]:
    needed: dict[str, list[str]] = {}
    for task, file in _files(metadata):
        needed.setdefault(file.sha256, []).append(f"{file.path} of {task}")
    return {sha256: uses[0] + (f" and {len(uses) - 1} more" if len(uses) > 1 else "") for sha256, uses in needed.items()}


def _verify_shared(storage: CheckpointStorage, metadata: CheckpointMetadata) -> list[StateFileProblem]:
    """Verify the files of a checkpoint, which are stored in `shared/`."""

    def check(file: StateFile) -> StateFileProblem | None:
        return state_file_problem(storage.store, storage.layout.shared_file(file.name), file.sha256, file.size)

    files = {file.name: file for _, file in _files(metadata)}
    with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="verify") as pool:
        return [problem for problem in pool.map(check, files.values()) if problem is not None]


def _check_still_there(storage: CheckpointStorage, location: str, url: str) -> None:
    """A checkpoint's metadata is deleted before its files: if it is gone, missing files are no damage."""
    try:
        storage.read_metadata(location)
    except NotFound as error:
        raise MissingCheckpoint(
            f"expected the checkpoint {url} to stay while it was verified, found that it was deleted meanwhile: a newer one has "
            "replaced it. Verify a savepoint, which stays, or the newest checkpoint of a pipeline that does not run"
        ) from error


def _file_problem(problem: StateFileProblem, size: int, needed_by: str) -> Problem:
    what = f"state file {needed_by}: expected {problem.expected}, found {problem.found} (sha256 {problem.sha256})"
    kind: ProblemKind
    if problem.found == NO_OBJECT:
        kind = "missing_file"
    else:
        kind = "wrong_content" if problem.found.startswith(f"{size} bytes ") else "wrong_size"
    return Problem(kind, what, problem.where, _FILE_REMEDY)


def _unreadable(url: str, problem: Problem) -> VerificationReport:
    return VerificationReport(url, (problem,), None, 0, 0)
