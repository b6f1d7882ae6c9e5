"""A file that a query cannot read: which file, and which column of it. Must not know tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from dagster_checkpoints.spark.query.plan_nodes import stream_name, streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CONDITION = "FAILED_READ_FILE"
_FILE = re.compile(r"\[FAILED_READ_FILE(?:\.\w+)?\] Encountered error while reading file (?P<file>.+?)\.\s")
_COLUMN = re.compile(
    r"reading Parquet column \[(?P<column>[^\]]*)\]\. Expected Spark type (?P<expected>.+?), actual Parquet type (?P<found>\w+)"
)
_CAUSE = re.compile(r"^Caused by: (?:[\w.$]+: )?(.+(?:\n(?!\s+at |\s+\.\.\. |Caused by: ).+)*)", re.MULTILINE)
_SOURCE = re.compile(r"^\w+\[(?P<path>.+)\]$")


@dataclass(frozen=True)
class UnreadableFile:
    """A file that Spark could not read.

    Attributes:
        file: The file's URL, as Spark writes it.
        column: The path of the column whose type in the file is another one; empty if that is not the problem.
        expected: The column's type in the source's schema, as Spark writes it.
        found: The column's type in the file, as Parquet writes it.
        cause: The innermost error.
    """

    file: str
    column: str = ""
    expected: str = ""
    found: str = ""
    cause: str = ""

    @property
    def repeats(self) -> bool:
        """Whether another attempt would find the same: a file's types do not change, while a file may still be being written."""
        return bool(self.column)

    @property
    def text(self) -> str:
        """What was expected, what was found, and what to do."""
        if self.column:
            return (
                f"expected column {self.column!r} of type {self.expected}, as the schema of the source says, in the file "
                f"{self.file}, found the Parquet type {self.found}. Declare the type that the file has and cast the column "
                "behind the source, or write the file again; files of both types need a source each, united behind the cast. "
                "No row of the file was used."
            )
        return (
            f"expected that Spark can read the file {self.file}, found: {self.cause}. Write the file again, or move it away if "
            "its rows are not needed; a file that is written to the source's directory has to appear in one step, by a rename."
        )


def unreadable_file(error: BaseException) -> UnreadableFile | None:
    """The file that an error of Spark is about; None for any other error."""
    found = _FILE.search(str(error)) if _CONDITION in str(error) else None
    if found is None:
        return None
    column = _COLUMN.search(str(error))
    if column is not None:
        path = ".".join(part.strip() for part in column["column"].split(","))
        return UnreadableFile(found["file"], path, column["expected"], column["found"])
    return UnreadableFile(found["file"], cause=_innermost(error))


def _innermost(error: BaseException) -> str:
    """The innermost cause that Spark names: in the objects of PySpark's errors, or in the text of an error of py4j."""
    named = _CAUSE.findall(str(error))
    while (inner := getattr(error, "_cause", None)) is not None:
        error = inner
    text = str(named[-1]) if named else str(error).partition("\n")[0]
    return " ".join(text.split()).rstrip(".")


def source_of_file(file: str, sources: Mapping[str, DataFrame]) -> str | None:
    """The source that reads a file, by its directory; None if none of them does.

    Args:
        file: The file's URL.
        sources: The DataFrame of each source, by the name of its stage.
    """
    path = unquote(urlsplit(file).path)
    found: dict[str, str] = {}
    for name, frame in sources.items():
        for leaf in streams(frame):
            read = _SOURCE.match(stream_name(leaf))
            if read is not None and (folder := _folder_of(urlsplit(read["path"]).path, path)) is not None:
                found.setdefault(folder, name)
    return found[max(found, key=len)] if found else None


def _folder_of(read: str, file: str) -> str | None:
    """The directory that a source reads, if a file is in it: of a pattern what is in front of its first special character."""
    folder = re.split(r"[*?\[{]", read)[0]
    if folder == read:
        folder = f"{read.rstrip('/')}/"
    return folder if f"{file}/".startswith(folder) else None
