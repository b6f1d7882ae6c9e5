"""A plan of Spark as JSON, with what Spark's own JSON leaves out, and the expressions of a plan as text.

The plan may be an analyzed one, an optimized one, or a physical one. The text is the same in every process: it holds no
expression ids, no qualifiers and no seeds. It is stored in checkpoints: if an expression were written in another way, the plans
of older checkpoints would count as changed. `column_origins` traces a plan's columns. Must not know stages, checkpoints, or a
Spark session.

Spark's JSON leaves out lists of constants inside an expression, and bytes. A text of such an expression without its values would
be the same after a change of the values, or, of bytes, another one in every process.

Source: Spark's `TimeWindowing` and `SessionWindowing` for the expressions of a window in the analyzed plan;
`TreeNode.parseToJson`, which writes null for sequences and sets of constants, and `Literal.jsonFields`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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


_INFIX = {
    "Add": "+",
    "And": "AND",
    "Divide": "/",
    "EqualNullSafe": "<=>",
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "Multiply": "*",
    "Or": "OR",
    "Remainder": "%",
    "Subtract": "-",
}
_TRANSPARENT = frozenset({"Alias", "Between", "KnownNullable", "KnownNotNull"})
_SEEDED = frozenset({"Rand", "Randn", "RandStr", "Shuffle", "Uniform", "Uuid"})
# Fields that do not change the meaning, or differ from process to process.
_IGNORED_FIELDS = frozenset(
    {
        "ansiEnabled",
        "class",
        "dataType",
        "evalContext",
        "evalMode",
        "evalType",
        "explicitMetadata",
        "exprId",
        "failOnError",
        "metadata",
        "mode",
        "nonInheritableMetadataKeys",
        "num-children",
        "nullable",
        "qualifier",
        "resultId",
        "timeZoneId",
        "udfDeterministic",
    }
)
# By node, the field with the columns that it computes, or adds to those of its input.
COMPUTED = {
    "Project": "projectList",
    "Aggregate": "aggregateExpressions",
    "HashAggregate": "resultExpressions",
    "MergingSessions": "resultExpressions",
    "ObjectHashAggregate": "resultExpressions",
    "SortAggregate": "resultExpressions",
}
UDFS = frozenset({"ArrowEvalPython", "BatchEvalPython"})
_ADDED = {"Generate": "generatorOutput", **dict.fromkeys(UDFS, "resultAttrs")}
OUTPUTS = ("output", "outputAttrs", "outputAttributes", "outAttributes")
_SUBQUERY_ID = re.compile(r"(?<=subquery)#\d+")
_BY_TIME_ZONE = frozenset({"date", "timestamp", "timestamp_ntz", "string"})


@dataclass(frozen=True, eq=False)
class Node:
    """A node of a plan or of an expression.

    Attributes:
        kind: The simple name of the node's class, without the "Exec" of physical operators.
        fields: The arguments of the class's constructor, as JSON.
        number: The node's position in the tree, from the top down.
    """

    kind: str
    fields: Mapping[str, Any]
    children: tuple[Node, ...]
    number: int
    _expressions: dict[str, list[Node]] = field(default_factory=dict, repr=False)

    def expressions(self, name: str) -> list[Node]:
        """The expressions in a field of a plan's node: one, or a list of them; none if there is no such field."""
        if name not in self._expressions:
            self._expressions[name] = expressions_of(self.fields.get(name))
        return self._expressions[name]

    @cached_property
    def output(self) -> Sequence[int]:
        """The ids of the columns that a plan's node returns, in order."""
        return _output(self)

    @cached_property
    def returned(self) -> frozenset[int]:
        """The ids in `output` as a set."""
        return frozenset(self.output)

    def all(self) -> Iterator[Node]:
        """The node and all nodes below it, from the top down."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += reversed(node.children)

    def bottom_up(self) -> list[Node]:
        """The node and all nodes below it, from the bottom up: children in their order, then their parent."""
        visited, pending = [], [self]
        while pending:
            node = pending.pop()
            visited.append(node)
            pending += node.children
        return visited[::-1]


def parse(items: Sequence[Mapping[str, Any]]) -> Node:
    """The plan whose nodes are listed from the top down, each with the number of its children (:func:`plan_json`)."""
    return _tree(items)


def is_streaming(plan: Node) -> bool:
    """Whether the plan reads a stream."""
    return any(node.kind.startswith("Streaming") or node.fields.get("isStreaming") is True for node in plan.all())


def as_written(expression: Node) -> str:
    """An expression as text, with the name and type of each column."""
    return text_of_expression(expression, lambda column: f"{column.fields['name']} {_type(column.fields.get('dataType'))}")


def conjuncts(condition: Node) -> Iterator[Node]:
    """The parts of a condition that are connected by AND, from left to right."""
    if condition.kind == "And":
        for each in condition.children:
            yield from conjuncts(each)
    else:
        yield condition


def _tree(items: Sequence[Mapping[str, Any]]) -> Node:
    """The tree of nodes listed from the top down, each with its number of children. No recursion: some trees are deep."""
    built: list[Node] = []
    for number, fields in reversed(list(enumerate(items))):
        children = tuple(built.pop() for _ in range(int(fields["num-children"])))
        built.append(Node(str(fields["class"]).rpartition(".")[2].removesuffix("Exec"), fields, children, number))
    return built[0]


def expressions_of(value: Any) -> list[Node]:
    if not isinstance(value, list) or not value:
        return []
    return [_tree(value)] if _is_tree(value) else [_tree(each) for each in value if _is_tree(each)]


def _is_tree(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "num-children" in value[0]


# Expressions


def text_of_expression(node: Node, column: Callable[[Node], str]) -> str:
    """An expression as text.

    Args:
        node: The expression.
        column: Gives the text of a column.
    """
    match node.kind:
        case "AttributeReference":
            return str(column(node))
        case "Literal":
            value, kind = node.fields.get("value"), str(node.fields.get("dataType"))
            if kind.startswith("interval ") and str(value).isdigit() and "year" not in kind and "month" not in kind:
                return _duration(node)
            return f"'{value}'" if kind == "string" else str(value)
        case "OuterReference":
            return str(node.fields.get("name", node.kind))
        case "NamedLambdaVariable":
            return _variable(node)
        case "LambdaFunction":
            return _lambda(node, column)
        case kind if kind in _TRANSPARENT:
            return text_of_expression(node.children[0], column)
        case kind if kind in _SEEDED:
            return f"{_function(kind)}()"
        case "AggregateExpression":
            distinct = "distinct " if node.fields.get("isDistinct") else ""
            return distinct + ", where ".join(text_of_expression(child, column) for child in node.children)
        case "With" if len(node.children) == 2:  # how Spark writes `between`: an expression that is used twice
            defined = text_of_expression(node.children[1].children[0], column)
            return text_of_expression(node.children[0], column).replace("common_expression_ref()", defined)
        case "Cast" if node.children[0].kind == "Literal":
            return text_of_expression(node.children[0], column)
        case "Cast":
            kind = _type(node.fields.get("dataType"))
            zone = f" in {node.fields['timeZoneId']}" if kind in _BY_TIME_ZONE and node.fields.get("timeZoneId") else ""
            return f"cast({text_of_expression(node.children[0], column)} as {kind}{zone})"
        case "CreateNamedStruct":
            return _window(node, column) or _call(node, column)
        case "GetStructField":
            return f"{text_of_expression(node.children[0], column)}.{node.fields.get('name') or _member(node)}"
        case kind if kind in _INFIX and len(node.children) == 2:
            left, right = (text_of_expression(child, column) for child in node.children)
            return f"({left} {_INFIX[kind]} {right})"
    return _call(node, column)


def _member(node: Node) -> Any:
    """The name of a struct's member that the expression selects by number."""
    kind, number = node.children[0].fields.get("dataType"), int(node.fields["ordinal"])
    members = kind.get("fields", ()) if isinstance(kind, dict) else ()
    return members[number]["name"] if number < len(members) else number


