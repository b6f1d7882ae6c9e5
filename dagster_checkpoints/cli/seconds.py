"""The type of options that are durations."""

from __future__ import annotations

from typing import Any

import click

from dagster_checkpoints.pipeline.durations import no_seconds


class Seconds(click.FloatRange):
    """A number of seconds; a text such as "5s" is refused with the number to write."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = float(value)
        except ValueError:
            self.fail(no_seconds(value), param, ctx)
        return super().convert(number, param, ctx)
