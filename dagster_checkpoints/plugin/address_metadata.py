"""Metadata that says where something is stored.

It must not know what is stored there.
"""

from __future__ import annotations

import dagster as dg

from dagster_checkpoints.files.urls import local_path


def address_metadata(url: str) -> dg.MetadataValue:
    """An address in storage: a path of the machine, which can be copied, or the URL of an object, which is a link.

    A browser does not open a link to a file from a page of Dagster, so the URL of a file is shown as its path.

    Args:
        url: URL of a file, a directory or an object.
    """
    path = local_path(url)
    return dg.MetadataValue.url(url) if path is None else dg.MetadataValue.path(str(path))
