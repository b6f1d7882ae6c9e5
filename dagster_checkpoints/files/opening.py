"""Opens the object store at a storage URL.

The only module that knows which kinds of URL exist. The S3 store is imported only for an S3 URL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.files.store import ObjectStore
from dagster_checkpoints.files.urls import local_path, s3_parts, validate_root


def open_store(
    url: str,
    client: Any = None,
    endpoint_url: str | None = None,
    region_name: str | None = None,
    *,
    client_factory: Callable[[], Any] | None = None,
    **client_options: Any,
) -> ObjectStore:
    """Open the store at a URL, without any access to it: ``store.check()`` checks whether it works.

    Args:
        url: ``s3://bucket/prefix``, ``file:///path`` or a plain path.
        client: a boto3 S3 client (as ``dagster_aws.s3.S3Resource`` makes); default: a new client with short
            time-outs. This argument and the following ones are ignored for a local directory.
        endpoint_url: URL of a server other than AWS.
        region_name: AWS region; default: from boto3's configuration.
        client_factory: returns a client; called only for an S3 URL without ``client``.
        client_options: further options of :func:`dagster_checkpoints.files.s3.create_client`.

    Raises:
        InvalidStorageUrl: another kind of URL, or a URL without a bucket or path.
    """
    if validate_root(url) == "s3":
        return _open_s3(url, client, client_factory, endpoint_url, region_name, client_options)
    return LocalStore(local_path(url) or Path(os.path.expanduser(url)))


def _open_s3(
    url: str,
    client: Any,
    client_factory: Callable[[], Any] | None,
    endpoint_url: str | None,
    region_name: str | None,
    client_options: dict[str, Any],
) -> ObjectStore:
    from dagster_checkpoints.files.s3 import S3Store, create_client

    bucket, prefix = s3_parts(url)
    if client is None:
        client = (
            client_factory()
            if client_factory is not None
            else create_client(endpoint_url=endpoint_url, region_name=region_name, **client_options)
        )
    return S3Store(bucket, prefix, client=client)
