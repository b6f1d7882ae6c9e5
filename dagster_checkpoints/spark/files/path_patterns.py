"""Characters that Spark's readers of files take for a pattern, and their escapes. Text only.

Source: Hadoop's `FileSystem.globStatus`, Spark's `SparkHadoopUtil.isGlobPath`
"""

from __future__ import annotations

import re

PATTERN_CHARACTERS = frozenset("*?[]{}\\")
_ESCAPED = re.compile(r"\\(.)")


def is_pattern(path: str) -> bool:
    """Whether Spark's readers take a path for a pattern."""
    return not PATTERN_CHARACTERS.isdisjoint(path)


def literal(path: str) -> str:
    """The pattern whose only match is this path."""
    return "".join(f"\\{letter}" if letter in PATTERN_CHARACTERS else letter for letter in path)


def has_escapes(pattern: str) -> bool:
    """Whether a pattern names characters by their escapes: then the paths of its matches look like patterns themselves."""
    return any(found[1] in PATTERN_CHARACTERS for found in _ESCAPED.finditer(pattern))
