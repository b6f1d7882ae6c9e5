"""The files and directories below a prefix, or of a pattern, as splits."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_checkpoints.files.urls import is_hidden
from dagster_checkpoints.pipeline import DiscoveryContext
from dagster_checkpoints.sources.errors import InvalidSource, SourceUnavailable
from dagster_checkpoints.spark.files.hadoop_path import FileStatus, HadoopFileSystem
from dagster_checkpoints.spark.files.work_path import PATTERN_CHARACTERS


@dataclass(frozen=True, slots=True)
class FileSplits:
    """The files of a pattern, or below a prefix, in the order of their paths: a discovery for `split_source`.

    A split is the URL of a file or directory, as text. It must appear complete under its name, and stay as it is until it is
    read; a directory that is written file by file needs `complete`. Names that begin with `_` or `.` are left out, as Spark
    leaves them out, but for directories of partitions (`_day=1`); so are copies that Hadoop is making (`….csv._COPYING_`). If
    nothing is there, there are no splits.

    Args:
        pattern: Path or URL on a file system that Spark reaches, with the wildcards of Hadoop (`*`, `?`, `[ab]`, `{x,y}`): each
            file or directory of the pattern is a split. If it ends with a slash it is a prefix without wildcards: each file below
            it is a split, at any depth.
        complete: Name of a file that a directory has when it is complete, such as `_SUCCESS`. Each directory of the pattern, or
            below the prefix, that has this file is a split, and nothing else is one.

    Raises:
        InvalidSource: The pattern cannot be used.

    Source: https://hadoop.apache.org/docs/current/hadoop-project-dist/hadoop-common/filesystem/filesystem.html

    Examples:
        >>> days = FileSplits("s3a://airport/flights/day=*", complete="_SUCCESS")
    """

    pattern: str
    complete: str | None = None

    def __post_init__(self) -> None:
        below = self.pattern.endswith("/")
        if not self.pattern.strip("/") or (below and PATTERN_CHARACTERS & set(self.pattern)):
            raise InvalidSource(
                "FileSplits: expected a pattern such as 's3a://bucket/flights/*.parquet', or a prefix that ends with a slash and "
                f"has no wildcards, found {self.pattern!r}."
            )
        if self.complete is not None and (not self.complete or "/" in self.complete or PATTERN_CHARACTERS & set(self.complete)):
            raise InvalidSource(
                f"FileSplits: expected complete to be the name of a file such as '_SUCCESS', found {self.complete!r}: a name has "
                "no slash and no wildcard."
            )

    def __call__(self, context: DiscoveryContext) -> list[str]:
        """The splits that exist now.

        Raises:
            SourceUnavailable: The file system did not answer, or refused the listing.
            InvalidSource: The name of a file has a character that Spark reads as a wildcard.
        """
        try:
            system = HadoopFileSystem(context.spark, self.pattern)
            found = self._found(system)
            # Listed paths have the default host, also if the pattern names none.
            known = len(str(system.qualified(self._fixed)))
        except OSError as error:
            raise SourceUnavailable(
                f"FileSplits of {context.stage!r}: expected to list {self.pattern}, but {error}. Check the URL, the rights, and "
                "the settings spark.hadoop.* of its file system."
            ) from error
        urls = sorted({url for status in found if (url := self._split_of(str(status.path), known)) is not None})
        unclear = [url for url in urls if PATTERN_CHARACTERS & set(url[known:])]
        if unclear:
            raise InvalidSource(
                f"FileSplits of {context.stage!r}: expected names without the characters {' '.join(sorted(PATTERN_CHARACTERS))}, "
                f"found {unclear[0]}: Spark would read it as a pattern. Rename it, or write a discovery and a read of your own."
            )
        return urls

    @property
    def _fixed(self) -> str:
        """The part of the pattern in front of its first wildcard, up to a slash."""
        first = next((at for at, letter in enumerate(self.pattern) if letter in PATTERN_CHARACTERS), None)
        return self.pattern.rstrip("/") if first is None else self.pattern[:first].rpartition("/")[0] or self._root

    @property
    def _root(self) -> str:
        return "/" if self.pattern.startswith("/") else "."

    def _found(self, system: HadoopFileSystem) -> list[FileStatus]:
        if self.pattern.endswith("/"):
            return system.qualified(self.pattern).files_below()
        return system.matching(self.pattern if self.complete is None else f"{self.pattern}/{self.complete}")

    def _split_of(self, url: str, known: int) -> str | None:
        """The split to which a listed file belongs; None if it belongs to none."""
        if self.complete is not None:
            url, _, name = url.rpartition("/")
            if name != self.complete:
                return None
        return None if is_hidden(url[known:]) else url
