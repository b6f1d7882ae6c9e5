"""Which column of a data file holds which column of an Iceberg table: by field id, by name mapping, by partition value.

JSON and plain values in and out; must not know Spark. The metadata of a table does not say which columns a data file has, nor
whether it has field ids: that is read from the files' footers, through the table's own file system.

Source: Iceberg's specification, "Column Projection" and "Name Mapping Serialization"
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from dagster_checkpoints.sources.iceberg.schemas import field_of, spark_type
from dagster_checkpoints.spark.identifiers import identifier

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.io import FileIO


_EPOCH = dt.datetime(1970, 1, 1)
_NOT_EXACT = frozenset({"binary", "double"})
"""Types of columns whose values in a partition are not used: they have no text, or the library rounds them when it reads them."""


@dataclass(frozen=True, slots=True)
class FileField:
    """A column in a data file.

    Args:
        name: its name in the file.
        id: its field id; None if the file has none.
        kind: what it consists of.
        children: the fields of a struct; the element of a list; key and value of a map.
    """

    name: str
    id: int | None = None
    kind: Literal["value", "struct", "list", "map"] = "value"
    children: tuple[FileField, ...] = ()


class AmbiguousColumns(Exception):
    """Two columns of a data file are one column of the table."""


def has_ids(fields: Iterable[FileField]) -> bool:
    """Whether any column of a file has a field id: then the name mapping does not count."""
    return any(field.id is not None or has_ids(field.children) for field in fields)


def with_ids(fields: Sequence[FileField], mapping: Sequence[Mapping[str, Any]]) -> tuple[FileField, ...]:
    """The columns of a file without field ids, with those that a name mapping gives them.

    Args:
        fields: the columns.
        mapping: the name mapping as JSON.
    """
    return tuple(_with_id(field, field.name, mapping) for field in fields)


def _with_id(field: FileField, name: str, mapping: Sequence[Mapping[str, Any]]) -> FileField:
    found: Mapping[str, Any] = next((each for each in mapping if name in each["names"]), {})
    names = {"list": ("element",), "map": ("key", "value")}.get(field.kind) or [child.name for child in field.children]
    below = found.get("fields") or ()
    children = tuple(_with_id(child, each, below) for child, each in zip(field.children, names, strict=True))
    return replace(field, id=found.get("field-id"), children=children)


def read_columns(columns: Sequence[Mapping[str, Any]], fields: Sequence[FileField]) -> str:
    """The columns to read from a file by their names in it, as the JSON of Spark's types.

    Args:
        columns: the table's columns that are wanted, in Iceberg's JSON, in their order.
        fields: the file's columns, with field ids.

    Raises:
        AmbiguousColumns: two columns of the file have the id of one column; the text names them.
    """
    return json.dumps(_struct(columns, fields))


def _struct(columns: Sequence[Mapping[str, Any]], fields: Sequence[FileField]) -> dict[str, Any]:
    found: dict[int, FileField] = {}
    for field in fields:
        if field.id is not None and found.setdefault(field.id, field) is not field:
            raise AmbiguousColumns(f"{found[field.id].name} and {field.name}")
    taken = {field.name.lower() for field in fields}
    made = []
    for column in columns:
        there = found.get(column["id"])
        name = there.name if there else column["name"]
        if there is None and name.lower() in taken:  # another column of the file has this name
            name = f"{name}#{column['id']}"
        made.append(field_of(name, _type(column["type"], there)))
    return {"type": "struct", "fields": made}


def _type(kind: Any, there: FileField | None) -> Any:
    if isinstance(kind, str):
        return spark_type(kind)
    children: Sequence[FileField] = there.children if there is not None and there.kind == kind["type"] else ()
    match kind["type"]:
        case "struct":
            return _struct(kind["fields"], children)
        case "list":
            element = _type(kind["element"], children[0] if children else None)
            return {"type": "array", "elementType": element, "containsNull": True}
    key, value = (_type(kind[part], children[at] if children else None) for at, part in enumerate(("key", "value")))
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How rows are put together: columns from the files, then constants of each file.

    Args:
        columns: all columns of the table, in Iceberg's JSON.
        specs: for each partition spec, by its id: the place in the partition of each column that is there as it is, by column id.
        not_exact: the ids of columns of which files that do not hold them have no exact value.
    """

    columns: tuple[Mapping[str, Any], ...]
    specs: Mapping[int, Mapping[int, int]]
    not_exact: frozenset[int] = frozenset()

    @classmethod
    def of(cls, schema: Mapping[str, Any], specs: Iterable[Mapping[str, Any]]) -> RowLayout:
        """The layout of a table.

        Args:
            schema: the columns, as Iceberg's JSON.
            specs: all partition specs that the table has had, as Iceberg's JSON.
        """
        kinds = {each["id"]: each["type"] for each in schema["fields"] if isinstance(each["type"], str)}
        places = {
            spec["spec-id"]: {
                field["source-id"]: at
                for at, field in enumerate(spec["fields"])
                if field["transform"] == "identity" and field["source-id"] in kinds
            }
            for spec in specs
        }
        not_exact = {number for spec in places.values() for number in spec if kinds[number] in _NOT_EXACT}
        exact = {spec: {number: at for number, at in found.items() if number not in not_exact} for spec, found in places.items()}
        return cls(tuple(schema["fields"]), exact, frozenset(not_exact))

    def without_value(self, fields: Iterable[FileField]) -> list[str]:
        """The columns of which a file has no exact value, neither in itself nor in its partition.

        Args:
            fields: the file's columns, with field ids.
        """
        there = {field.id for field in fields}
        return [each["name"] for each in self.columns if each["id"] in self.not_exact and each["id"] not in there]

    @property
    def in_partitions(self) -> list[Mapping[str, Any]]:
        """The columns whose values some files have in their partition."""
        return [each for each in self.columns if any(each["id"] in places for places in self.specs.values())]

    @property
    def in_files(self) -> list[Mapping[str, Any]]:
        """The columns that are read from files: the specification says that a partition's value comes first."""
        return [each for each in self.columns if not self._always(each)]

    def _always(self, column: Mapping[str, Any]) -> bool:
        return all(column["id"] in places for places in self.specs.values())

    @property
    def constants(self) -> list[tuple[str, Any]]:
        """Name and Spark's type of the constants of each file: a column's value, and whether the partition has it."""
        found: list[tuple[str, Any]] = []
        for column in self.in_partitions:
            always, kind = self._always(column), spark_type(column["type"])
            found += [(column["name"], kind)] if always else [(_value(column), kind), (_known(column), "boolean")]
        return found

    def values(self, spec: int, partition: Sequence[Any]) -> tuple[str | None, ...]:
        """The constants of a file as text.

        Args:
            spec: the id of its partition spec.
            partition: its partition, as the manifest has it.

        Raises:
            OverflowError: a time that has no text.
        """
        places = self.specs[spec]
        found: list[str | None] = []
        for column in self.in_partitions:
            place = places.get(column["id"])
            found.append(None if place is None else value_text(column["type"], partition[place]))
            if not self._always(column):
                found.append("false" if place is None else "true")
        return tuple(found)

    @property
    def expressions(self) -> list[str] | None:
        """The table's columns, in their order, as SQL over the columns of files and the constants; None if they are the same."""
        if not self.in_partitions:
            return None
        partly = {each["name"] for each in self.in_partitions if not self._always(each)}
        return [
            f"CASE WHEN {identifier(_known(each))} THEN {identifier(_value(each))} ELSE {identifier(each['name'])} END "
            f"AS {identifier(each['name'])}"
            if each["name"] in partly
            else identifier(each["name"])
            for each in self.columns
        ]


