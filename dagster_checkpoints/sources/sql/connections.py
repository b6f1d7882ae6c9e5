"""Connections to a database that is read: values come as they are stored, also those for which the driver has no Python type.

Must not know tables or columns.

Source: https://www.psycopg.org/psycopg3/docs/advanced/adapt.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from dagster_checkpoints.sources.errors import InvalidSource
from dagster_checkpoints.systems.sql_address import SqlAddress


def engine_of(address: SqlAddress, shown: str) -> sa.Engine:
    """An engine without a pool.

    Args:
        address: the database.
        shown: the source as errors name it.

    Raises:
        InvalidSource: SQLite's file does not exist.
    """
    if address.kind == "sqlite":
        if not Path(str(address.url.database)).is_file():  # SQLite would create it
            raise InvalidSource(f"{shown}: expected the database's file, found none")
        engine = sa.create_engine(address.url, hide_parameters=True, poolclass=sa.NullPool, connect_args={"timeout": 60.0})
        sa.event.listen(engine, "connect", _take_any_text)
        return engine
    given = address.url.query
    defaults = {"connect_timeout": "10", "application_name": "dagster-checkpoints"}
    arguments: dict[str, Any] = {name: value for name, value in defaults.items() if name not in given}
    arguments |= {"client_encoding": "utf8", "prepare_threshold": None}  # servers behind a pool know no prepared statements
    engine = sa.create_engine(address.url, hide_parameters=True, poolclass=sa.NullPool, connect_args=arguments)
    sa.event.listen(engine, "connect", _take_any_time)
    return engine


def _take_any_text(connection: Any, record: Any) -> None:
    """Let a text that is not UTF-8 come as a text that cannot be encoded, instead of an error that names no row."""
    connection.text_factory = lambda stored: stored.decode(errors="surrogateescape")


def _take_any_time(connection: Any, record: Any) -> None:
    """Let a date or a time that Python does not have (infinity, BC, after 9999) come as the server's text, likewise."""
    import psycopg
    from psycopg.adapt import Loader

    for name in ("date", "timestamp"):
        known = connection.adapters.types[name]
        of_driver: Any = connection.adapters.get_loader(known.oid, psycopg.pq.Format.TEXT)

        class AnyTime(Loader):
            driver = of_driver

            def __init__(self, oid: int, context: Any = None) -> None:
                super().__init__(oid, context)
                self._load = self.driver(oid, context).load

            def load(self, data: Any) -> Any:
                try:
                    return self._load(data)
                except (psycopg.DataError, ValueError):
                    return bytes(data).decode()

        connection.adapters.register_loader(name, AnyTime)
