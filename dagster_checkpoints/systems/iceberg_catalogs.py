"""Catalogs of Iceberg tables: a SQLite file in the warehouse by default, or any catalog of ``pyiceberg`` by its properties.

Properties can contain credentials: they are never shown. Must not know tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from dagster_checkpoints.files.durable import sync
from dagster_checkpoints.files.urls import file_url_rule, local_path, url_scheme
from dagster_checkpoints.systems.errors import InvalidSinkPath, SinkLibraryMissing

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

_DATABASE = "catalog.db"
_NAME = "default"
_SECRET = re.compile("credential|password|secret|token|key", re.IGNORECASE)
_FILE_IO = {"py-io-impl": "dagster_checkpoints.sinks.iceberg.file_io.DurableFileIO"}
_UNUSABLE = re.compile(r"[#?%]")


@dataclass(frozen=True, slots=True)
class CatalogSettings:
    """A catalog.

    Args:
        name: its name: a SQL catalog stores it with each table, and the library's configuration has properties by name.
        properties: properties of the library ``pyiceberg``; never shown.
        directory: the warehouse's directory, if the catalog is a SQLite file in it; None for any other catalog.
    """

    name: str
    properties: Mapping[str, str] = field(repr=False)
    directory: Path | None

    @property
    def place(self) -> str:
        """The same text for the same catalog, without credentials."""
        if self.directory is not None:
            return os.path.realpath(self.directory)
        uri = urlsplit(self.properties.get("uri", ""))
        server = uri.netloc.rpartition("@")[2]
        parts = (self.name, uri.scheme, server, uri.path.strip("/"), self.properties.get("warehouse", "").rstrip("/"))
        return "iceberg:" + "/".join(part for part in parts if part)

    def open(self, *, create: bool) -> Catalog | None:
        """Open the catalog; None if it does not exist.

        Args:
            create: create a SQLite file that does not exist.
        """
        from pyiceberg.catalog import load_catalog

        if self.directory is not None and not (self.directory / _DATABASE).exists():
            if not create:
                return None
            self._create_database(self.directory)
        return load_catalog(self.name, **{**_FILE_IO, **self.properties})

    def _create_database(self, directory: Path) -> None:
        """Create the SQLite file with its tables in one step: another instance or a reader may open it at the same moment."""
        from pyiceberg.catalog import load_catalog

        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".catalog-", dir=directory) as scratch:
            complete = Path(scratch, _DATABASE)
            load_catalog(self.name, **{**self.properties, "uri": f"sqlite:///{complete}"}).close()
            sync(complete)
            with suppress(FileExistsError):
                os.link(complete, directory / _DATABASE)
        sync(directory)

    def without_credentials(self, text: str) -> str:
        """An error's text, with every secret of the properties replaced by ``***``."""
        secrets = {value for name, value in self.properties.items() if _SECRET.search(name)}
        for value in self.properties.values():
            password = urlsplit(value).password if "://" in value else None
            secrets |= {password, unquote(password)} if password else set()
        for secret in sorted(secrets - {""}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def catalog_settings(warehouse: str | os.PathLike[str] | None, catalog: str | Mapping[str, str] | None) -> CatalogSettings:
    """The catalog that a sink's arguments mean.

    Args:
        warehouse: the directory or the URL below which new tables are stored; None: the catalog knows it.
        catalog: properties of ``pyiceberg``, of which ``name`` is the catalog's name; or the name of a catalog in the library's
            configuration; None: a SQLite file in the warehouse.

    Raises:
        InvalidSinkPath: neither is given, or the warehouse cannot be one.
    """
    directory = None if warehouse is None else _directory(os.fspath(warehouse))
    if catalog is None:
        if directory is None:
            raise _invalid(
                "no catalog" if warehouse is None else "a warehouse in an object store without a catalog",
                "name a local or mounted directory, IcebergSink(..., warehouse='lake'); or a catalog, "
                "IcebergSink(..., catalog={'type': 'rest', 'uri': 'https://…'})",
            )
        properties = {"type": "sql", "uri": f"sqlite:///{directory / _DATABASE}", "warehouse": f"file://{directory}"}
        return CatalogSettings(_NAME, properties, directory)
    properties = {} if isinstance(catalog, str) else {name: str(value) for name, value in catalog.items()}
    name = catalog if isinstance(catalog, str) else properties.pop("name", _NAME)
    uri = urlsplit(properties.get("uri", ""))
    if uri.scheme in ("http", "https") and "@" in uri.netloc:  # the library shows it in warnings
        raise _invalid("a REST catalog's URL with credentials", "give them in the property 'credential' or 'token'")
    if warehouse is not None:
        properties["warehouse"] = os.fspath(warehouse) if directory is None else f"file://{directory}"
    return CatalogSettings(name, properties, None)


def library_missing(sink: str) -> SinkLibraryMissing:
    """The error for a machine without the libraries."""
    return SinkLibraryMissing(
        f"{sink}: expected the libraries pyiceberg and sqlalchemy, found that one is not installed. Install them: "
        "pip install 'dagster-checkpoints[iceberg]'"
    )


def _directory(warehouse: str) -> Path | None:
    """A local warehouse; None for the URL of an object store."""
    if not warehouse.strip():
        raise _invalid("an empty warehouse", "name a directory or a URL")
    scheme = url_scheme(warehouse)
    if scheme not in (None, "file"):
        if "@" in urlsplit(warehouse).netloc and scheme not in ("abfs", "abfss"):
            raise _invalid("a warehouse's URL with credentials", "give credentials in the catalog's properties")
        if "?" in warehouse or "#" in warehouse:  # the library would leave out what follows
            raise _invalid(repr(warehouse), "the URL of a warehouse has no '?' and no '#'")
        return None
    path = local_path(warehouse) if scheme else Path(os.path.expanduser(warehouse))
    if path is None:
        raise _invalid(repr(warehouse), f"{file_url_rule(warehouse)}: file:///data/lake")
    found = os.path.abspath(path)
    if _UNUSABLE.search(found):
        raise _invalid(repr(found), "a path with '#', '?' or '%' cannot be a part of the URLs in Iceberg's metadata")
    return Path(found)


def _invalid(found: str, advice: str) -> InvalidSinkPath:
    return InvalidSinkPath(f"IcebergSink: expected a warehouse or a catalog, found {found}: {advice}")
