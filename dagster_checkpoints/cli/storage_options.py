"""The options that commands share: the storage, the pipeline, and durations."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from dagster_checkpoints.cli.exits import NothingThere, UsageProblem
from dagster_checkpoints.cli.output import JSON
from dagster_checkpoints.definitions.instance import shared_parts_below
from dagster_checkpoints.errors import InvalidKey
from dagster_checkpoints.execution.pipeline_state import PipelineState
from dagster_checkpoints.files.opening import open_store
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.pipeline.setting_values import no_seconds
from dagster_checkpoints.storage.checkpoints import CheckpointStorage
from dagster_checkpoints.storage.layout import PIPELINE_STATE, Layout
from dagster_checkpoints.storage.root import storage_root


class Seconds(click.FloatRange):
    """A number of seconds; a text such as "5s", NaN or infinity is refused, with the number to write if it says one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(ValueError):
            value = float(value)
        if reason := no_seconds(value):
            self.fail(reason, param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True)
class StorageOptions:
    """The values of the shared options; None for an option that is not given.

    Attributes:
        storage: root of the storage: a URL or a path.
        pipeline: name of the pipeline.
        endpoint_url: URL of an S3 server other than AWS.
        region: AWS region.
        profile: AWS profile.
        as_json: whether the output is JSON.
    """

    storage: str | None
    pipeline: str | None
    endpoint_url: str | None
    region: str | None
    profile: str | None
    as_json: bool

    def store(self, root: str | None = None) -> ObjectStore:
        """The object store at the root of the storage.

        Args:
            root: URL or path of another root; by default that of the options.

        Raises:
            NoStorageError: neither an option nor the environment names the storage.
            InvalidStorageUrl: the root is not a URL or path of a storage.
            UsageProblem: the options for S3 cannot be used.
        """
        url = root or storage_root(self.storage, setting="--storage", shared_parts=_shared_parts)
        try:
            return open_store(url, endpoint_url=self.endpoint_url, region_name=self.region, profile_name=self.profile)
        except Exception as error:
            if isinstance(error, ValueError) or type(error).__module__.startswith("botocore."):  # no such profile, for instance
                raise UsageProblem(f"{url}: {error}") from error
            raise

    def storage_of(self, store: ObjectStore, pipeline: str) -> CheckpointStorage:
        """One pipeline's storage. Raises InvalidKey."""
        return CheckpointStorage(store, pipeline, open_elsewhere=self.store)

    @contextmanager
    def open(self) -> Iterator[CheckpointStorage]:
        """The storage of the pipeline that the options name, or of the only pipeline in the storage.

        Raises:
            NothingThere: no pipeline ever ran in this storage.
            UsageProblem: the storage has several pipelines, and the options name none.
        """
        store = self.store()
        name = self.pipeline if self.pipeline is not None else _only_one(store)
        with self.storage_of(store, name) as storage:
            yield storage

    def state(self, storage: CheckpointStorage) -> PipelineState:
        """The content of `state.json`. Raises NothingThere if the pipeline never ran in this storage, or its state was lost."""
        state = storage.read_state()
        if (state is None or state.lease is None) and (problem := storage.describe_unlisted(state)):
            raise NothingThere(problem)
        if state is None:
            names = ", ".join(pipelines(storage.store)) or "none"
            raise NothingThere(
                f"expected a pipeline {storage.pipeline!r} in {storage.store.url}, found no pipeline of that name in it. "
                f"Its pipelines: {names}. Is it the right --storage?"
            )
        return state


def _shared_parts() -> list[str]:
    home = os.environ.get("DAGSTER_HOME")
    try:
        return shared_parts_below(home) if home else []
    except ValueError as error:
        raise UsageProblem(f"{error}. Name the storage of the checkpoints with --storage") from error


def pipelines(store: ObjectStore) -> list[str]:
    """The names of all pipelines that ever ran in this storage, sorted."""
    names = []
    for name in store.folders():
        with suppress(InvalidKey):  # a directory that is not a pipeline's
            layout = Layout(name)
            if store.head(layout.state) is not None or _has_checkpoints(store, layout):
                names.append(name)
    return sorted(names)


def _has_checkpoints(store: ObjectStore, layout: Layout) -> bool:
    """Whether a pipeline whose `state.json` was lost has checkpoints or savepoints."""
    checkpoints = (layout.parse_checkpoint(f"checkpoints/{folder}") for folder in store.folders(layout.checkpoints))
    return any(checkpoints) or any(store.folders(layout.savepoints))


def no_pipeline(store: ObjectStore) -> NothingThere:
    """The error that a storage holds no pipeline."""
    found = "none. Is it the right --storage?"
    if store.head(PIPELINE_STATE) is not None:
        found = "the directory of one pipeline. Its --storage is the directory above"
    return NothingThere(f"expected the state of a pipeline in {store.url}, found {found}")


def asked_by() -> str:
    """The requester, as people read it: user and host."""
    user = "unknown user"
    with suppress(OSError, KeyError, ImportError):
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()} (dagster-checkpoints)"


def storage_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command; the command gets them as its first argument, a :class:`StorageOptions`."""

    @wraps(command)
    def called(
        storage: str | None,
        pipeline: str | None,
        endpoint_url: str | None,
        region: str | None,
        profile: str | None,
        as_json: bool,
        **others: Any,
    ) -> Any:
        click.get_current_context().find_root().meta[JSON] = as_json
        return command(StorageOptions(storage, pipeline, endpoint_url, region, profile, as_json), **others)

    for option in reversed(_OPTIONS):
        called = option(called)
    return called


def _only_one(store: ObjectStore) -> str:
    names = pipelines(store)
    if len(names) == 1:
        return names[0]
    if not names:
        raise no_pipeline(store)
    raise UsageProblem(f"{store.url} has several pipelines: {', '.join(names)}. Name one with --pipeline")


_OPTIONS = (
    click.option(
        "--storage",
        metavar="URL",
        help="Root of the checkpoints: s3://bucket/prefix, file:///path or a path. Default: CHECKPOINT_STORAGE, else "
        "DAGSTER_HOME/checkpoints.",
    ),
    click.option("--pipeline", metavar="NAME", help="Default: the only one in the storage."),
    click.option("--endpoint-url", metavar="URL", help="URL of an S3 server other than AWS. Default: boto3's own configuration."),
    click.option("--region", metavar="NAME", help="AWS region. Default: boto3's own configuration."),
    click.option("--profile", metavar="NAME", help="AWS profile. Default: boto3's own configuration."),
    click.option("--json", "as_json", is_flag=True, help="Write JSON, for programs."),
)
