"""From a storage URL to the store behind it.

The only place that knows which kinds of URL there are. S3 is imported when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dagster_checkpoints.storage.base import ObjectStore
from dagster_checkpoints.storage.errors import InvalidStorageUrl
from dagster_checkpoints.storage.local import LocalStore


def open_store(
    url: str,
    client: Any = None,
    endpoint_url: str | None = None,
    region_name: str | None = None,
    *,
    client_factory: Callable[[], Any] | None = None,
    **client_options: Any,
) -> ObjectStore:
    """Open the store at a URL, without touching it: ``store.check()`` finds out whether it works.

    Args:
        url: ``s3://bucket/prefix``, ``file:///path`` or a plain path.
        client: a boto3 S3 client (as ``dagster_aws.s3.S3Resource`` makes); by default one is made whose
            time-outs are short. Ignored for a local directory, as are the following.
        endpoint_url: of a server other than AWS.
        region_name: AWS region; boto3's own configuration by default.
        client_factory: called for a client, only if the URL is S3's.
        client_options: further options of :func:`dagster_checkpoints.storage.s3.create_client`.

    Raises:
        InvalidStorageUrl: another kind of URL, or one without a bucket or path.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        return _open_s3(url, client, client_factory, endpoint_url, region_name, client_options)
    if parts.scheme == "file":
        return LocalStore(_file_path(url))
    if "://" in url or not url.strip():
        raise _invalid(url, "that kind is not supported" if url.strip() else "it is empty")
    return LocalStore(Path(os.path.expanduser(url)))


def validate_target(target: str) -> str:
    """Refuse a directory for savepoints that would mean something else in another process.

    Args:
        target: ``s3://bucket/prefix``, ``file:///path`` or an absolute path.

    Raises:
        InvalidStorageUrl: another kind of URL, a relative path, or an incomplete one. Nothing is opened.
    """
    parts = urlsplit(target)
    if parts.scheme == "s3":
        _split_s3(target)
    elif parts.scheme == "file":
        _file_path(target)
    elif "://" in target or not target.strip():
        raise _invalid(target, "that kind is not supported" if target.strip() else "it is empty")
    elif not os.path.isabs(target):
        raise _invalid(target, "a relative path would mean another directory in each process. Give an absolute path, or a URL")
    return target


def _file_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise _invalid(url, "a file URL has three slashes and an absolute path")
    return Path(unquote(parts.path))


def _split_s3(url: str) -> tuple[str, str]:
    # Not urlsplit: '?' and '#' are ordinary characters of a key.
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise _invalid(url, "it names no bucket")
    if any(part in (".", "..") for part in prefix.split("/")) or "//" in prefix:
        raise _invalid(url, "its prefix has empty, '.' or '..' parts")
    return bucket, prefix


def _open_s3(
    url: str,
    client: Any,
    client_factory: Callable[[], Any] | None,
    endpoint_url: str | None,
    region_name: str | None,
    client_options: dict[str, Any],
) -> ObjectStore:
    from dagster_checkpoints.storage.s3 import S3Store, create_client

    bucket, prefix = _split_s3(url)
    if client is None:
        client = (
            client_factory()
            if client_factory is not None
            else create_client(endpoint_url=endpoint_url, region_name=region_name, **client_options)
        )
    return S3Store(bucket, prefix, client=client)


def _invalid(url: str, why: str) -> InvalidStorageUrl:
    return InvalidStorageUrl(
        f"expected a storage URL such as s3://bucket/prefix, file:///path or a plain path, found {url!r}: {why}"
    )