def _call(node: Node, column: Any) -> str:
    arguments = [text_of_expression(child, column) for child in node.children]
    children = 0
    for name, value in node.fields.items():
        if isinstance(value, int) and not isinstance(value, bool) and value == children < len(node.children):
            children += 1  # the number of a child, which the text contains already
        elif isinstance(value, str | int | float) and name not in _IGNORED_FIELDS:
            arguments.append(f"{name} {_SUBQUERY_ID.sub('', value) if isinstance(value, str) else value}")
        elif _is_tree(value) and "replacement" not in node.fields:
            arguments.append(f"{name} {text_of_expression(_tree(value), column)}")
    if node.kind.endswith("UDF") and node.fields.get("dataType") is not None:
        arguments.append(f"returns {_type(node.fields['dataType'])}")
    if isinstance(node.fields.get("timeZoneId"), str):
        arguments.append(f"in {node.fields['timeZoneId']}")
    return f"{_function(node.kind)}({', '.join(arguments)})"


def _lambda(node: Node, column: Any) -> str:
    """A function that is an argument. PySpark numbers the variables of all functions in a process; here the number is that of the
    functions inside, this one included, so that it differs from those of the functions around it."""
    text, number = _call(node, column), sum(each.kind == node.kind for each in node.all())
    for variable in node.children[1:]:
        text = text.replace(_variable(variable), re.sub(r"_\d+$", f"_{number}", str(variable.fields["name"])))
    return text


