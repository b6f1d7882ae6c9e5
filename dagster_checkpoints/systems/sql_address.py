"""A SQL database: the forms in which its URL is given, and how it is shown, without credentials.

Must not connect. Imports SQLAlchemy when it is needed: a code location without a SQL table does not have it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, quote_plus

from dagster_checkpoints.systems.errors import InvalidSinkDatabase, SinkLibraryMissing

if TYPE_CHECKING:
    from sqlalchemy import URL

DatabaseKind = Literal["postgresql", "sqlite"]

_SUPPORTED = "postgresql+psycopg://user:password@host/database or sqlite:////path/of/file.db"
_SECRET = re.compile("password|secret|token", re.IGNORECASE)
IDENTIFIER_BYTES = 63
"""The longest name of a table or a column in PostgreSQL."""


@dataclass(frozen=True, slots=True)
class SqlAddress:
    """A database that the plugin can read and write.

    Args:
        url: the URL with its credentials; never shown.
        kind: the kind of the database.
        shown: the URL without user, password and parameters.
    """

    url: URL = field(repr=False)
    kind: DatabaseKind
    shown: str

    def without_credentials(self, text: str) -> str:
        """The text of a driver's error, with every secret of the URL replaced by ``***``."""
        secrets = [] if self.url.password is None else [str(self.url.password)]
        for name, values in self.url.normalized_query.items():
            secrets += values if _SECRET.search(name) else ()
        for secret in secrets:
            for form in sorted({secret, quote(secret, safe=""), quote_plus(secret)} - {""}, key=len, reverse=True):
                text = text.replace(form, "***")
        return text


def variable_name(source: Any) -> str | None:
    """The environment variable that ``dg.EnvVar`` names; None for another form of a URL."""
    name = getattr(source, "env_var_name", None)
    return name if isinstance(name, str) else None


def is_known_now(source: Any) -> bool:
    """Whether the URL is known at definition: not if a function returns it, or an environment variable that is not set."""
    name = variable_name(source)
    return name in os.environ if name is not None else not callable(source)


def sql_address(source: Any, asked_by: str = "SqlSink") -> SqlAddress:
    """The database that a URL names.

    Args:
        source: a URL as text or as SQLAlchemy's ``URL``; ``dg.EnvVar``; or a function without arguments that returns a URL.
        asked_by: the sink or source whose database it is, as errors name it.

    Raises:
        SinkLibraryMissing: SQLAlchemy or the database's driver is not installed.
        InvalidSinkDatabase: the URL cannot be read, its database is not supported, or the environment variable is not set.
    """
    url = _parsed(_value(source, asked_by), asked_by)
    kind = url.get_backend_name()
    if kind == "sqlite":
        return _sqlite(url, asked_by)
    if kind == "postgresql":
        return _postgresql(url, asked_by)
    raise InvalidSinkDatabase(
        f"{asked_by}: expected {_SUPPORTED}, found a URL of {kind!r}: these two are the databases that it is tested with"
    )


def _value(source: Any, asked_by: str) -> Any:
    name = variable_name(source)
    if name is not None:
        if not os.environ.get(name):
            raise InvalidSinkDatabase(
                f"{asked_by}: expected the database's URL in the environment variable {name}, found that it is not set. Set it "
                "for the process of the run"
            )
        return os.environ[name]
    return source() if callable(source) else source


def _parsed(value: Any, asked_by: str) -> URL:
    try:
        from sqlalchemy import URL, make_url
        from sqlalchemy.exc import ArgumentError
    except ImportError as error:
        raise SinkLibraryMissing(
            f"{asked_by}: expected the package sqlalchemy, found that it is not installed: pip install "
            "'dagster-checkpoints[sql]', and the driver of the database (psycopg for PostgreSQL)"
        ) from error
    if not isinstance(value, str | URL):
        raise InvalidSinkDatabase(f"{asked_by}: expected a URL, {_SUPPORTED}, found a value of type {type(value).__name__}")
    text = value if isinstance(value, URL) else value.replace("postgres://", "postgresql://", 1)
    try:
        return make_url(text)
    except (ArgumentError, ValueError):  # its text may contain the password
        raise InvalidSinkDatabase(f"{asked_by}: expected a URL, {_SUPPORTED}, found a text that is not a URL") from None


def _sqlite(url: URL, asked_by: str) -> SqlAddress:
    file = url.database
    if not file or file == ":memory:" or file.startswith("file:") or url.get_driver_name() != "pysqlite":
        raise InvalidSinkDatabase(
            f"{asked_by}: expected the URL of a SQLite file, sqlite:////path/of/file.db, found {url.drivername}:///{file or ''}. "
            "A database in memory is lost with the process; other drivers and file: names are not supported"
        )
    path = os.path.abspath(file)
    return SqlAddress(url.set(database=path), "sqlite", f"sqlite:///{path}")


def _postgresql(url: URL, asked_by: str) -> SqlAddress:
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise InvalidSinkDatabase(
            f"{asked_by}: expected the driver psycopg, postgresql+psycopg://…, found {url.drivername}://…. Rows are sent with "
            "COPY and read with a cursor of the server: that is written for psycopg 3"
        )
    if find_spec("psycopg") is None:
        raise SinkLibraryMissing(
            f"{asked_by}: expected the package psycopg for a PostgreSQL database, found that it is not installed: "
            "pip install 'psycopg[binary]'"
        )
    query = url.normalized_query
    host = url.host or ",".join(query.get("host", ())) or "localhost"
    port = url.port or ",".join(query.get("port", ())) or 5432
    shown = f"postgresql://{host if '/' not in host else quote(host, safe='')}:{port}/{url.database or ''}"
    return SqlAddress(url.set(drivername="postgresql+psycopg"), "postgresql", shown)
