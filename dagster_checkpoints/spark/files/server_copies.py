"""Copies between the work directory and the storage of the checkpoints that the S3 server makes, where one server holds both.

Whether it is one server is tried, not guessed: two clients with their own endpoints, credentials and encryption reach it.
"""

from __future__ import annotations

from contextlib import suppress
from uuid import uuid4

from dagster_checkpoints.errors import InvalidStorageUrl, StorageError
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.spark.files.hadoop_path import HadoopPath
from dagster_checkpoints.spark.files.work_path import WorkPath
from dagster_checkpoints.storage.state_files import CopyTarget

SMALLEST_SERVER_COPY = 1 << 20
"""Size in bytes of the smallest file that the server copies: for a smaller one its requests take longer than the bytes."""

_SCHEME = "s3a://"


def try_server_copies(folder: WorkPath, storage: ObjectStore) -> str:
    """Try whether the server of the storage copies objects of the work directory; if so, the work directory's files use that.

    Args:
        folder: A new folder in the work directory.
        storage: The store of the checkpoints.

    Returns:
        Why it does not, for the log; "" if it does.
    """
    if not isinstance(folder, HadoopPath) or not str(folder).startswith(_SCHEME):
        return "the work directory is not on s3a://"
    name = str(folder).removeprefix(_SCHEME).partition("/")[0]
    try:
        bucket = storage.sibling(f"s3://{name}")
    except InvalidStorageUrl as error:
        return str(error)
    if bucket is None:
        return f"the storage is not in S3: {storage.url}"
    try:
        refusal = _try(folder, bucket, storage)
    except (StorageError, OSError) as error:
        refusal = f"{type(error).__name__}: {error}"
    if not refusal:
        folder.system.bucket = bucket
    return refusal


def _try(folder: HadoopPath, bucket: ObjectStore, storage: ObjectStore) -> str:
    """Copy a small object of the work directory to the storage, and from there back to the work directory."""
    text, probe = uuid4().hex, f".probe-{uuid4().hex}"
    there, back = folder / "there", folder / "back"
    there.write_text(text)
    try:
        if not storage.copy_from(bucket, there.object_key, probe, len(text), hashed=True):
            return "the server refuses to copy from the work directory to the storage"
        if storage.get(probe) != text.encode():
            return "the storage's client does not see the bytes that Spark writes"
        if not bucket.copy_from(storage, probe, back.object_key, len(text), hashed=True):
            return "the server refuses to copy from the storage to the work directory"
        if back.read_text() != text:
            return "Spark does not see the bytes that the storage's client writes"
    finally:
        with suppress(StorageError):
            storage.delete([probe])
    return ""


def server_copy_target(folder: WorkPath) -> CopyTarget | None:
    """A folder of the work directory as the target of copies that the server makes; None if the server makes none."""
    if not isinstance(folder, HadoopPath) or folder.system.bucket is None:
        return None
    system, start = folder.system, folder.object_key

    def hash_of(key: str) -> str:
        return (folder / key.removeprefix(f"{start}/")).sha256()

    assert system.bucket is not None
    return CopyTarget(system.bucket, start, hash_of)


def is_large_enough(size: int) -> bool:
    """Whether the server should copy a file of this size, in bytes."""
    return size >= SMALLEST_SERVER_COPY
