"""The output of commands: tables for people, JSON for programs, and standard output itself.

Results go to standard output, progress and errors to standard error. Standard output may be full, or its reader may have ended:
whatever writes to it then (a command, click's help, rich) raises :class:`OutputFailed`. Must not import the commands.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dagster_checkpoints.cli.exits import OutputClosed, OutputFailed, exit_code
from dagster_checkpoints.control.status import watermark_moment

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


@contextmanager
def checked_standard_output() -> Iterator[None]:
    """Within the block an error of standard output ends the process with its own exit code; standard error has what was done."""
    if sys.stdout is not None:  # None: it was closed when the process began, and nothing is written
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_CheckedFile(sys.stdout.fileno(), "wb", closefd=False)),
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.isatty(),
        )
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OutputFailed as error:
        if str(error):
            with suppress(OSError):
                click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True)
        sys.exit(int(exit_code(error)))


@contextmanager
def with_outcome(done: str) -> Iterator[None]:
    """Within the block the result of a command is written that has changed something.

    Args:
        done: what was done, which is said if the result cannot be written.
    """
    try:
        yield
    except OutputFailed as error:
        error.done = done
        raise


class _CheckedFile(io.FileIO):
    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            # What is still in buffers is written at the end of the process, and would fail again.
            # Source: https://docs.python.org/3/library/signal.html#note-on-sigpipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            failed = OutputClosed if isinstance(error, BrokenPipeError) else OutputFailed
            raise failed(error.strerror or str(error)) from error


JSON = "dagster_checkpoints.cli.json"
"""Key in click's `meta`: whether the output is JSON."""

_ENCODER = msgspec.json.Encoder(decimal_format="number")
NOTHING = "-"
_WIDTH_OF_A_FILE = 160


def prints_as_other_text() -> AbstractContextManager[Any]:
    """Within the block, what a user's code prints goes to standard error: standard output has results only."""
    return redirect_stdout(sys.stderr)


def write_json(value: Any) -> None:
    """Write one JSON document to standard output."""
    click.echo(msgspec.json.format(_ENCODER.encode(value), indent=2).decode())


def json_line(value: Any) -> str:
    """A value as JSON, for a cell of a table."""
    return msgspec.json.format(_ENCODER.encode(value), indent=0).decode()


def write_json_line(value: Any) -> None:
    """Write one JSON document on one line: for a command that writes several, one after the other."""
    click.echo(msgspec.json.encode(value).decode())


def console(*, error: bool = False) -> Console:
    """A console on standard output or standard error; if that is no terminal, without colours and 160 columns wide."""
    from rich.console import Console

    created = Console(stderr=error, highlight=False)
    if not created.is_terminal and "COLUMNS" not in os.environ:
        created.width = _WIDTH_OF_A_FILE
    return created


def write(*parts: RenderableType) -> None:
    """Write tables and lines for people. Text is not read as markup, because names may have brackets."""
    from rich.text import Text

    target = console()
    for part in parts:
        # The terminal wraps long lines: text copied from it then has no line breaks.
        target.print(part, markup=False, soft_wrap=isinstance(part, str | Text))


def table(*columns: str, right: Iterable[str] = (), keep: Iterable[str] = ()) -> Table:
    """An empty table.

    Args:
        columns: headings of the columns.
        right: headings of the columns with numbers, which are aligned right.
        keep: headings of the columns whose cells are never wrapped.
    """
    from rich import box
    from rich.table import Table

    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    numbers, kept = set(right), set(keep)
    for column in columns:
        number = column in numbers
        empty.add_column(column, justify="right" if number else "left", no_wrap=number or column in kept, overflow="fold")
    return empty


def facts(*pairs: tuple[str, str]) -> Text:
    """Names with their values, one per line; empty values are left out."""
    from rich.text import Text

    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    lines = [Text.assemble((name.ljust(width), "dim"), f"  {value}") for name, value in shown]
    return Text("\n").join(lines)


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = (), bold: Iterable[int] = ()) -> Text:
    """A table whose last column can be copied: its lines have no breaks, a narrow terminal wraps them.

    Args:
        columns: headings of the columns.
        rows: texts of the cells, row by row.
        right: headings of the columns with numbers, which are aligned right.
        bold: numbers of the rows that are printed bold, from 0.
    """
    from rich.text import Text

    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    numeric = {number for number, column in enumerate(columns) if column in set(right)}
    bold_lines = {0, *(number + 1 for number in bold)}

    def text(line: list[str]) -> str:
        padded = [c.rjust(widths[n]) if n in numeric else c.ljust(widths[n]) for n, c in enumerate(line)]
        return "  ".join(padded).rstrip()

    return Text("\n").join(Text(text(line), style="bold" if n in bold_lines else "") for n, line in enumerate(lines))


def row(*values: str, style: str = "") -> Sequence[RenderableType]:
    """The cells of a table's row; their text is not read as markup."""
    from rich.text import Text

    return [Text(value, style=style) for value in values]


def bytes_in_words(count: float) -> str:
    """`1.5 MB`."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            return f"{count:.1f} {unit}" if count < 99.95 else f"{count:.0f} {unit}"
    raise AssertionError("unreachable")


def seconds_in_words(seconds: float) -> str:
    """`0.8 s`, `42 s`, `3 min 20 s`, `5 h 2 min`, `3 d 4 h`."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{whole} s"


def moment_in_words(moment: datetime | float | None) -> str:
    """A wall-clock time in UTC, `2026-01-31 12:00:00`; `moment` may be seconds since 1970."""
    if moment is None:
        return NOTHING
    if isinstance(moment, int | float):
        moment = datetime.fromtimestamp(moment, UTC)
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def watermark_in_words(watermark_ms: int | None) -> str:
    """The time of a watermark in UTC; `end of time` after a drain, and for every other one later than the year 9999.

    Args:
        watermark_ms: milliseconds since 1970; None without a watermark.
    """
    moment = watermark_moment(watermark_ms) if watermark_ms is not None else None
    return moment_in_words(moment) if moment is not None or not watermark_ms or watermark_ms < 0 else "end of time"


def age_in_words(moment: datetime | float | None) -> str:
    """Time since `moment` by this machine's clock, `3 min 20 s`; `moment` may be seconds since 1970."""
    if moment is None:
        return NOTHING
    then = moment if isinstance(moment, int | float) else moment.timestamp()
    return seconds_in_words(datetime.now(UTC).timestamp() - then)


def count_of(number: int, singular: str, plural: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
