"""URLs of storage: their parts, and one spelling for each directory.

Text only: must not access files or servers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from dagster_checkpoints.errors import InvalidStorageUrl

_HADOOP = frozenset({"dbfs", "file", "hdfs", "nfs", "s3", "s3a", "s3n", "viewfs", "webhdfs"})
_CLOUDS = frozenset({"abfs", "abfss", "adl", "az", "azure", "gcs", "gs", "oss", "r2", "swift", "wasb", "wasbs"})
_SCHEMES = _HADOOP | _CLOUDS | {"ftp", "http", "https", "sftp"}
"""Text with one of these schemes is a URL even without a slash after the colon: ``s3:bucket`` is not a directory's name."""


def url_scheme(text: str) -> str | None:
    """The scheme of a URL, in small letters; None for a path, also a relative one or one that begins with a drive's letter."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.\-]+):(/?)", text)
    if match is None or not (match[2] or match[1].lower() in _SCHEMES):
        return None
    return match[1].lower()


def in_object_store(text: str) -> bool:
    """Whether a path or URL is one of an object store, of which each look at a directory is a request that costs money."""
    return url_scheme(text) in _CLOUDS | {"s3", "s3a", "s3n"}


def is_hidden(path: str) -> bool:
    """Whether Spark leaves out a file below a directory that it reads, for the name of the file or of a directory on the way.

    A name that begins with an underscore may be a partition's, `_day=1`; a copy that Hadoop is making ends with `._COPYING_`.

    Args:
        path: The names below that directory, with slashes.

    Source: Spark's `HadoopFSUtils.shouldFilterOutPathName`
    """
    names = path.split("/")
    return any(n.startswith(".") or (n.startswith("_") and "=" not in n) or n.endswith("._COPYING_") for n in names)


def validate_root(url: str) -> str | None:
    """Refuse a text that cannot be a storage root; opens nothing.

    Args:
        url: ``s3://bucket/prefix``, ``file:///path`` or a path.

    Returns:
        The URL's scheme, ``s3`` or ``file``; None for a path.

    Raises:
        InvalidStorageUrl: another kind of URL, a URL without a bucket or path, or an empty text.
    """
    scheme = url_scheme(url)
    if not url.strip():
        raise invalid_url(url, "it is empty")
    if scheme == "s3":
        s3_parts(url)
    elif scheme == "file":
        if local_path(url) is None:
            raise _no_file_url(url)
    elif scheme is not None or "://" in url:
        raise _unsupported(url, scheme)
    return scheme


def file_url_rule(url: str) -> str:
    """The rule that a ``file:`` URL without a :func:`local_path` does not keep."""
    if "?" in url or "#" in url:
        return "in a file URL the characters '#', '?' and '%' of a path are written %23, %3F and %25"
    return "a file URL has three slashes and an absolute path"


def local_path(url: str) -> Path | None:
    """The path in a ``file:`` URL, or an absolute path; None for any other text, and for a URL with a query or a fragment."""
    parts = urlsplit(url)
    cut = "?" in url or "#" in url
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/") and not cut:
        return Path(unquote(parts.path))
    return Path(url) if url.startswith("/") else None


def s3_parts(url: str) -> tuple[str, str]:
    """Bucket and prefix of an ``s3:`` URL.

    Raises:
        InvalidStorageUrl: the URL names no bucket, or its prefix has empty, ``.`` or ``..`` parts.
    """
    # Not urlsplit: '?' and '#' are ordinary characters of a key.
    _, _, rest = url.partition(":")
    if not rest.startswith("//"):
        raise invalid_url(url, f"an S3 URL has two slashes: s3://{rest.lstrip('/')}")
    bucket, _, prefix = rest[2:].partition("/")
    if not bucket:
        raise invalid_url(url, "it names no bucket")
    prefix = prefix.strip("/")
    if any(part in (".", "..") for part in prefix.split("/")) or "//" in prefix:
        raise invalid_url(url, "its prefix has empty, '.' or '..' parts")
    return bucket, prefix


def validate_directory(url: str) -> str:
    """Refuse a directory that storage does not understand, or that means another directory in another process.

    Args:
        url: ``s3://bucket/prefix``, ``file:///path`` or an absolute path.

    Returns:
        The URL as its store spells it: each directory has one URL, for all spellings of ``url``.

    Raises:
        InvalidStorageUrl: another kind of URL, a relative path, or an incomplete one.
    """
    if validate_root(url) == "s3":
        bucket, prefix = s3_parts(url)
        return f"s3://{bucket}/{prefix}".rstrip("/")
    path = local_path(url)
    if path is not None:
        return Path(os.path.abspath(path)).as_uri()
    raise invalid_url(url, "a relative path would mean another directory in each process. Give an absolute path, or a URL")


def url_below(root: str, key: str) -> str:
    """The URL of what a store holds under a key, as :func:`validate_directory` spells it.

    Args:
        root: the store's URL.
        key: the key of an object or a directory in it.
    """
    return f"{root}/{quote(key, errors='surrogateescape') if root.startswith('file:') else key}"


def key_below(root: str, url: str) -> str | None:
    """The key of an object or a directory in a store; None if the store does not hold this URL.

    Args:
        root: the store's URL.
        url: a URL as :func:`validate_directory` returns it.
    """
    if not url.startswith(f"{root}/"):
        return None
    key = url.removeprefix(f"{root}/")
    return unquote(key, errors="surrogateescape") if root.startswith("file:") else key


def split_directory(url: str) -> tuple[str, str]:
    """Parent and name of a directory with a valid URL; the name is empty if the directory has no parent, like a whole bucket."""
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


def _no_file_url(url: str) -> InvalidStorageUrl:
    rest = url.partition(":")[2]
    right = "" if rest.startswith("//") or not rest else f": file:///{rest}"
    return invalid_url(url, f"{file_url_rule(url)}{right}")


def _unsupported(url: str, scheme: str | None) -> InvalidStorageUrl:
    if scheme in ("s3a", "s3n"):
        rest = url.partition(":")[2].lstrip("/")
        return invalid_url(url, f"{scheme}: is Hadoop's name for S3. Write s3://{rest}")
    named = f" ({scheme}:)" if scheme else ""
    directory = "" if "://" in url else f"; a directory of this name is ./{url}"
    return invalid_url(url, f"that kind is not supported{named}. Use S3, or a directory that is mounted{directory}")
