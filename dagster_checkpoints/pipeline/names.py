"""The rule for names, and suggestions for a misspelt one.

Names of pipelines, stages and instances become parts of paths, object keys, Dagster asset keys and partition
keys, so all of them follow the strictest of these rules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from dagster_checkpoints.pipeline.errors import InvalidNameError

_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


def check_name(kind: str, name: object, where: str = "") -> str:
    """Return `name` if it consists of letters, digits and underscores only.

    Args:
        kind: What has the name, for the error: "stage", "instance", "pipeline".
        name: The name to check.
        where: Source location of the name, for the error.

    Raises:
        InvalidNameError: The name is not a text, is empty, or has any other character, or a pipeline's begins with an underscore.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        found_at = f" ({where})" if where else ""
        raise InvalidNameError(
            f"{kind.capitalize()} name {name!r}{found_at}: a name consists of letters, digits and "
            f"underscores (A-Z a-z 0-9 _), because it becomes part of a path. Rename it, or pass such a name "
            f"explicitly."
        )
    if kind == "pipeline" and name.startswith("_"):
        raise InvalidNameError(
            f"Pipeline name {name!r}: expected a letter or digit first, because it names a directory of the checkpoint storage. "
            "Rename it."
        )
    return name


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence with the known names that are most similar to a misspelt one, or with all known names."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    if near:
        return "Did you mean " + " or ".join(repr(choice) for choice in near) + "?"
    return "Known are: " + (", ".join(repr(choice) for choice in choices) or "none") + "."
