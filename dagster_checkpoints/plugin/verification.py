"""Whether a checkpoint or savepoint is whole, and whether a pipeline can be restored from it.

Everything is read: the metadata, then every state file, whose size and sha256 are compared. Shared by the asset check and the
command line; must not import Dagster or Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from dagster_checkpoints.state import (
    ChainLayoutChanged,
    CheckpointMetadata,
    CorruptMetadata,
    InputRowsGone,
    InputsChanged,
    InstancesChanged,
    NonRestoredState,
    PipelineView,
    RestoreError,
    StateFile,
    UnfinishedPredecessor,
    UnknownMetadataVersion,
    decode,
    task_files,
    validate_restore,
)
from dagster_checkpoints.storage import CheckpointStorage, NotFound, StateFileProblem
from dagster_checkpoints.storage.state_files import read_through
from dagster_checkpoints.storage.urls import validate_directory

ProblemKind = Literal[
    "missing_metadata",
    "corrupt_metadata",
    "unknown_version",
    "missing_file",
    "wrong_size",
    "wrong_content",
    "unfinished_predecessor",
    "non_restored_state",
    "instances_changed",
    "chain_layout_changed",
    "inputs_changed",
    "input_rows_gone",
    "stateful_plan_changed",
    "sources_changed",
    "plan_not_built",
    "does_not_fit",
]
"""The first three leave nothing more to look at; the next three are of one file each; the last ones of the pipeline."""

_AT_ONCE = 8
_NO_OBJECT = "no object"
_ANOTHER = "Restore from another checkpoint or savepoint, or put the file back from a copy"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: expected and found, for people; of a file also who needs it.
        where: URL of the file; empty if it is about the pipeline.
        remedy: what to do; empty if `what` says it.
    """

    kind: ProblemKind
    what: str
    where: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """What was found.

    Attributes:
        url: of the checkpoint or savepoint.
        problems: nothing if all is well.
        metadata: None if it cannot be read.
        files: distinct state files that the metadata names.
        bytes: of these, as it says.
    """

    url: str
    problems: tuple[Problem, ...]
    metadata: CheckpointMetadata | None
    files: int
    bytes: int

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problems


def verify_savepoint(
    storage: CheckpointStorage, location: str, pipeline: PipelineView | None = None, *, allow_non_restored_state: bool = False
) -> VerificationReport:
    """Read all of a savepoint or checkpoint, and compare.

    Args:
        storage: of the pipeline; need not own it.
        location: as in `state.json` or of a savepoint anywhere: a location, a URL or an absolute path.
        pipeline: what is to be restored from it; None to leave that out.
        allow_non_restored_state: state of stages that the pipeline no longer has is no problem.

    Raises:
        StorageUnavailable: storage does not answer: nothing is known then.
        InvalidKey, InvalidStorageUrl: the location cannot be one.
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
    wrong = storage.open_savepoint(location).verify(sizes) if is_savepoint else _verify_shared(storage, metadata)
    needed_by = _needed_by(metadata)
    problems = [_file_problem(problem, sizes[problem.sha256], needed_by[problem.sha256]) for problem in wrong]
    if pipeline is not None:
        try:
            validate_restore(pipeline, metadata, allow_non_restored_state)
        except RestoreError as error:
            problems.append(Problem(_RESTORE_KINDS.get(type(error), "does_not_fit"), str(error)))
    return VerificationReport(url, tuple(problems), metadata, len(sizes), sum(sizes.values()))


def file_sizes(metadata: CheckpointMetadata) -> dict[str, int]:
    """The size of every distinct state file that metadata names, by sha256, in its order."""
    return {file.sha256: file.size for _, file in _files(metadata)}


_RESTORE_KINDS: Mapping[type[RestoreError], ProblemKind] = {
    UnfinishedPredecessor: "unfinished_predecessor",
    NonRestoredState: "non_restored_state",
    InstancesChanged: "instances_changed",
    ChainLayoutChanged: "chain_layout_changed",
    InputsChanged: "inputs_changed",
    InputRowsGone: "input_rows_gone",
}


def _url(storage: CheckpointStorage, location: str, is_savepoint: bool) -> str:
    """Where it should lie, also if there is nothing."""
    directory = location.removesuffix("/_metadata").rstrip("/")
    if is_savepoint and ("://" in directory or directory.startswith("/")):
        return validate_directory(directory)
    return storage.url_of(storage.relative(directory))


def _files(metadata: CheckpointMetadata) -> list[tuple[str, StateFile]]:
    """Every file that metadata names, with the task that needs it."""
    instances = {stage.name: stage.instances for stage in metadata.stages}
    found = []
    for chain in metadata.chains:
        names = instances.get(chain.stages[0], ()) if chain.stages else ()
        for index, task in sorted(chain.tasks.items()):
            name = names[index] if index < len(names) else str(index)
            found += [(f"{chain.name}[{name}]", file) for file in task_files(task)]
    return found


def _needed_by(metadata: CheckpointMetadata) -> dict[str, str]:
    needed: dict[str, list[str]] = {}
    for task, file in _files(metadata):
        needed.setdefault(file.sha256, []).append(f"{file.path} of {task}")
    return {sha256: some[0] + (f" and {len(some) - 1} more" if len(some) > 1 else "") for sha256, some in needed.items()}


def _verify_shared(storage: CheckpointStorage, metadata: CheckpointMetadata) -> list[StateFileProblem]:
    """A checkpoint's files, which lie in `shared/`."""

    def check(file: StateFile) -> StateFileProblem | None:
        key = storage.layout.shared_file(file.name)
        where, expected = f"{storage.store.url}/{key}", f"{file.size} bytes"
        try:
            size, sha256 = read_through(storage.store, key)
        except NotFound:
            return StateFileProblem(file.sha256, expected, _NO_OBJECT, where)
        if (size, sha256) == (file.size, file.sha256):
            return None
        return StateFileProblem(file.sha256, f"{expected} with this sha256", f"{size} bytes with sha256 {sha256}", where)

    files = {file.name: file for _, file in _files(metadata)}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="verify") as pool:
        return [problem for problem in pool.map(check, files.values()) if problem is not None]


def _file_problem(problem: StateFileProblem, size: int, needed_by: str) -> Problem:
    what = f"state file {needed_by}: expected {problem.expected}, found {problem.found} (sha256 {problem.sha256})"
    kind: ProblemKind
    if problem.found == _NO_OBJECT:
        kind = "missing_file"
    else:
        kind = "wrong_content" if problem.found.startswith(f"{size} bytes ") else "wrong_size"
    return Problem(kind, what, problem.where, _ANOTHER)


def _unreadable(url: str, problem: Problem) -> VerificationReport:
    return VerificationReport(url, (problem,), None, 0, 0)
