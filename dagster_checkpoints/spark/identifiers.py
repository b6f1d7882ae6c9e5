"""Names of columns as Spark's SQL and `F.col` take them. Must not know a session or a plan."""

from __future__ import annotations


def identifier(name: str) -> str:
    """A column's name in backticks: Spark takes it for that name, whatever characters it has, and not for a path into a struct.

    Source: https://spark.apache.org/docs/latest/sql-ref-identifier.html
    """
    return "`" + name.replace("`", "``") + "`"
