"""What a name may be, and how a misspelt one is reported.

Names of pipelines, stages and instances become parts of paths, object keys, Dagster asset keys and partition
keys, so that all of them follow the narrowest of these rules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from dagster_checkpoints.pipeline.errors import InvalidNameError

_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


def check_name(kind: str, name: object, where: str = "") -> str:
    """Return `name` when it is letters, digits and underscores only.

    Args:
        kind: What carries the name, for the error: "stage", "instance", "pipeline".
        name: The name to check.
        where: Where it was found, for the error.

    Raises:
        InvalidNameError: It is not a text, is empty, or has any other character.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        found_at = f" ({where})" if where else ""
        raise InvalidNameError(
            f"{kind.capitalize()} name {name!r}{found_at}: a name consists of letters, digits and "
            f"underscores (A-Z a-z 0-9 _), because it becomes part of a path. Rename it, or pass such a name "
            f"explicitly."
        )
    return name


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the names nearest to a misspelt one, or lists all of them."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    if near:
        return "Did you mean " + " or ".join(repr(choice) for choice in near) + "?"
    return "Known are: " + (", ".join(repr(choice) for choice in choices) or "none") + "."
