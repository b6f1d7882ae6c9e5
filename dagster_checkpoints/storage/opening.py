"""From a storage URL to the store behind it.

The only place that knows which kinds of URL there are. S3 is imported when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagster_checkpoints.storage.base import ObjectStore
from dagster_checkpoints.storage.local import LocalStore
from dagster_checkpoints.storage.urls import local_path, s3_parts, validate_root


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
    from dagster_checkpoints.storage.s3 import S3Store, create_client

    bucket, prefix = s3_parts(url)
    if client is None:
        client = (
            client_factory()
            if client_factory is not None
            else create_client(endpoint_url=endpoint_url, region_name=region_name, **client_options)
        )
    return S3Store(bucket, prefix, client=client)
