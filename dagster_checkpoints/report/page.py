"""The report as one HTML file: the data as JSON in it, drawn by the script in it. The page loads nothing.

The data may hold any text (names of stages, messages of errors): it is escaped so that it cannot end its element, and the script
writes it as text only.
"""

from __future__ import annotations

import html
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from dagster_checkpoints.control.history import Measured
from dagster_checkpoints.report.values import CheckpointRow, PipelineReport

_PARTS = {"/*STYLE*/": "style.css", "/*SCRIPT*/": "script.js"}
# In a JSON text these characters occur within strings only.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(report: PipelineReport) -> bytes:
    """The page, as UTF-8."""
    begin, end = _template()
    title = html.escape(f"{report.pipeline} · checkpoints")
    data = msgspec.json.encode(_compact(report)).decode()
    for character, escape in _ESCAPES.items():
        data = data.replace(character, escape)
    return f"{begin.replace('<!--TITLE-->', title)}{data}{end}".encode()


def as_json(report: PipelineReport) -> dict[str, Any]:
    """The report for programs: as in the page, and each value with its name."""

    def measures(measured: Measured | None) -> dict[str, float] | None:
        return msgspec.structs.asdict(measured) if measured is not None else None

    details = [
        {
            "checkpoint_id": detail.checkpoint_id,
            "epoch": detail.epoch,
            "vertices": [
                {
                    "stages": vertex.stages,
                    "measured": measures(vertex.measured),
                    "instances": [
                        {"name": each.name, "measured": measures(each.measured), "finished": each.finished}
                        for each in vertex.instances
                    ],
                }
                for vertex in detail.vertices
            ],
        }
        for detail in report.details
    ]
    return {**msgspec.structs.asdict(report), "details": details}


def _compact(report: PipelineReport) -> dict[str, Any]:
    """The report with a list for each checkpoint, in the order of `columns`: the names of fields are written once."""
    rows = [msgspec.structs.astuple(row) for row in report.checkpoints]
    return {**msgspec.structs.asdict(report), "columns": CheckpointRow.__struct_fields__, "checkpoints": rows}


@cache
def _template() -> tuple[str, str]:
    """The page before and behind its data."""
    folder = files(__package__).joinpath("parts")
    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    for mark, name in _PARTS.items():
        text = text.replace(mark, folder.joinpath(name).read_text(encoding="utf-8"))
    begin, end = text.split("/*DATA*/")
    return begin, end
