"""A SqlSink's target and its staging tables: created, filled, moved into the target, taken back and emptied.

Every method is one part of a transaction that the caller has begun. Must not know the ledger, owners or checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateTable, DropTable

from dagster_checkpoints.sinks.exact_values import ColumnLimits
from dagster_checkpoints.sinks.sql.columns import POSITION, SinkColumn, check_table, column_limits, is_computed
from dagster_checkpoints.sinks.sql.rows import copy_text, sqlite_rows
from dagster_checkpoints.systems.errors import SinkColumnsMismatch, SinkRowsRefused, SinkTargetChanged, SinkTransactionLost
from dagster_checkpoints.systems.sql_address import IDENTIFIER_BYTES, DatabaseKind

_POSITION: Any = sa.column(POSITION, sa.BigInteger)


class SinkTable:
    """The table that readers read.

    Args:
        name: the table's name.
        schema: its schema; None for the database's default.
        kind: the kind of the database.
        key: names of the columns by which rows are replaced; empty if rows are added.
        checkpoint_column: name of the column that names each row's checkpoint; None without one.
        sink: the sink as errors name it.
    """

    def __init__(
        self, name: str, schema: str | None, kind: DatabaseKind, key: Sequence[str], checkpoint_column: str | None, sink: str
    ) -> None:
        self._name = name
        self._schema = schema
        self._kind = kind
        self._key = tuple(key)
        self._checkpoint_column = checkpoint_column
        self._sink = sink

    # The table

    def exists(self, connection: sa.Connection) -> bool:
        return self._has(connection, self._name)

    def _has(self, connection: sa.Connection, name: str) -> bool:
        return sa.inspect(connection).has_table(name, schema=self._schema)

    def has_rows(self, connection: sa.Connection) -> bool:
        return connection.execute(sa.select(sa.literal(1)).select_from(self._table()).limit(1)).first() is not None

    def prepare(self, connection: sa.Connection, columns: Sequence[SinkColumn]) -> dict[str, ColumnLimits]:
        """Create the table, or check that the existing one holds the rows.

        Args:
            connection: the transaction.
            columns: the stage's columns.

        Returns:
            What the table's columns cannot hold, by name.

        Raises:
            SinkColumnsMismatch: the table does not fit the stage's rows, is a view, or has a name in other capital letters.
        """
        inspector = sa.inspect(connection)
        if not inspector.has_table(self._name, schema=self._schema):
            self._create(connection, columns)
            return column_limits((), columns, self._key, self._kind)
        if self._name not in (existing := inspector.get_table_names(schema=self._schema)):
            # SQLite, which does not distinguish capital letters, has found a table by another name
            other = [name for name in existing if name.lower() == self._name.lower() and self._kind == "sqlite"]
            shown = (
                f"{other[0]!r}. Give the sink the table's name as it is" if other else "a view. Give the sink the table behind it"
            )
            raise SinkColumnsMismatch(f"{self._sink}: expected a table {self._name!r}, found {shown}")
        found = inspector.get_columns(self._name, schema=self._schema)
        check_table(found, columns, self._kind, self._checkpoint_column, self._sink)
        if self._key and not self._is_unique(inspector):
            names = ", ".join(self._key)
            raise SinkColumnsMismatch(
                f"{self._sink}: expected a primary key or a unique index of the columns {names}, by which rows are replaced, "
                f"found none: CREATE UNIQUE INDEX ON the table ({names})"
            )
        return column_limits(found, columns, self._key, self._kind)

    def _create(self, connection: sa.Connection, columns: Sequence[SinkColumn]) -> None:
        table = self._table()
        for each in columns:
            in_key = each.name in self._key
            table.append_column(sa.Column(each.name, each.type, primary_key=in_key, autoincrement=False, nullable=not in_key))
        if self._checkpoint_column is not None:
            table.append_column(sa.Column(self._checkpoint_column, sa.Text))
        connection.execute(CreateTable(table))

    def _is_unique(self, inspector: Any) -> bool:
        unique = [inspector.get_pk_constraint(self._name, schema=self._schema).get("constrained_columns", ())]
        unique += [each["column_names"] for each in inspector.get_unique_constraints(self._name, schema=self._schema)]
        unique += [
            each["column_names"]
            for each in inspector.get_indexes(self._name, schema=self._schema)
            if each["unique"] and not any("where" in option for option in each.get("dialect_options", {}))
        ]
        return any(set(names) == set(self._key) for names in unique)

    def empty(self, connection: sa.Connection) -> None:
        """Delete all rows, also those that were taken back."""
        for table in (self._table(), self._taken_back()):
            if self._has(connection, table.name):
                connection.execute(sa.delete(table))

    def delete_marked(self, connection: sa.Connection, marks: Sequence[str]) -> None:
        """Delete the rows of these checkpoints, also those that were taken back."""
        for table in (self._table(), self._taken_back()):
            if self._has(connection, table.name):
                for mark in marks:
                    connection.execute(sa.delete(table).where(self._mark() == mark))

    # Staging tables

    def staging_name(self, token: str) -> str:
        return self._derived(f"__staging_{token}")

    def create_staging(self, connection: sa.Connection, staging: str, columns: Sequence[str]) -> None:
        """Create a staging table with the types of the target's columns, and without its constraints."""
        if not self.exists(connection):
            raise SinkTargetChanged(
                f"{self._sink}: expected the table as it was when the run began, found that it does not exist: it was dropped. "
                "Restore it from a backup if it held rows, and start the run again"
            )
        position = sa.cast(sa.literal(0), sa.BigInteger).label(POSITION)
        chosen = sa.select(position, *_columns(columns)).select_from(self._table()).where(sa.text("1 = 0"))
        compiled = chosen.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        name = connection.dialect.identifier_preparer.format_table(self._staging(staging))
        connection.exec_driver_sql(f"CREATE TABLE {name} AS {compiled}")

    def drop_staging(self, connection: sa.Connection, staging: str) -> None:
        connection.execute(DropTable(self._staging(staging), if_exists=True))

    def stage(self, connection: sa.Connection, staging: str, batch: pa.RecordBatch, first: int) -> None:
        """Add rows to a staging table; the first one gets the number ``first``."""
        preparer = connection.dialect.identifier_preparer
        name = preparer.format_table(self._staging(staging))
        columns = ", ".join(preparer.quote_identifier(each) for each in [POSITION, *batch.schema.names])
        if self._kind == "sqlite":
            marks = ", ".join("?" * (batch.num_columns + 1))
            statement = f"INSERT INTO {name} ({columns}) VALUES ({marks})"
            connection.exec_driver_sql(statement, sqlite_rows(batch, first))
            return
        data = copy_text(batch, first)
        with _driver_cursor(connection) as cursor, cursor.copy(f"COPY {name} ({columns}) FROM STDIN".replace("%%", "%")) as copy:
            copy.write(data)

    def unstage(self, connection: sa.Connection, staging: str, first: int, end: int) -> None:
        """Delete the rows with the numbers ``first`` to ``end`` - 1 from a staging table."""
        connection.execute(sa.delete(self._staging(staging)).where(first <= _POSITION, end > _POSITION))

    def move(self, connection: sa.Connection, staging: str, rows: int, mark: str | None) -> None:
        """Move a staging table's rows to the target.

        Args:
            connection: the transaction.
            staging: the staging table.
            rows: the number of its rows.
            mark: the value of the checkpoint's column; None without such a column.

        Raises:
            SinkTransactionLost: the staging table has another number of rows, or does not exist.
            SinkRowsRefused: the database does not give the table each of the rows.
            SinkTargetChanged: the target was altered, and does not hold the rows exactly any more.
        """
        source = self._staging(staging)
        found: int | str = "no such table"
        if self._has(connection, staging):
            found = connection.execute(sa.select(sa.func.count()).select_from(source)).scalar_one()
        if found != rows:
            raise SinkTransactionLost(
                f"{self._sink}: expected {rows} staged rows in {staging}, found {found}: another program has changed or dropped "
                "that table. This sink has lost rows of a checkpoint: restore another checkpoint or a savepoint, restore the "
                "database from a backup, or start the job without restoring"
            )
        names = [each["name"] for each in sa.inspect(connection).get_columns(staging, schema=self._schema)][1:]
        self._check_exact(connection, source, self._table(), names)
        self._insert(connection, source, names, rows, mark)
        self.drop_staging(connection, staging)

    def _insert(self, connection: sa.Connection, source: sa.Table, names: list[str], rows: int, mark: str | None) -> None:
        target = self._table(names)
        chosen = sa.select(*_columns(names))
        if mark is not None:
            assert self._checkpoint_column is not None
            target.append_column(sa.Column(self._checkpoint_column))
            chosen = chosen.add_columns(sa.literal(mark, sa.Text).label("mark"))
        if not self._key:
            written = [*names, *([] if mark is None else [str(self._checkpoint_column)])]
            self._insert_all(connection, sa.insert(target).from_select(written, chosen.select_from(source)), rows)
            return
        newest = sa.select(sa.func.max(_POSITION)).select_from(source).group_by(*_columns(self._key))
        # SQLite needs a WHERE between SELECT and ON CONFLICT.
        chosen = chosen.select_from(source).where(_POSITION.in_(newest))
        upsert: Any = (postgresql if self._kind == "postgresql" else sqlite).insert(target).from_select(names, chosen)
        replaced = {name: upsert.excluded[name] for name in names if name not in self._key}
        if replaced:
            upsert = upsert.on_conflict_do_update(index_elements=list(self._key), set_=replaced)
        else:
            upsert = upsert.on_conflict_do_nothing(index_elements=list(self._key))
        connection.execute(upsert)

    def _insert_all(self, connection: sa.Connection, statement: sa.Insert, rows: int) -> None:
        """Insert rows of another table, and refuse a table that does not take each of them."""
        inserted = connection.execute(statement.execution_options(preserve_rowcount=True)).rowcount
        if inserted != rows:
            raise SinkRowsRefused(
                f"{self._sink}: expected that the table takes each of {rows} rows, found that the database has inserted "
                f"{inserted}: a trigger, a rule, or a constraint with ON CONFLICT IGNORE leaves rows out, or gives them to "
                "another table. Nothing was changed, and the rows stay staged: remove it (PARTITION BY divides rows among "
                "tables, a trigger AFTER INSERT can copy them), and start the run again"
            )

    # Taken-back rows

    def take_back(self, connection: sa.Connection, mark: str) -> int:
        """Hide the rows of a checkpoint. Returns their number."""
        hidden = self._taken_back()
        if not self._has(connection, hidden.name):
            self._create_taken_back(connection)
        elif not _shown(self._types(connection, self._name)).items() <= _shown(self._types(connection, hidden.name)).items():
            self._create_taken_back_again(connection)
        return self._move_marked(connection, self._table(), hidden, mark)

    def show_again(self, connection: sa.Connection, mark: str) -> int:
        """Show the rows of a checkpoint that were hidden; columns that the table has got since are null, or their default.

        Returns:
            The number of the rows.
        """
        hidden = self._taken_back()
        if not self._has(connection, hidden.name):
            return 0
        return self._move_marked(connection, hidden, self._table(), mark)

    @property
    def taken_back_name(self) -> str:
        return self._derived("__taken_back")

    def _create_taken_back(self, connection: sa.Connection) -> None:
        preparer = connection.dialect.identifier_preparer
        target, created = preparer.format_table(self._table()), preparer.format_table(self._taken_back())
        connection.exec_driver_sql(f"CREATE TABLE {created} AS SELECT * FROM {target} WHERE 1 = 0")

    def _create_taken_back_again(self, connection: sa.Connection) -> None:
        """Give hidden rows the columns that the target has by now: a column was added, or made wider."""
        hidden, former = self._taken_back(), self._named(self._derived("__taken_back_former"))
        preparer = connection.dialect.identifier_preparer
        connection.exec_driver_sql(
            f"ALTER TABLE {preparer.format_table(hidden)} RENAME TO {preparer.quote_identifier(former.name)}"
        )
        self._create_taken_back(connection)
        names = self._common(connection, former, hidden)
        self._check_exact(connection, former, hidden, names)
        rows = sa.select(*_columns(names)).select_from(former)
        connection.execute(sa.insert(self._named(hidden.name, names)).from_select(names, rows))
        connection.execute(DropTable(former))

    def _types(self, connection: sa.Connection, table: str) -> dict[str, Any]:
        """The columns of a table with their types; of SQLite their affinities: copied tables have no more of a type."""
        if self._kind == "sqlite":
            found = connection.exec_driver_sql(f"PRAGMA table_xinfo({connection.dialect.identifier_preparer.quote(table)})")
            return {name: _affinity(declared) for _, name, declared, *_ in found}
        return {each["name"]: each["type"] for each in sa.inspect(connection).get_columns(table, schema=self._schema)}

    def _check_exact(self, connection: sa.Connection, source: sa.Table, into: sa.Table, names: Sequence[str]) -> None:
        """Refuse to give a table rows whose values it would change: it was altered since the rows were written.

        A database converts such values, some of them without an error: it rounds numbers and times, and cuts texts off.
        """
        connection.execute(sa.select(sa.literal(1)).select_from(into).limit(0))  # holds the columns until the transaction ends
        given, taken = self._types(connection, source.name), self._types(connection, into.name)
        for name in names:
            if repr(before := given[name]) == repr(now := taken.get(name, before)):
                continue
            if self._kind == "postgresql" and getattr(before, "timezone", None) is getattr(now, "timezone", None):
                (value,) = _columns([name])
                differs = sa.cast(sa.cast(value, now), before).is_distinct_from(value)
                if connection.execute(sa.select(sa.literal(1)).select_from(source).where(differs).limit(1)).first() is None:
                    continue
            raise SinkTargetChanged(
                f"{self._sink}: expected column {name!r} of {into.name} to hold rows that were written for the type {before}, "
                f"found the type {now}, which changes their values: the table was altered in between. Nothing was changed, and "
                f"the rows stay in {source.name}: give the column its former type or a wider one, and start the run again"
            )

    def _common(self, connection: sa.Connection, source: sa.Table, into: sa.Table) -> list[str]:
        """The columns that rows of one table can give to another. For a name that a table does not have SQLite gives the name."""
        given = self._types(connection, source.name)
        found = sa.inspect(connection).get_columns(into.name, schema=self._schema)
        return [each["name"] for each in found if each["name"] in given and not is_computed(each)]

    def _move_marked(self, connection: sa.Connection, source: sa.Table, into: sa.Table, mark: str) -> int:
        names = self._common(connection, source, into)
        self._check_exact(connection, source, into, names)
        chosen = sa.select(*_columns(names)).select_from(source).where(self._mark() == mark)
        rows = int(connection.execute(sa.select(sa.func.count()).select_from(source).where(self._mark() == mark)).scalar_one())
        self._insert_all(connection, sa.insert(self._named(into.name, names)).from_select(names, chosen), rows)
        connection.execute(sa.delete(source).where(self._mark() == mark))
        return rows

    def _mark(self) -> Any:
        assert self._checkpoint_column is not None
        return sa.column(sa.quoted_name(self._checkpoint_column, True), sa.Text)

    # Names

    def _table(self, columns: Sequence[str] = ()) -> sa.Table:
        return self._named(self._name, columns)

    def _staging(self, staging: str) -> sa.Table:
        return self._named(staging)

    def _taken_back(self) -> sa.Table:
        return self._named(self.taken_back_name)

    def _named(self, name: str, columns: Sequence[str] = ()) -> sa.Table:
        return sa.Table(name, sa.MetaData(), *(sa.Column(each, quote=True) for each in columns), schema=self._schema, quote=True)

    def _derived(self, suffix: str) -> str:
        """The target's name with a suffix, within the length of PostgreSQL's names."""
        whole = self._name + suffix
        if len(whole.encode()) <= IDENTIFIER_BYTES:
            return whole
        suffix = f"_{hashlib.sha256(self._name.encode()).hexdigest()[:8]}{suffix}"
        return self._name.encode()[: IDENTIFIER_BYTES - len(suffix)].decode(errors="ignore") + suffix


def _shown(types: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(each) for name, each in types.items()}


def _affinity(declared: str) -> str:
    """What SQLite converts the values of a column to, by its declared type, as it writes it for a copied table.

    Source: https://www.sqlite.org/datatype3.html, "Determination Of Column Affinity".
    """
    for parts, affinity in (
        (("INT",), "INT"),
        (("CHAR", "CLOB", "TEXT"), "TEXT"),
        (("BLOB",), ""),
        (("REAL", "FLOA", "DOUB"), "REAL"),
    ):
        if any(part in declared.upper() for part in parts):
            return affinity
    return "NUM" if declared else ""


def _columns(names: Sequence[str]) -> list[Any]:
    """Columns without their table: the statement names the table."""
    return [sa.column(sa.quoted_name(name, True)) for name in names]


@contextmanager
def _driver_cursor(connection: sa.Connection) -> Iterator[Any]:
    """The driver's cursor, for COPY; a connection that was lost meanwhile is not used again."""
    driver = connection.connection.driver_connection
    assert driver is not None
    try:
        with driver.cursor() as cursor:
            yield cursor
    except Exception:
        if driver.closed:
            connection.invalidate()
        raise
