"""Locations of sinks: paths and URLs, each place with one spelling. Text only."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from dagster_checkpoints.files.urls import file_url_rule, local_path, url_scheme
from dagster_checkpoints.systems.errors import InvalidSinkPath

_UNUSABLE = re.compile(r"[\[\]^|\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
"""With these the library deltalake ends with a panic, or reads another place than it writes to."""


def target_url(target: str | os.PathLike[str], schemes: Sequence[str], noun: str, credentials: str) -> str:
    """A sink's location: an absolute path, or an object store's URL.

    Args:
        target: the path or the URL as the user wrote it.
        schemes: the kinds of URL that the sink can write to.
        noun: what is stored there, for errors.
        credentials: where the user gives credentials, for errors.

    Raises:
        InvalidSinkPath: an empty text, a URL of another kind, or a URL with credentials.
    """

    def invalid(found: str, advice: str) -> InvalidSinkPath:
        return InvalidSinkPath(
            f"expected the path or the URL of {noun}, such as /data/delays or s3://bucket/delays, found {found}: {advice}"
        )

    text = os.fspath(target)
    scheme = url_scheme(text)
    if not text.strip():
        raise invalid("an empty text", "name a directory or a URL")
    if scheme is None:
        return os.path.abspath(os.path.expanduser(text))
    if scheme not in schemes:
        hdfs = scheme == "hdfs" and "webhdfs" in schemes
        through = "name HDFS's HTTP interface, webhdfs://namenode:9870/path" if hdfs else f"use one of {', '.join(schemes)}"
        raise invalid(f"a URL of the kind {scheme}:", f"{through}, or mount the place as a directory")
    if scheme == "file":
        path = local_path(text)
        if path is None:
            raise invalid(repr(text), f"{file_url_rule(text)}: file:///data/table")
        return os.path.abspath(path)
    parts = urlsplit(text)
    if "@" in parts.netloc and scheme not in ("abfs", "abfss"):
        raise invalid(f"a {scheme}: URL with credentials", f"give credentials in {credentials}, or in the environment")
    if "?" in text or "#" in text:  # libraries would leave out what follows
        raise invalid(repr(text), "a URL of a place has no '?' and no '#'")
    if not parts.netloc:
        raise invalid(repr(text), f"name the bucket: {scheme}://bucket/path")
    return f"{'s3' if scheme == 's3a' else scheme}://{parts.netloc}/{parts.path.strip('/')}".rstrip("/")


def uri_of(url: str) -> str:
    """The URI by which readers find the data."""
    path = local_path(url)
    return url if path is None else path.as_uri()


def location_of(url: str) -> str:
    """The place as text that is the same for all its spellings."""
    path = local_path(url)
    return url if path is None else os.path.realpath(Path(path))


def delta_url(table: str | os.PathLike[str], schemes: Sequence[str]) -> str:
    """A Delta table's location: an absolute path, or an object store's URL.

    Args:
        table: the path or the URL as the user wrote it.
        schemes: the kinds of URL that are allowed.

    Raises:
        InvalidSinkPath: it is no location, or one that the library ``deltalake`` cannot use.
    """
    url = target_url(table, schemes, "a Delta table", "storage_options")
    for place in (url, location_of(url)):  # the library follows symbolic links
        found = _UNUSABLE.search(place)
        if found is not None:
            raise InvalidSinkPath(
                "expected a location that the library deltalake can use, without [ ] ^ | \\, control characters, and % in front "
                f"of two hexadecimal digits, found {found[0]!r} in {place!r}: move or rename the directory"
            )
    return url
