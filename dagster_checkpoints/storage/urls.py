"""URLs of storage: their parts, and when two of them mean the same directory.

Text only: nothing here opens or looks at anything.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dagster_checkpoints.storage.errors import InvalidStorageUrl


def local_path(url: str) -> Path | None:
    """The path in a ``file:`` URL, or an absolute path; None of anything else."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return Path(unquote(parts.path))
    return Path(url) if url.startswith("/") else None


def s3_parts(url: str) -> tuple[str, str]:
    """Bucket and prefix of an ``s3:`` URL.

    Raises:
        InvalidStorageUrl: it names no bucket, or its prefix could mean two things.
    """
    # Not urlsplit: '?' and '#' are ordinary characters of a key.
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise invalid_url(url, "it names no bucket")
    prefix = prefix.strip("/")
    if any(part in (".", "..") for part in prefix.split("/")) or "//" in prefix:
        raise invalid_url(url, "its prefix has empty, '.' or '..' parts")
    return bucket, prefix


def validate_directory(url: str) -> str:
    """Refuse a directory that storage does not understand, or that would be another one in another process.

    Args:
        url: ``s3://bucket/prefix``, ``file:///path`` or an absolute path.

    Returns:
        The URL as the store there writes it: the same directory has one URL, however it was given.

    Raises:
        InvalidStorageUrl: another kind of URL, a relative path, or an incomplete one.
    """
    if url.startswith("s3://"):
        bucket, prefix = s3_parts(url)
        return f"s3://{bucket}/{prefix}".rstrip("/")
    path = local_path(url)
    if path is not None:
        return Path(os.path.abspath(path)).as_uri()
    if not url.strip():
        raise invalid_url(url, "it is empty")
    if url.startswith("file:"):
        raise invalid_url(url, "a file URL has three slashes and an absolute path")
    if "://" in url:
        raise invalid_url(url, "that kind is not supported")
    raise invalid_url(url, "a relative path would mean another directory in each process. Give an absolute path, or a URL")


def split_directory(url: str) -> tuple[str, str]:
    """Parent and name of a directory, whose URL is valid; the name is empty where it has no parent, as a whole bucket."""
    path = local_path(url)
    if path is not None:
        return path.parent.as_uri(), path.name
    bucket, prefix = s3_parts(url)
    parent, _, name = prefix.rpartition("/")
    return f"s3://{bucket}/{parent}".rstrip("/"), name


def invalid_url(url: str, why: str) -> InvalidStorageUrl:
    """The error for a URL that storage does not understand."""
    return InvalidStorageUrl(
        f"expected a storage URL such as s3://bucket/prefix, file:///path or a plain path, found {url!r}: {why}"
    )
