"""Standard output, whose errors are told from those of other files: it is full, or its reader has ended.

Whatever writes to it raises :class:`OutputFailed`: a command, click's help, rich. Must not import the commands.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from dagster_checkpoints.cli.exits import OutputClosed, OutputFailed, exit_code


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
