"""How commands write: tables for people, JSON for programs, numbers and times in words.

Results go to standard output, what is said meanwhile to standard error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

JSON = "dagster_checkpoints.cli.json"
"""Key in click's `meta`: whether the output is for a program."""

NOTHING = "-"
_WIDTH_OF_A_FILE = 160


def write_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def write_json_line(value: Any) -> None:
    """One JSON document on one line, at once: for what goes on."""
    click.echo(msgspec.json.encode(value).decode())


def console(*, error: bool = False) -> Console:
    """Standard output, or standard error, as a terminal; without colours where it is none, and then wide."""
    from rich.console import Console

    made = Console(stderr=error, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDTH_OF_A_FILE
    return made


def write(*parts: RenderableType) -> None:
    """Tables and lines for people. Text is no markup: names may have brackets."""
    from rich.text import Text

    out = console()
    for part in parts:
        # A line that is too long is the terminal's to wrap: what is copied from it is then whole.
        out.print(part, markup=False, soft_wrap=isinstance(part, str | Text))


def table(*columns: str, right: Iterable[str] = (), keep: Iterable[str] = ()) -> Table:
    """An empty table.

    Args:
        columns: headings.
        right: those of numbers.
        keep: those that are never wrapped.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    numbers, kept = set(right), set(keep)
    for column in columns:
        number = column in numbers
        made.add_column(column, justify="right" if number else "left", no_wrap=number or column in kept, overflow="fold")
    return made


def facts(*pairs: tuple[str, str]) -> Text:
    """Names and values below each other; empty values are left out."""
    from rich.text import Text

    said = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in said), default=0)
    lines = [Text.assemble((name.ljust(width), "dim"), f"  {value}") for name, value in said]
    return Text("\n").join(lines)


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = (), bold: Iterable[int] = ()) -> Text:
    """A table whose last column is there to be copied: a terminal that is too narrow wraps its lines itself.

    Args:
        columns: headings.
        rows: cells.
        right: columns of numbers.
        bold: numbers of the rows that stand out.
    """
    from rich.text import Text

    cells = [list(columns), *(list(one) for one in rows)]
    widths = [max(len(one[number]) for one in cells) for number in range(len(columns))]
    numbers = {number for number, column in enumerate(columns) if column in set(right)}
    strong = {0, *(number + 1 for number in bold)}

    def line(one: list[str]) -> str:
        padded = [c.rjust(widths[n]) if n in numbers else c.ljust(widths[n]) for n, c in enumerate(one)]
        return "  ".join(padded).rstrip()

    return Text("\n").join(Text(line(one), style="bold" if n in strong else "") for n, one in enumerate(cells))


def row(*values: str, style: str = "") -> Sequence[RenderableType]:
    """Cells whose text is no markup."""
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
    """A wall-clock time, in UTC; seconds since 1970 are understood too."""
    if moment is None:
        return NOTHING
    if isinstance(moment, int | float):
        moment = datetime.fromtimestamp(moment, UTC)
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def age_in_words(moment: datetime | float | None) -> str:
    """How long ago, by this machine's clock."""
    if moment is None:
        return NOTHING
    then = moment if isinstance(moment, int | float) else moment.timestamp()
    return seconds_in_words(datetime.now(UTC).timestamp() - then)


def count_of(number: int, singular: str, plural: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
