"""The page about split sources."""

from __future__ import annotations

import datetime as dt
import inspect
import re
from pathlib import Path
from typing import Any

from dagster_checkpoints.pipeline import Pipeline, split_source
from dagster_checkpoints.plugin.stage_translator import code_version


def test_the_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/sources/splits.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/sources/splits.md", "exec"), names)
    flights, live = Pipeline("airport", [names["flights"], names["live_flights"]]).stages
    assert not live.bounded and code_version(live) is not None
    splits = [flights.encode_split(split) for split in flights.discover(None)]
    assert (len(splits), splits[-1], flights.decode_split(splits[-1])) == (31, '"2026-01-31"', dt.date(2026, 1, 31))
    arguments = inspect.signature(split_source).parameters
    shown = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", page.split("## Ready-made discoveries")[0], re.MULTILINE)
    assert {name: default or None for name, default in shown} == {
        name: None if of.default is inspect.Parameter.empty else getattr(of.default, "__name__", str(of.default))
        for name, of in arguments.items()
        if name in dict(shown)
    }
    others = re.findall(r"`(\w+)`", page.split("seconds between two discoveries")[1].split("are those of")[0])
    assert {*dict(shown), *others} == set(arguments)
