"""The type of options that are durations."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click

from dagster_checkpoints.pipeline.durations import no_seconds


class Seconds(click.FloatRange):
    """A number of seconds; a text such as "5s", NaN or infinity is refused, with the number to write if it says one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(ValueError):
            value = float(value)
        if reason := no_seconds(value):
            self.fail(reason, param, ctx)
        return super().convert(value, param, ctx)