def _variable(node: Node) -> str:
    """A variable of a function, until its function gives it a name."""
    return f"{node.fields['name']}#{identity_of(node)}#"


def _window(node: Node, column: Any) -> str | None:
    """The user's window expression, for a struct of a window's start and end; None for any other struct."""
    if len(node.children) != 4 or [_name(node.children[0]), _name(node.children[2])] != ["start", "end"]:
        return None
    begin, end = node.children[1], node.children[3]
    remainder = next((n for n in begin.all() if n.kind == "Remainder"), None)
    added = next((n for n in end.all() if n.kind == "Add"), None)
    if remainder is None or added is None or remainder.children[0].kind != "Subtract":
        return _session_window(begin, end, column)
    moment, offset = remainder.children[0].children
    slide, length = remainder.children[1], added.children[1]
    if any(n.kind != "Literal" for n in (offset, slide, length)) or moment.kind != "PreciseTimestampConversion":
        return None
    every = "" if slide.fields["value"] == length.fields["value"] else f", every {_duration(slide)}"
    first = "" if offset.fields["value"] == "0" else f", from {_duration(offset)}"
    return f"window({text_of_expression(moment.children[0], column)}, {_duration(length)}{every}{first})"


def _session_window(begin: Node, end: Node, column: Any) -> str | None:
    moment = begin
    while moment.kind == "PreciseTimestampConversion":
        moment = moment.children[0]
    added = next((n for n in end.all() if n.kind == "TimestampAddInterval"), None)
    if moment is begin or added is None:
        return None
    return f"session_window({text_of_expression(moment, column)}, gap {text_of_expression(added.children[1], column)})"


def _duration(literal: Node) -> str:
    """Microseconds as a readable duration."""
    rest = int(literal.fields["value"])
    for unit, size in (("day", 86_400_000_000), ("hour", 3_600_000_000), ("minute", 60_000_000), ("second", 1_000_000)):
        if rest and rest % size == 0:
            return f"{rest // size} {unit}{'' if rest == size else 's'}"
    return f"{rest} µs"


def _name(node: Node) -> Any:
    return node.fields.get("value")


def _function(kind: str) -> str:
    """The function's name for a class's name: `TruncTimestamp` becomes `trunc_timestamp`."""
    return "".join(f"_{c.lower()}" if c.isupper() and i and not kind[i - 1].isupper() else c.lower() for i, c in enumerate(kind))


def _type(kind: Any) -> str:
    """A short text for a data type in JSON, without nullability, which does not matter for state."""
    if isinstance(kind, str):
        return kind
    if not isinstance(kind, dict):
        return "?"
    match kind.get("type"):
        case "struct":
            fields = [f"{field['name']} {_type(field['type'])}" for field in kind["fields"]]
            return f"struct<{', '.join(fields)}>"
        case "array":
            return f"array<{_type(kind['elementType'])}>"
        case "map":
            return f"map<{_type(kind['keyType'])}, {_type(kind['valueType'])}>"
        case other:
            return str(other)


type_text = _type


# Columns


def identity_of(node: Node) -> int:
    """The id of a column, or of an expression with a name; -1 for any other node."""
    return int((node.fields.get("exprId") or {}).get("id", -1))


def _output(plan: Node) -> list[int]:
    """The ids of the columns that a plan's node returns, in order."""
    children = plan.children
    if plan.kind in COMPUTED:
        return [identity_of(each) for each in plan.expressions(COMPUTED[plan.kind])]
    if plan.kind == "Generate" and "requiredChildOutput" in plan.fields:
        return [identity_of(each) for name in ("requiredChildOutput", "generatorOutput") for each in plan.expressions(name)]
    if plan.kind in _ADDED:
        return [*children[0].output, *(identity_of(each) for each in plan.expressions(_ADDED[plan.kind]))]
    for name in OUTPUTS:
        if plan.expressions(name):
            return [identity_of(each) for each in plan.expressions(name)]
    if plan.kind == "Union":
        return list(children[0].output)
    return [identity for child in children for identity in child.output]
