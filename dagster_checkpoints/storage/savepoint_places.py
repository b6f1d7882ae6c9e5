"""The directories that hold a pipeline's savepoints: its own ``savepoints/``, and other directories that users name.

Must not know what is in a savepoint's directory (:mod:`savepoints`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from uuid import uuid4

from dagster_checkpoints.errors import InvalidKey, InvalidStorageUrl, StorageError
from dagster_checkpoints.execution.checkpoint_deletion import (
    DeleteSavepoint,
    HasMetadata,
    IncompleteMark,
    ListSavepointDirectories,
    ReadMark,
    sweep_savepoints,
)
from dagster_checkpoints.execution.storage_steps import drive
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.files.urls import key_below, split_directory, url_below, validate_directory
from dagster_checkpoints.storage.layout import METADATA, SAVEPOINTS, Layout, validate_savepoint_name
from dagster_checkpoints.storage.ownership import Ownership
from dagster_checkpoints.storage.savepoints import SavepointDirectory
from dagster_checkpoints.storage.shared_files import SharedFiles
from dagster_checkpoints.storage.state_files import run_all

_NAMED_IN_ERRORS = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredSavepoint:
    """A savepoint found in the pipeline's own ``savepoints/``.

    Args:
        checkpoint_id: the savepoint's id.
        name: the name that a user gave it, or "".
        location: its directory, relative to the pipeline's directory.
        url: the directory's URL.
        modified: time when the metadata was written, by the store's clock.
    """

    checkpoint_id: int
    name: str
    location: str
    url: str
    modified: datetime


class SavepointPlaces:
    """Finds and creates the savepoints of one pipeline.

    Args:
        store: the object store that holds the pipeline.
        layout: the names of the pipeline's files.
        shared: the pipeline's state files in ``shared/``.
        executor: threads for transfers.
        open_elsewhere: opens the store at a URL of another kind than ``store``'s.
    """

    def __init__(
        self,
        store: ObjectStore,
        layout: Layout,
        shared: SharedFiles,
        executor: Callable[[], Executor],
        open_elsewhere: Callable[[str], ObjectStore],
    ) -> None:
        self._store = store
        self._layout = layout
        self._shared = shared
        self._executor = executor
        self._open_elsewhere = open_elsewhere

    @property
    def _url(self) -> str:
        return f"{self._store.url}/{self._layout.pipeline}"

    def relative(self, location: str) -> str | None:
        """A location relative to the pipeline's directory, from any way to write it; None if it is not below that directory.

        Args:
            location: a checkpoint's or savepoint's: relative, or a URL or absolute path; with or without ``/_metadata``.

        Raises:
            InvalidStorageUrl: the location is a URL that storage does not understand.
        """
        directory = location.removesuffix(f"/{METADATA}").rstrip("/")
        if "://" not in directory and not directory.startswith("/"):
            return directory
        return key_below(self._url, validate_directory(directory))

    def is_savepoint(self, location: str) -> bool:
        """Whether a location is a savepoint's, judged by its name alone."""
        relative = self.relative(location)
        if relative is not None:
            return relative.startswith(f"{SAVEPOINTS}/")
        name = location.removesuffix(f"/{METADATA}").rstrip("/").rpartition("/")[2]
        return self._layout.parse_checkpoint(f"checkpoints/{name}") is None

    def new(self, checkpoint_id: int, name: str, target: str, ownership: Ownership | None) -> SavepointDirectory:
        """A directory for a new savepoint; nothing is written yet."""
        if name:
            validate_savepoint_name(name)
        folder = self._layout.savepoint(checkpoint_id, name, uuid4().hex[:6])
        directory = validate_directory(target) if target else f"{self._url}/{SAVEPOINTS}"
        if directory == f"{self._url}/{SAVEPOINTS}":
            return self._own(f"{SAVEPOINTS}/{folder}", ownership)
        if f"{directory}/".startswith(f"{self._url}/"):
            raise InvalidStorageUrl(
                f"expected a directory for savepoints outside the pipeline's own {self._url}, found {target!r}: below that, "
                f"savepoints are stored in {self._url}/{SAVEPOINTS} only. Name no directory to store them there"
            )
        return self._elsewhere(f"{directory.rstrip('/')}/{folder}", ownership)

    def at(self, location: str) -> SavepointDirectory:
        """The directory of a savepoint, whether or not the savepoint exists.

        Raises:
            InvalidKey: the location is relative and cannot be a savepoint's.
            InvalidStorageUrl: the location is a URL that storage does not understand.
        """
        relative = self.relative(location)
        if relative is None:
            return self._elsewhere(validate_directory(location.removesuffix(f"/{METADATA}").rstrip("/")), None)
        if not relative.startswith(f"{SAVEPOINTS}/"):
            raise InvalidKey(
                f"expected a savepoint such as {SAVEPOINTS}/savepoint-43-nightly, below {self._url}, or the URL or absolute path "
                f"of a savepoint's directory, found {location!r}"
            )
        return self._own(relative, None)

    def open(self, location: str) -> SavepointDirectory:
        """An existing savepoint. Raises MissingSavepoint, which names the savepoints that exist, and the errors of :meth:`at`."""
        directory = self.at(location)
        if directory.exists():
            return directory
        if directory.own:
            raise directory.missing(savepoint.location for savepoint in self.listed())
        raise directory.missing(self._near(directory.url))

    def listed(self) -> list[StoredSavepoint]:
        """The savepoints in the pipeline's own ``savepoints/``, newest first."""

        def stored_savepoint(folder: str) -> StoredSavepoint | None:
            parsed, directory = self._layout.parse_savepoint(folder), self._own(f"{SAVEPOINTS}/{folder}", None)
            info = directory.metadata_info() if parsed is not None else None
            if parsed is None or info is None:
                return None
            return StoredSavepoint(*parsed, directory.location, directory.url, info.modified)

        folders = list(self._store.folders(self._layout.savepoints))
        found = [savepoint for savepoint in run_all(self._executor(), stored_savepoint, folders) if savepoint is not None]
        return sorted(found, key=lambda savepoint: (savepoint.modified, savepoint.checkpoint_id), reverse=True)

    def sweep(self, ownership: Ownership) -> int:
        """Delete what earlier owners began to write in ``savepoints/`` and never completed. Returns their number.

        Only directories with the mark of an earlier owner of this pipeline are deleted: a savepoint that a user copies into
        ``savepoints/`` stays, complete or not, and so do the savepoints of this owner.
        """

        def perform(request: object) -> object:
            match request:
                case ListSavepointDirectories():
                    return [f"{SAVEPOINTS}/{folder}" for folder in self._store.folders(self._layout.savepoints)]
                case ReadMark(location):
                    return self._mark_of(location)
                case HasMetadata(location):
                    return self._own(location, None).exists()
                case DeleteSavepoint(location):
                    self._own(location, None).delete()
                case _:
                    raise TypeError(f"expected a request of the sweep of savepoints, found {request!r}")
            return None

        return drive(sweep_savepoints(ownership.steps, self._layout.pipeline), perform)

    def _mark_of(self, location: str) -> IncompleteMark | None:
        directory = self._own(location, None)
        try:
            return directory.incomplete()
        except InvalidKey:
            _log.warning("Did not delete %s: its name is not a savepoint's", directory.url)
            return None

    def _own(self, location: str, ownership: Ownership | None) -> SavepointDirectory:
        prefix = self._layout.at(location).rstrip("/")
        return self._directory(self._store, prefix, url_below(self._store.url, prefix), location, ownership)

    def _elsewhere(self, url: str, ownership: Ownership | None) -> SavepointDirectory:
        parent, name = split_directory(url)
        return self._directory(self._open(parent), name, url, url, ownership)

    def _open(self, url: str) -> ObjectStore:
        return self._store.sibling(url) or self._open_elsewhere(url)

    def _directory(
        self, store: ObjectStore, prefix: str, url: str, location: str, ownership: Ownership | None
    ) -> SavepointDirectory:
        return SavepointDirectory(
            store,
            prefix,
            url=url,
            location=location,
            shared=self._shared,
            executor=self._executor,
            ownership=ownership,
        )

    def _near(self, url: str) -> list[str]:
        """URLs of the complete savepoints in a directory and beside it, for the error that a directory is not a savepoint's."""
        found: list[str] = []
        parent, _ = split_directory(url)
        for place in (url, parent):
            try:
                store = self._open(place)
                folders = (name for name in store.folders() if self._layout.parse_savepoint(name) is not None)
                complete = (name for name in folders if store.head(f"{name}/{METADATA}") is not None)
                found += [f"{store.url}/{name}" for name in islice(complete, _NAMED_IN_ERRORS)]
            except StorageError:  # the list is only a hint
                continue
        return found
