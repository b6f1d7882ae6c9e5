"""The S3 object store, through boto3; also for other servers with S3's protocol.

Must not know what the objects mean. Conditional writes need care: the store distinguishes 409 from 412, recognises its own
write when only the answer was lost, and never reports a write as refused that may have landed.
Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
"""

from __future__ import annotations

import base64
import copy
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import botocore.exceptions as aws
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from dagster_checkpoints.errors import (
    AlreadyExists,
    NotFound,
    Precondition,
    StorageAccessDenied,
    StorageError,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.files.s3_errors import DENIED, AttemptWatch, error_code, may_have_landed, may_not_copy, translate
from dagster_checkpoints.files.store import (
    ObjectInfo,
    ObjectStore,
    PutMode,
    UpdateVersion,
    probe,
    validate_key,
)
from dagster_checkpoints.files.urls import s3_parts

_CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json"}
"""By the end of a key: a browser shows these, and would save other objects."""
_TOKEN = "write-token"
_DELETE_BATCH = 1000
_READ_ATTEMPTS = 3
_BROKEN_BODY = (aws.IncompleteReadError, aws.ResponseStreamingError)
_BOTO_ERRORS = (aws.BotoCoreError, aws.ClientError, Boto3Error)


def create_client(
    *,
    endpoint_url: str | None = None,
    region_name: str | None = None,
    profile_name: str | None = None,
    connect_timeout: float = 3.0,
    read_timeout: float = 8.0,
    max_attempts: int = 3,
    max_connections: int = 32,
) -> Any:
    """A boto3 client whose time-outs fit a lease of 30 s: boto3's default time-outs are a minute, several times.

    Args:
        endpoint_url: URL of a server other than AWS; default: from boto3's configuration.
        region_name: AWS region; default: from boto3's configuration.
        profile_name: AWS profile; default: from boto3's configuration.
        connect_timeout: seconds to connect, per attempt.
        read_timeout: seconds without a byte, per attempt.
        max_attempts: maximum attempts of one request, the first included ("standard" retries).
        max_connections: maximum number of open connections.
    """
    config = Config(
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        retries={"mode": "standard", "total_max_attempts": max_attempts},
        max_pool_connections=max_connections,
    )
    session = boto3.session.Session(profile_name=profile_name, region_name=region_name)
    return session.client("s3", endpoint_url=endpoint_url, config=config)


class S3Store:
    """An :class:`~dagster_checkpoints.files.store.ObjectStore` in a bucket.

    Args:
        bucket: the bucket's name; the bucket must exist.
        prefix: the prefix of all keys, without slashes around it.
        client: a boto3 S3 client; default: one from :func:`create_client`.
        multipart_bytes: files of at least this size are sent in parts, several at a time; default 16 MiB.
        copy_bytes: objects of at least this size are copied in parts, several at a time; default 64 MiB.
        conflict_attempts: maximum attempts of a conditional write that S3 answers with 409.
        sleep: waits for a number of seconds between these attempts.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        client: Any = None,
        multipart_bytes: int = 16 * 1024 * 1024,
        copy_bytes: int = 64 * 1024 * 1024,
        conflict_attempts: int = 6,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        self._client = client if client is not None else create_client()
        self._multipart_bytes = multipart_bytes
        self._conflict_attempts = conflict_attempts
        self._sleep = sleep
        self._transfer = TransferConfig(
            multipart_threshold=multipart_bytes,
            multipart_chunksize=max(multipart_bytes, 8 << 20),
            max_concurrency=4,
        )
        # The server would not answer one request for all the bytes within the time-out.
        self._copying = TransferConfig(multipart_threshold=copy_bytes, multipart_chunksize=copy_bytes, max_concurrency=4)
        self._copy_bytes = copy_bytes
        self._watch = AttemptWatch(self._client, "PutObject")

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def poll_seconds(self) -> float:
        return 1.0

    def change_mark(self, prefix: str) -> str | None:
        return None

    def __repr__(self) -> str:
        return f"S3Store({self.url!r}, endpoint={self._client.meta.endpoint_url!r})"

    def check(self) -> None:
        with self._errors("reach", ""):
            self._client.list_objects_v2(Bucket=self.bucket, Prefix=self._full(""), MaxKeys=1)
        probe(self)

    def get(self, key: str) -> bytes:
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        for attempt in range(_READ_ATTEMPTS):
            try:
                with self._errors("read", key):
                    response = self._client.get_object(Bucket=self.bucket, Key=self._key(key))
                    return response["Body"].read(), response["ETag"]
            except NotFound:
                raise
            except StorageUnavailable as error:
                # boto3 retries until it has the headers; this loop retries a body that breaks off.
                if attempt == _READ_ATTEMPTS - 1 or not isinstance(error.__cause__, _BROKEN_BODY):
                    raise
        raise AssertionError("unreachable")

    def stream(self, key: str, chunk_size: int = 1024 * 1024) -> Iterator[bytes]:
        with self._errors("read", key):
            body = self._client.get_object(Bucket=self.bucket, Key=self._key(key))["Body"]
            try:
                yield from body.iter_chunks(chunk_size)
            finally:
                body.close()

    def put(self, key: str, data: bytes, mode: PutMode = "overwrite") -> str:
        token = uuid4().hex
        arguments: dict[str, Any] = {
            "Bucket": self.bucket,
            "Key": self._key(key),
            "Body": data,
            "Metadata": {_TOKEN: token},
        }
        for suffix, content_type in _CONTENT_TYPES.items():
            if key.endswith(suffix):
                arguments["ContentType"] = content_type
        if mode == "create":
            arguments["IfNoneMatch"] = "*"
        elif isinstance(mode, UpdateVersion):
            arguments["IfMatch"] = mode.etag
        unknown = False
        for attempt in range(self._conflict_attempts):
            if attempt:
                self._sleep(random.uniform(0.5, 1.0) * min(2.0, 0.05 * 2**attempt))
            self._watch.start()
            try:
                return str(self._client.put_object(**arguments)["ETag"])
            except _BOTO_ERRORS as error:
                unknown = unknown or self._watch.ambiguous
                # After the last 409 an attempt in front of it that got no answer may still land.
                if error_code(error)[0] != 409 or (unknown and attempt + 1 == self._conflict_attempts):
                    return self._resolve_failed_put(key, mode, token, error, unknown)
        raise WriteConflict(
            f"the server answered 409 (conflicting conditional writes) to {self._conflict_attempts} attempts "
            f"to write {self.url}/{key}; nothing was written. Is another program writing this object all the "
            "time?"
        )

    def _resolve_failed_put(self, key: str, mode: PutMode, token: str, error: Exception, unknown: bool) -> str:
        """Find out what a failed put means; returns the etag if the object was written, raises otherwise."""
        status, code = error_code(error)
        conditional = mode != "overwrite"
        refused = conditional and (status == 412 or (status == 404 and code != "NoSuchBucket"))
        if refused or (unknown and conditional):
            try:
                etag = self._own_write(key, token)
            except StorageError:
                if not unknown:
                    raise
                raise self._translated(error, "write", key, unknown=True) from error
            if etag is not None:
                return etag
        if refused and mode == "create":
            raise AlreadyExists(f"expected no object at {self.url}/{key}, found one") from error
        if refused:
            raise Precondition(f"expected {self.url}/{key} unchanged, found it changed or gone") from error
        raise self._translated(error, "write", key, unknown=unknown) from error

    def _own_write(self, key: str, token: str) -> str | None:
        try:
            with self._errors("inspect", key):
                response = self._client.head_object(Bucket=self.bucket, Key=self._key(key))
        except NotFound:
            return None
        return str(response["ETag"]) if response.get("Metadata", {}).get(_TOKEN) == token else None

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._multipart_bytes:
                self.put(key, file.read())
                return
            try:
                self._client.upload_fileobj(file, self.bucket, self._key(key), Config=self._transfer)
            except _BOTO_ERRORS as error:
                raise self._translated(error, "write", key, unknown=may_have_landed(error)) from error

    def copy_from(
        self, source: ObjectStore, source_key: str, key: str, size: int | None = None, *, etag: str = "", hashed: bool = False
    ) -> bool:
        if not isinstance(source, S3Store) or source._client.meta.endpoint_url != self._client.meta.endpoint_url:
            return False
        origin, target = {"Bucket": source.bucket, "Key": source._key(source_key)}, self._key(key)
        condition = {"CopySourceIfMatch": etag} if etag else {}
        try:
            if size is not None and size < self._copy_bytes:
                # Of a copy in parts S3 knows no sha256 of the whole.
                arguments = {**condition, "ChecksumAlgorithm": "SHA256"} if hashed else condition
                self._client.copy_object(CopySource=origin, Bucket=self.bucket, Key=target, **arguments)
            else:
                self._client.copy(origin, self.bucket, target, ExtraArgs=condition, Config=self._copying)
        except _BOTO_ERRORS as error:
            if may_not_copy(error):
                return False
            if etag and error_code(error)[0] == 412:
                raise Precondition(f"expected {source.url}/{source_key} with etag {etag}, found another version") from error
            if error_code(error)[0] == 404 and error_code(error)[1] != "NoSuchBucket":
                raise NotFound(f"expected an object at {source.url}/{source_key}, found none") from error
            raise self._translated(error, "copy to", key, unknown=may_have_landed(error)) from error
        return True

    def sibling(self, url: str) -> ObjectStore | None:
        if not url.startswith("s3://"):
            return None
        store = copy.copy(self)  # shares the client and its AttemptWatch
        store.bucket, store.prefix = s3_parts(url)
        return store

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors("inspect", key):
                response = self._client.head_object(Bucket=self.bucket, Key=self._key(key), ChecksumMode="ENABLED")
        except NotFound:
            return None
        return ObjectInfo(key, response["ContentLength"], response["LastModified"], _sha256_in_answer(response))

    def folders(self, prefix: str = "") -> Iterator[str]:
        full = self._full(prefix)
        with self._errors("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=full, Delimiter="/")
            for page in pages:
                for entry in page.get("CommonPrefixes", ()):
                    yield entry["Prefix"][len(full) : -1]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        skip = len(self._full(""))
        with self._errors("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self._full(prefix))
            for page in pages:
                for entry in page.get("Contents", ()):
                    if entry["Key"].endswith("/"):  # marks a folder: the S3 console and Hadoop create such objects
                        continue
                    yield ObjectInfo(entry["Key"][skip:], entry["Size"], entry["LastModified"])

    def delete(self, keys: Iterable[str]) -> None:
        full = [self._key(key) for key in keys]
        for start in range(0, len(full), _DELETE_BATCH):
            objects = [{"Key": key} for key in full[start : start + _DELETE_BATCH]]
            with self._errors("delete", f"{len(objects)} objects"):
                answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
            if failed := answer.get("Errors"):
                first = failed[0]
                text = (
                    f"cannot delete {len(failed)} of {len(objects)} objects below {self.url}; the first is {first.get('Key')}: "
                    f"{first.get('Code')}: {first.get('Message')}"
                )
                if first.get("Code") in DENIED:
                    raise StorageAccessDenied(
                        f"{text}. Expected credentials that allow s3:DeleteObject on bucket {self.bucket!r}"
                    )
                raise StorageUnavailable(text)

    def _full(self, prefix: str) -> str:
        return f"{self.prefix}/{prefix}" if self.prefix else prefix

    def _key(self, key: str) -> str:
        return self._full(validate_key(key))

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except _BOTO_ERRORS as error:
            raise self._translated(error, verb, key, unknown=False) from error

    def _translated(self, error: Exception, verb: str, key: str, *, unknown: bool) -> StorageError:
        return translate(
            error,
            verb=verb,
            where=f"{self.url}/{key}".rstrip("/"),
            bucket=self.bucket,
            endpoint=self._client.meta.endpoint_url,
            unknown=unknown,
        )


def _sha256_in_answer(answer: Mapping[str, Any]) -> str | None:
    """The sha256 of an object's bytes, hexadecimal, in the answer to a HeadObject with ``ChecksumMode``; None if it has none.

    S3 stores it beside an object if the writer asked for it. An object that was written in parts has a checksum of the parts'
    checksums instead, which ends with their number.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
    """
    checksum = str(answer.get("ChecksumSHA256") or "")
    if not checksum or "-" in checksum or answer.get("ChecksumType") == "COMPOSITE":
        return None
    return base64.b64decode(checksum).hex()
