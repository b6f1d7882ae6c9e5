"""Properties that only the local store has."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from dagster_checkpoints.errors import AlreadyExists, InvalidKey, NotFound, Precondition, StorageUnavailable
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.store import UpdateVersion


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def test_an_unusable_root_is_unavailable_and_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = LocalStore(tmp_path / "file" / "root")
    for action in (store.check, lambda: store.put("a", b"")):
        with pytest.raises(StorageUnavailable, match=f"{tmp_path.as_uri()}/file/root.*Not a directory"):
            action()


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_link_to_a_disk_that_is_not_mounted_is_named(tmp_path: Path, below: str) -> None:
    """A savepoint's target: it was said that another program deletes the directory."""
    (tmp_path / "kept").symlink_to(tmp_path / "not-mounted")
    store = LocalStore(Path(f"{tmp_path}/kept{below}"))
    with pytest.raises(StorageUnavailable, match=f"{tmp_path}/kept is a link to a place that does not exist"):
        store.put("savepoint-1/_metadata", b"")


def test_a_disk_that_is_full_is_unavailable_and_leaves_nothing(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("key", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        local.put("key", b"new")
    monkeypatch.undo()
    assert local.get("key") == b"old"
    assert [path.name for path in local.root.iterdir()] == ["key"]


def test_a_copy_leaves_the_page_cache_when_it_is_on_disk(
    local: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    fsync, advise = os.fsync, os.posix_fadvise

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("synced", os.fstat(descriptor).st_ino))

    def advised(descriptor: int, offset: int, length: int, advice: int) -> None:
        advise(descriptor, offset, length, advice)
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)  # 0 bytes: up to the file's end
        calls.append(("dropped", os.fstat(descriptor).st_ino))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    (tmp_path / "file").write_bytes(os.urandom(100_000))
    local.put_file("state", tmp_path / "file")  # a restart or a savepoint may read it
    assert "dropped" not in dict(calls)
    calls.clear()
    assert local.copy_from(local, "state", "savepoint")
    copy = (local.root / "savepoint").stat().st_ino
    assert calls[:2] == [("synced", copy), ("dropped", copy)]
    assert local.get("savepoint") == (tmp_path / "file").read_bytes()


def test_a_system_without_fadvise_copies_too(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    local.put("state", b"bytes")
    for missing in (False, True):
        if missing:
            monkeypatch.delattr(os, "posix_fadvise")
        else:
            monkeypatch.setattr(os, "posix_fadvise", refuses)
        assert local.copy_from(local, "state", f"savepoint-{missing}")
        assert local.get(f"savepoint-{missing}") == b"bytes"


def test_create_is_exclusive_without_hard_links(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    local.put("key", b"first", "create")
    with pytest.raises(AlreadyExists):
        local.put("key", b"second", "create")
    assert local.get("key") == b"first"


def test_a_file_that_a_crash_leaves_half_written_is_not_an_object(local: LocalStore) -> None:
    local.put("folder/key", b"x")
    (local.root / "folder" / ".~tmp-left").write_bytes(b"half")
    assert [info.key for info in local.list()] == ["folder/key"]


def test_a_file_that_a_crash_has_left_is_deleted_a_day_later(local: LocalStore) -> None:
    """A killed upload leaves a file as large as the state, and each further kill another one."""
    local.put("shared/key", b"x")
    abandoned, young = (local.root / "shared" / f".~tmp-{name}" for name in ("abandoned", "young"))
    for file, hours in ((abandoned, 25), (young, 23)):
        file.write_bytes(b"half")
        written = time.time() - hours * 3600
        os.utime(file, (written, written))
    assert [info.key for info in local.list("shared/")] == ["shared/key"]
    assert not abandoned.exists() and young.exists()


def test_a_link_cannot_lead_out_of_the_root(local: LocalStore, tmp_path: Path) -> None:
    local.put("key", b"x")
    (local.root / "out").symlink_to(tmp_path)
    with pytest.raises(InvalidKey, match="leads out"):
        local.put("out/escaped", b"")
    assert not (tmp_path / "escaped").exists()


def test_a_root_that_is_itself_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    LocalStore(tmp_path / "link").put("a/b", b"x")
    assert LocalStore(tmp_path / "real").get("a/b") == b"x"


def test_directories_vanish_with_their_last_object(local: LocalStore) -> None:
    local.put("a/b/c", b"")
    local.put("a/d", b"")
    local.delete(["a/b/c"])
    assert not (local.root / "a" / "b").exists()
    local.delete(["a/d"])
    assert list(local.root.iterdir()) == []


def test_writing_into_a_directory_that_is_being_emptied(local: LocalStore) -> None:
    stop = threading.Event()

    def empty_it() -> None:
        while not stop.is_set():
            local.put("shared/other", b"")
            local.delete(["shared/other"])

    thread = threading.Thread(target=empty_it)
    thread.start()
    try:
        for number in range(200):
            local.put(f"shared/{number}", b"kept", "create")
            assert local.get(f"shared/{number}") == b"kept"
            local.delete([f"shared/{number}"])
    finally:
        stop.set()
        thread.join()


def test_a_lock_held_too_long_is_reported(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, lock_timeout=0.0)
    etag = store.put("key", b"1")
    with store._lock(), pytest.raises(StorageUnavailable, match="found it held"):
        store.put("key", b"2", UpdateVersion(etag))
    assert store.get("key") == b"1"
    store.put("key", b"2", UpdateVersion(etag))
    with pytest.raises(Precondition):
        store.put("key", b"3", UpdateVersion(etag))


@pytest.mark.parametrize("change", ["create", "overwrite", "delete", "none"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_shows_by_its_mark_that_it_has_changed(tmp_path: Path, change: str, exists: bool) -> None:
    store = LocalStore(tmp_path)
    if exists or change in ("overwrite", "delete"):
        store.put("flights/requests/one.json", b"1")
        os.utime(tmp_path / "flights" / "requests", (1, 1))  # the clock of the file system has ticked since
    before = store.change_mark("flights/requests/")
    if change == "delete":
        store.delete(["flights/requests/one.json"])
    elif change != "none":
        store.put("flights/requests/" + ("one.json" if change == "overwrite" else "two.json"), b"2")
    assert (store.change_mark("flights/requests/") == before) is (change == "none")


def test_a_directory_in_the_place_of_a_file_is_named(local: LocalStore) -> None:
    (local.root / "status.json").mkdir(parents=True)
    for act in (lambda: local.put("status.json", b"x"), lambda: local.get("status.json")):
        with pytest.raises(NotFound, match=r"expected an object at .*/status\.json, found a directory: move it away"):
            act()
