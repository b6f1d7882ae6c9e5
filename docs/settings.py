"""The tables of settings in configuration.md have the names, defaults and texts of the code, which Dagster's UI shows as well.

`python docs/settings.py` writes them again; a test compares. The last column, of links, is the page's own. A new setting gets its
row behind that of the setting in front of it in its class.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any

from dagster_checkpoints import CheckpointCoordinatorResource, PipelineRunConfig, SavepointConfig

PAGE = Path(__file__).with_name("configuration.md")
OWNERS = {"The resource": CheckpointCoordinatorResource, "A run": PipelineRunConfig, "A savepoint": SavepointConfig}
"""The class of the settings, by heading."""

_ROW = re.compile(r"^\| `(\w+)` \|.* \| ?(.*?) ?\|\n", re.MULTILINE)


def written(page: str) -> str:
    """The text of the page, with the rows that the code says."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    return "".join(rows(part, OWNERS.get(part.partition("\n")[0].removeprefix("## "))) for part in parts)


def rows(text: str, owner: type[Any] | None) -> str:
    """A section of the page, with the rows of its class; unchanged if there is none."""
    if owner is None:
        return text
    links, names = dict(_ROW.findall(text)), list(owner.model_fields)

    def written_again(found: re.Match[str]) -> str:
        known, *behind = names[names.index(found[1]) :] if found[1] in names else [None]
        added = takewhile(lambda name: name not in links, behind)
        return "".join(_row(owner, name, links.get(name, "")) for name in (known, *added) if name)

    return _ROW.sub(written_again, text)


def _row(owner: type[Any], name: str, links: str) -> str:
    field = owner.model_fields[name]
    meaning = " ".join((field.description or "").split()).replace("|", r"\|")
    return f"| `{name}` | {_shown(field.default, meaning)} | {meaning} | {links} |\n"


def _shown(default: Any, meaning: str) -> str:
    if isinstance(default, float) and "seconds" in meaning.lower():
        return f"{default:g} s"
    if isinstance(default, int) and "bytes" in meaning:
        return f"{default / 2**20:g} MiB"
    if isinstance(default, Enum):
        return f"`{default.name}`"
    return f"`{json.dumps(default) if isinstance(default, str) else default}`"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
