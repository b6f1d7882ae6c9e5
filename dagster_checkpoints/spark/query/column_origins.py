"""The columns of a plan traced to their origin: through projections, up to the columns of an input or of a fused source.

The text is stored in checkpoints, as that of `plan_text`. Must not know stages, checkpoints, or a Spark session.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dagster_checkpoints.spark.query.plan_text import (
    COMPUTED,
    OUTPUTS,
    UDFS,
    Node,
    conjuncts,
    expressions_of,
    identity_of,
    text_of_expression,
)

LONGEST = 600  # maximum characters of a traced column; columns computed from each other many times would grow without end
_ID = re.compile(r"#\d+L?")
"""The id of a column, which differs from plan to plan, in Spark's name for the result of an aggregation: `sum(v#17L)`."""
BOUNDARY = "__dagster_checkpoints_source_"
"""How the alias begins that encloses a fused source: columns are traced to it, and no further, since nothing reads the source any
more after it has ended."""
_BOUNDARY_OF_COLUMN = re.compile(rf"(`?){BOUNDARY}[^.`]*\1\.")


def as_sql(expression: Any) -> str:
    """An expression of Spark's, a JVM object, as SQL that a stage may contain: without the aliases of fused sources."""
    return _BOUNDARY_OF_COLUMN.sub("", str(expression.sql()))


def traced(expression: Node, below: Sequence[Node], sides: Sequence[str] = ()) -> str:
    """An expression as text, with each column replaced by the expression that computes it, through projections.

    Args:
        below: The children of the plan's node that holds the expression.
        sides: For each child, the prefix of the columns that come from it.
    """
    return text_of_expression(expression, lambda column: _origin_in(column, below, sides))


def column_origins(plan: Node) -> list[str]:
    """The columns that a plan returns, traced to their origin."""
    return [_origin(identity, "?", plan) for identity in plan.output]


def is_opaque(plan: Node) -> bool:
    """Whether a plan's node is the filter through which Spark's optimizer cannot look: below it is an input, or a fused source.

    It is `spark_partition_id() >= 0`: true for each row, and nondeterministic.
    """
    return plan.kind == "Filter" and any(
        part.kind == "GreaterThanOrEqual" and part.children[0].kind == "SparkPartitionID" and part.children[1].kind == "Literal"
        for condition in plan.expressions("condition")
        for part in conjuncts(condition)
    )


def fused_parts(plan: Node) -> Iterator[tuple[str, Node]]:
    """The fused sources in an analyzed plan: the name of each, and the part of the plan that it is."""
    for node in plan.all():
        alias = _alias(node)
        if alias.startswith(BOUNDARY):
            yield alias.removeprefix(BOUNDARY), node


def _alias(plan: Node) -> str:
    """The name that a plan's node gives to its columns; "" for any other node."""
    identifier = plan.fields.get("identifier") if plan.kind == "SubqueryAlias" else None
    return str(identifier.get("name")) if isinstance(identifier, Mapping) else ""


def _origin_in(column: Node, plans: Sequence[Node], sides: Sequence[str]) -> str:
    name, identity = str(column.fields["name"]), identity_of(column)
    for number, plan in enumerate(plans):
        if identity in plan.returned:
            return f"{sides[number] if sides else ''}{_origin(identity, name, plan)}"
    return _ID.sub("", name)


def _origin(identity: int, name: str, plan: Node) -> str:
    text = _origin_of(identity, name, plan)
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]}… ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _origin_of(identity: int, name: str, plan: Node) -> str:
    """The expression that computes a column of a plan's output."""
    while True:
        if plan.kind == "Union":
            return _origin_in_union(identity, name, plan)
        if _alias(plan).startswith(BOUNDARY) or is_opaque(plan):
            return next(
                (str(n.fields["name"]) for below in plan.all() for n in _named(below) if identity_of(n) == identity), name
            )
        if plan.kind == "Expand":
            place = plan.output.index(identity)
            rows = [expressions_of(row) for row in plan.fields.get("projections") or ()]
            return _either([traced(row[place], plan.children) for row in rows if place < len(row)]) or name
        if plan.kind == "Generate":
            given = next((str(n.fields["name"]) for n in plan.expressions("generatorOutput") if identity_of(n) == identity), None)
            if given is not None:
                return f"{given} of {traced(plan.expressions('generator')[0], plan.children)}"
        if plan.kind in UDFS and (called := _called(identity, plan)) is not None:
            return traced(called, plan.children)
        if plan.kind in COMPUTED:
            computed = (each for of in (COMPUTED[plan.kind], "groupingExpressions") for each in plan.expressions(of))
            same = [each for each in computed if identity_of(each) == identity]
            column = next((each for each in same if each.kind == "Alias"), None)
            if column is not None and column.kind == "Alias":
                # The text of the aggregation itself contains the expressions that it computes.
                aggregated = plan.kind == "Aggregate" and any(n.kind == "AggregateExpression" for n in column.all())
                return str(column.fields["name"]) if aggregated else traced(column, plan.children)
        below = next((child for child in plan.children if identity in child.returned), None)
        if below is None:
            return next((str(n.fields["name"]) for n in _own_columns(plan) if identity_of(n) == identity), name)
        plan = below


def _called(identity: int, plan: Node) -> Node | None:
    """The user-defined function whose result is a column of a plan's node that calls functions."""
    results = [identity_of(each) for each in plan.expressions("resultAttrs")]
    return plan.expressions("udfs")[results.index(identity)] if identity in results else None


def _origin_in_union(identity: int, name: str, plan: Node) -> str:
    """The column has the same position in each child."""
    place = plan.output.index(identity)
    return _either([_origin(child.output[place], name, child) for child in plan.children if place < len(child.output)])


def _own_columns(plan: Node) -> list[Node]:
    return [each for name in (*OUTPUTS, "generatorOutput") for each in plan.expressions(name) if "name" in each.fields]


def _named(plan: Node) -> list[Node]:
    """The columns that a node returns with a name."""
    computed = [each for of in ("projectList", "aggregateExpressions") for each in plan.expressions(of)]
    return [*_own_columns(plan), *(each for each in computed if "name" in each.fields)]


def _either(texts: Sequence[str]) -> str:
    different = list(dict.fromkeys(texts))
    return different[0] if len(different) == 1 else f"{{{' | '.join(different)}}}" if different else ""
