"""The versions of Spark that the plugin runs on, and which of them reads the state that another one wrote.

Spark's state and logs are in a checkpoint as Spark wrote them. Each rule here was tried with every stateful operator
(`tests/spark/test_spark_versions.py`). Must not know which version is installed.
"""

from __future__ import annotations

import re

from dagster_checkpoints.state.errors import SparkVersionChanged
from dagster_checkpoints.state.metadata import CheckpointMetadata

SUPPORTED_SPARK = ((4, 1), (4, 2), (4, 3))
"""Major and minor numbers, oldest first."""

_OTHER_LISTS_SINCE = (4, 2)
"""From this version on, list state of `transformWithState` has another form in RocksDB; older state is read, too."""

_REWRITES_STATE_SINCE = (4, 2)

_COLLECTS_NO_NULLS = re.compile(r"(?<=inputAggBufferOffset )(\d+), ignoreNulls True(?=\))")
"""How the text of collect_list and collect_set ends since Spark 4.2, which can also collect nulls."""

_NULL_IF = "null_if_result("
"""How the text of nullif begins since Spark 4.3: `null_if_result(condition, value)`."""

SUPPORTED_SPARK_TEXT = "Spark 4.1, 4.2 or 4.3"
"""For the text of errors."""


def is_supported_spark(version: str) -> bool:
    """Whether the plugin runs on this version of Spark, such as `4.3.0`."""
    return _minor(version) in SUPPORTED_SPARK


def rewrites_state(version: str) -> bool:
    """Whether this version of Spark, such as `4.3.0`, can write the state of a query again: with other keys, or partitions."""
    return _minor(version) >= _REWRITES_STATE_SINCE


def check_spark_version(metadata: CheckpointMetadata, running: str) -> None:
    """Check that one version of Spark reads the state that another one wrote into a checkpoint.

    Args:
        metadata: the metadata of the checkpoint; one that names no version fits any.
        running: the version that is to restore it, such as `4.3.0`.

    Raises:
        SparkVersionChanged: it may not read the state, or would read other values than were written.
    """
    written = metadata.spark_version
    if not written or _minor(written) == _minor(running):
        return
    where = f"checkpoint {metadata.checkpoint_id} of pipeline {metadata.pipeline!r}"
    if not is_supported_spark(written):
        raise SparkVersionChanged(
            f"expected a checkpoint that {SUPPORTED_SPARK_TEXT} has written, found that Spark {written} has written {where}, and "
            f"it is not known that Spark {running} reads its state. Restore it with Spark {written}"
        )
    if _minor(running) < _OTHER_LISTS_SINCE <= _minor(written):
        raise SparkVersionChanged(
            f"expected a checkpoint that Spark 4.1 has written, found that Spark {written} has written {where}. The installed "
            f"Spark {running} cannot read all of its state: since Spark 4.2, list state of transformWithState has another form. "
            "Restore it with Spark 4.2 or newer"
        )


def in_oldest_words(operator: str) -> str:
    """The text of a stateful operator as the oldest version of Spark gives it; later ones give some expressions other names."""
    text = _COLLECTS_NO_NULLS.sub(r"\1", operator)
    while (begin := text.rfind(_NULL_IF)) >= 0:
        parts = _arguments(text, begin + len(_NULL_IF))
        if len(parts) != 2:
            return operator
        condition, value = parts
        end = begin + len(f"{_NULL_IF}{condition}, {value})")
        text = f"{text[:begin]}if({condition}, typed_null_literal({value}), {value}){text[end:]}"
    return text


def _arguments(text: str, begin: int) -> list[str]:
    """The arguments of a function, from the position behind its parenthesis on."""
    depth, found = 0, [begin]
    for position in range(begin, len(text)):
        match text[position]:
            case "(":
                depth += 1
            case ")" if depth == 0:
                ends = [*(start - len(", ") for start in found[1:]), position]
                return [text[start:end] for start, end in zip(found, ends, strict=True)]
            case ")":
                depth -= 1
            case "," if depth == 0:
                found.append(position + len(", "))
    return []


def _minor(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else ()
