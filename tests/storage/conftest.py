"""Both kinds of storage, a clock that tests set, and a store that loses answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dagster_checkpoints.errors import OutcomeUnknown, StorageUnavailable
from dagster_checkpoints.execution.pipeline_state import Owner
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.s3 import S3Store
from dagster_checkpoints.files.store import ObjectInfo, ObjectStore, PutMode
from dagster_checkpoints.storage import CheckpointStorage
from resources.embedded_s3 import EmbeddedS3


@dataclass
class ManualClock:
    """A monotonic clock that moves when code sleeps, or when the test sets it."""

    now: float = 1000.0
    on_sleep: list[Callable[[], object]] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for callback in self.on_sleep:
            callback()


class FaultyStore:
    """A store whose requests and answers a test can let get lost."""

    def __init__(self, store: ObjectStore) -> None:
        self.inner = store
        self.faults: list[str] = []
        """For the next writes: ``lost answer``, ``lost request``, ``unavailable``, ``fine``."""
        self.away = False
        self.puts = 0

    @property
    def poll_seconds(self) -> float:
        return self.inner.poll_seconds

    def change_mark(self, prefix: str) -> str | None:
        self._reach()
        return self.inner.change_mark(prefix)

    @property
    def url(self) -> str:
        return self.inner.url

    def check(self) -> None:
        self._reach()
        self.inner.check()

    def get(self, key: str) -> bytes:
        self._reach()
        return self.inner.get(key)

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        self._reach()
        return self.inner.get_with_etag(key)

    def stream(self, key: str, chunk_size: int = 1024 * 1024) -> Iterator[bytes]:
        self._reach()
        return self.inner.stream(key, chunk_size)

    def put(self, key: str, data: bytes, mode: PutMode = "overwrite") -> str:
        self._reach()
        self.puts += 1
        fault = self.faults.pop(0) if self.faults else "fine"
        if fault == "unavailable":
            raise StorageUnavailable("injected")
        if fault == "lost request":
            raise OutcomeUnknown("injected")
        etag = self.inner.put(key, data, mode)
        if fault == "lost answer":
            raise OutcomeUnknown("injected")
        return etag

    def put_file(self, key: str, path: Path) -> None:
        self._reach()
        self.inner.put_file(key, path)

    def copy_from(
        self, source: ObjectStore, source_key: str, key: str, size: int | None = None, *, etag: str = "", hashed: bool = False
    ) -> bool:
        self._reach()
        inner = source.inner if isinstance(source, FaultyStore) else source
        return self.inner.copy_from(inner, source_key, key, size, etag=etag, hashed=hashed)

    def sibling(self, url: str) -> ObjectStore | None:
        sibling = self.inner.sibling(url)
        if sibling is None:
            return None
        faulty = FaultyStore(sibling)
        faulty.faults = self.faults  # the same network
        return faulty

    def folders(self, prefix: str = "") -> Iterator[str]:
        self._reach()
        return self.inner.folders(prefix)

    def head(self, key: str) -> ObjectInfo | None:
        self._reach()
        return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._reach()
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._reach()
        self.inner.delete(keys)

    def _reach(self) -> None:
        if self.away:
            raise StorageUnavailable("injected")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[EmbeddedS3]:
    with EmbeddedS3() as server:
        yield server


@pytest.fixture
def s3(s3_server: EmbeddedS3) -> Iterator[EmbeddedS3]:
    yield s3_server
    s3_server.heal()


@pytest.fixture(scope="session")
def s3_client(s3_server: EmbeddedS3) -> Any:
    # Once: creating a client costs more than most tests. One attempt: the client's own retries have separate tests.
    return s3_server.client(retries={"mode": "standard", "total_max_attempts": 1}, read_timeout=60)


@pytest.fixture
def s3_store(s3: EmbeddedS3, s3_client: Any) -> S3Store:
    return S3Store(s3.bucket, f"root-{uuid4().hex}", client=s3_client, sleep=lambda _: None)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalStore(tmp_path / "root")
    found: ObjectStore = request.getfixturevalue("s3_store")
    return found


@pytest.fixture
def faulty(store: ObjectStore) -> FaultyStore:
    return FaultyStore(store)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def storage(faulty: FaultyStore, clock: ManualClock) -> Iterator[CheckpointStorage]:
    with CheckpointStorage(faulty, "flights", monotonic=clock.monotonic, sleep=clock.sleep) as opened:
        yield opened


@pytest.fixture
def second(store: ObjectStore, clock: ManualClock) -> Iterator[CheckpointStorage]:
    """The same pipeline for another process, whose connection is good."""
    with CheckpointStorage(store, "flights", monotonic=clock.monotonic, sleep=clock.sleep) as opened:
        yield opened


@pytest.fixture
def alice() -> Owner:
    return Owner(run_id="run-a", host="alpha", pid=1)


@pytest.fixture
def bob() -> Owner:
    return Owner(run_id="run-b", host="beta", pid=2)
