"""Columns that have another name now than in rows that a checkpoint holds for a task: these rows would have null in them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dagster_checkpoints.state.errors import InputsChanged
from dagster_checkpoints.state.inputs import check_waiting_columns
from dagster_checkpoints.state.metadata import ChannelSnapshot, Segment, StaticTableSnapshot, TaskSnapshot, WatermarkAt


def struct(**fields: Any) -> dict[str, Any]:
    columns = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    return {"type": "struct", "fields": columns}


def array(element: Any) -> dict[str, Any]:
    return {"type": "array", "elementType": element, "containsNull": True}


def mapping(key: Any, value: Any) -> dict[str, Any]:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


ROWS, MARK = Segment((), 3), WatermarkAt(5)
CHANNEL = "n[0]->hours[1]"


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (struct(a="long", b="long"), struct(a="long", b="long"), None),
        (struct(a="long", b="long"), struct(b="long", a="long"), None),
        (struct(a="long"), struct(a="long", b="long"), None),  # null in rows from before it
        (struct(a="long", b="long"), struct(b="long"), None),
        (struct(a="integer"), struct(a="long"), None),  # Spark reads it, or says that it cannot
        (None, struct(a="long"), None),  # not recorded
        (struct(a="long", b="long"), struct(a="long", c="long"), ("b", "c")),
        (struct(a="long"), struct(b="long", c="long"), ("a", "b, c")),
        (struct(s=struct(x="long")), struct(s=struct(x="long", y="long")), None),
        (struct(s=struct(x="long")), struct(s=struct(y="long")), ("s.x", "s.y")),
        (struct(s=struct(x="long")), struct(t=struct(x="long")), ("s.x", "t.x")),
        (struct(l=array(struct(x="long"))), struct(l=array(struct(y="long"))), ("l.element.x", "l.element.y")),
        (
            struct(m=mapping("string", struct(x="long"))),
            struct(m=mapping("string", struct(y="long"))),
            ("m.value.x", "m.value.y"),
        ),
    ],
)
@pytest.mark.parametrize(
    ("waits", "snapshot"),
    [
        (False, TaskSnapshot()),
        (False, TaskSnapshot(channels=(ChannelSnapshot(CHANNEL, 4, in_flight=(MARK,)),))),
        (True, TaskSnapshot(channels=(ChannelSnapshot(CHANNEL, 4, in_flight=(MARK, ROWS)),))),
        (False, TaskSnapshot(static=(StaticTableSnapshot("names"),))),
        (True, TaskSnapshot(static=(StaticTableSnapshot("names", (ROWS,)),))),
    ],
    ids=["nothing", "a mark in flight", "rows in flight", "an empty table", "a table"],
)
def test_a_column_with_another_name_is_refused_if_rows_with_the_old_one_wait(
    waits: bool, snapshot: TaskSnapshot, before: Any, now: Any, found: tuple[str, str] | None
) -> None:
    reads = {CHANNEL: "names", "live[0]->hours[1]": "live"}
    known = {"names": json.dumps(before) if before else "", "live": json.dumps(struct(k="long"))}
    present = {"names": json.dumps(now), "live": json.dumps(struct(other="long"))}
    if waits and found is not None:
        text = f"They have the columns {found[0]}; 'names' has {found[1]} instead now"
        with pytest.raises(InputsChanged, match=f"'hours' has rows of 'names' in checkpoint 3 .*{re.escape(text)}"):
            check_waiting_columns(snapshot, reads, known, present, "hours", "checkpoint 3")
    else:
        check_waiting_columns(snapshot, reads, known, present, "hours", "checkpoint 3")
