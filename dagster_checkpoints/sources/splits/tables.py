"""The tables of a database in a catalog of Spark's, as splits."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.errors import PySparkException

from dagster_checkpoints.pipeline import DiscoveryContext
from dagster_checkpoints.sources.errors import InvalidSource, SourceUnavailable


@dataclass(frozen=True, slots=True)
class TableSplits:
    """The tables of a database, in the order of their names: a discovery for `split_source`.

    A split is the full name of a table, quoted where needed: `read` gives it to `context.spark.table`. A table must be complete
    when it is created, and stay as it is until it is read. Views of the session are left out.

    Args:
        database: Database, or catalog and namespace, as SQL writes it: `flights`, `lake.flights`.
        like: Pattern of the names of the tables, as in Spark's `SHOW TABLES`: `*` stands for any characters, `|` for "or". None
            for all tables.

    Raises:
        InvalidSource: The pattern cannot be used.

    Source: https://spark.apache.org/docs/latest/sql-ref-syntax-aux-show-tables.html

    Examples:
        >>> months = TableSplits("lake.flights", like="month_2026*")
    """

    database: str
    like: str | None = None

    def __post_init__(self) -> None:
        if not self.database or (self.like is not None and (not self.like or {"'", "\\"} & set(self.like))):
            raise InvalidSource(
                f"TableSplits: expected a database, and a pattern of names without ' and \\, found {self.database!r} and "
                f"{self.like!r}."
            )

    def __call__(self, context: DiscoveryContext) -> list[str]:
        """The tables that there are now.

        Raises:
            SourceUnavailable: The catalog has no such database, or did not answer.
        """
        like = f" LIKE '{self.like}'" if self.like is not None else ""
        try:
            found = context.spark.sql(f"SHOW TABLES IN {self.database}{like}").collect()
        except PySparkException as error:
            raise SourceUnavailable(
                f"TableSplits of {context.stage!r}: expected to list the tables of {self.database}, found: "
                f"{str(error).partition(chr(10))[0]} Check the name, and the settings spark.sql.catalog.* of the catalog."
            ) from error
        return [f"{self.database}.{_quoted(row.tableName)}" for row in sorted(found) if not row.isTemporary]


def _quoted(name: str) -> str:
    escaped = name.replace("`", "``")
    return name if name.replace("_", "a").isalnum() else f"`{escaped}`"
