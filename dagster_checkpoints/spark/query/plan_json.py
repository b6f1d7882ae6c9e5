"""Spark's plans as JSON, with the values that Spark's own JSON leaves out: lists of constants inside an expression, and bytes.

A text of such an expression without its values would be the same after a change of the values, or, of bytes, another one in
every process. Analysis only; must not know what the texts are for.

Source: Spark's `TreeNode.parseToJson`, which writes null for sequences and sets of constants, and `Literal.jsonFields`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dagster_checkpoints.spark.query.plan_nodes import children, items, nodes

_LISTS: Mapping[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "InSet": ("hset", sorted),
    "LikeAll": ("patterns", list),
    "LikeAny": ("patterns", list),
    "NotLikeAll": ("patterns", list),
    "NotLikeAny": ("patterns", list),
    "PivotFirst": ("pivotColumnValues", list),
}
"""By expression, its list of constants, and how the order in it is made certain."""
_LITERAL = "Literal"
_BYTES = "[B@"  # how Java writes an array of bytes: with its address


def plan_json(plan: Any) -> list[dict[str, Any]]:
    """The nodes of a plan from the top down, as `TreeNode.toJSON` writes them."""
    text = str(plan.toJSON())
    found: list[dict[str, Any]] = json.loads(text)
    if _leaves_out(text):
        for item, node in zip(found, nodes(plan), strict=True):
            trees = (tree for value in item.values() if isinstance(value, list) for tree in _trees(value))
            _complete((each for tree in trees for each in tree), items(node.expressions()))
    return found


def expression_json(expression: Any) -> list[dict[str, Any]]:
    """The nodes of an expression from the top down, as `TreeNode.toJSON` writes them."""
    text = str(expression.toJSON())
    found: list[dict[str, Any]] = json.loads(text)
    if _leaves_out(text):
        _complete(iter(found), iter([expression]))
    return found


def _leaves_out(text: str) -> bool:
    return _BYTES in text or any(f'.{name}"' in text for name in _LISTS)


def _trees(value: list[Any]) -> Iterator[list[dict[str, Any]]]:
    """The expressions in a field of a plan's node, which is one expression, or a list of them."""
    if value and isinstance(value[0], dict):
        yield value
    else:
        for each in value:
            if isinstance(each, list):
                yield from _trees(each)


def _complete(written: Iterator[dict[str, Any]], expressions: Iterator[Any]) -> None:
    """Add what is left out of the expressions of one node, which come in the same order."""
    missing = [item for item in written if _lacks(_kind(item["class"]), str(item.get("value")))]
    found = [part for each in expressions for part in _parts(each)] if missing else []
    if len(found) != len(missing):
        return
    for item, part in zip(missing, found, strict=True):
        kind = _kind(item["class"])
        if kind == _LITERAL:
            item["value"] = str(part.sql())
        else:
            name, ordered = _LISTS[kind]
            values = ordered([str(value) for value in items(getattr(part, name)().toSeq())])
            item[name] = json.dumps(values, ensure_ascii=False)


def _parts(expression: Any) -> Iterator[Any]:
    """The parts of an expression of which something is left out, from the top down."""
    kind = _kind(expression.getClass().getName())
    if _lacks(kind, str(expression.toJSON()) if kind == _LITERAL else ""):
        yield expression
    for child in children(expression):
        yield from _parts(child)


def _kind(name: Any) -> str:
    return str(name).rpartition(".")[2]


def _lacks(kind: str, value: str) -> bool:
    return kind in _LISTS or (kind == _LITERAL and _BYTES in value)