def _value(column: Mapping[str, Any]) -> str:
    return f"{column['name']}#value of the partition"


def _known(column: Mapping[str, Any]) -> str:
    return f"{column['name']}#in the partition"


def value_text(kind: str, value: Any) -> str | None:
    """A partition's value as text that Spark casts to the type of its column.

    Raises:
        OverflowError: a time before the year 1 or after the year 9999.
    """
    if value is None:
        return None
    match kind:
        case "date" if isinstance(value, int):
            return (_EPOCH + dt.timedelta(days=value)).date().isoformat()
        case "timestamp" | "timestamptz" if isinstance(value, int):
            return (_EPOCH + dt.timedelta(microseconds=value)).isoformat(sep=" ")
        case "boolean":
            return str(value).lower()
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def changed_columns(columns: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns of a newer schema that an older one does not have, or has with another type; by field id, so not by name.

    Args:
        columns: the older columns, in Iceberg's JSON.
        others: the newer ones.
    """
    known = dict((number, kind) for _, number, kind in _leaves({"fields": list(columns)}, ""))
    return [path for path, number, kind in _leaves({"fields": list(others)}, "") if known.get(number) != kind]


def _leaves(kind: Any, path: str) -> Iterator[tuple[str, int, str]]:
    """The fields in a type, also nested ones: path, id and type."""
    if isinstance(kind, str):
        return
    for field in kind.get("fields", ()):
        inner = field["type"]
        yield f"{path}{field['name']}", field["id"], inner if isinstance(inner, str) else inner["type"]
        yield from _leaves(inner, f"{path}{field['name']}.")
    for part in ("element", "key", "value"):
        if part in kind:
            inner = kind[part]
            yield f"{path}{part}", kind[f"{part}-id"], inner if isinstance(inner, str) else inner["type"]
            yield from _leaves(inner, f"{path}{part}.")


def with_defaults(columns: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns, also nested ones, that have a value in files that were written before them."""
    found: list[str] = []

    def look(kind: Any, path: str) -> None:
        if isinstance(kind, str):
            return
        for field in kind.get("fields", ()):
            if field.get("initial-default") is not None:
                found.append(f"{path}{field['name']}")
            look(field["type"], f"{path}{field['name']}.")
        for part in ("element", "key", "value"):
            if part in kind:
                look(kind[part], f"{path}{part}.")

    look({"fields": list(columns)}, "")
    return found


_PARALLEL_REQUESTS = 16
_ID = b"PARQUET:field_id"


def columns_of_files(io: FileIO, paths: Sequence[str]) -> list[tuple[FileField, ...]]:
    """The columns of Parquet files.

    Args:
        io: the table's file system.
        paths: the files, as Hadoop writes them (`file:/data/…`, `s3a://bucket/…`).

    Raises:
        FileNotFoundError: a file is gone.
        Exception: what the library raises if the place does not answer.
    """
    if len(paths) == 1:
        return [_columns(io, paths[0])]
    with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="footers") as threads:
        return list(threads.map(lambda path: _columns(io, path), paths))


def _columns(io: FileIO, path: str) -> tuple[FileField, ...]:
    import pyarrow.parquet as pq

    if path.startswith("file:"):  # not through the library, which takes some characters for parts of a URL
        return tuple(_field(each) for each in pq.read_schema(path.removeprefix("file:")))
    with io.new_input(path.replace("s3a://", "s3://", 1)).open() as file:
        return tuple(_field(each) for each in pq.read_schema(file))


def _field(field: pa.Field) -> FileField:
    import pyarrow as pa

    text = (field.metadata or {}).get(_ID)
    number, kind = None if text is None else int(text), field.type
    if pa.types.is_struct(kind):
        return FileField(field.name, number, "struct", tuple(_field(kind.field(at)) for at in range(kind.num_fields)))
    if pa.types.is_map(kind):
        return FileField(field.name, number, "map", (_field(kind.key_field), _field(kind.item_field)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return FileField(field.name, number, "list", (_field(kind.value_field),))
    return FileField(field.name, number)
