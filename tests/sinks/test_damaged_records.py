"""Records of sinks beside their rows: a damaged name of a field is refused, and the field does not silently have its default."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.sinks.files.columns import FileColumns
from dagster_checkpoints.sinks.files.names import StagedPart, StagedParts, StageMark
from dagster_checkpoints.sinks.iceberg.data_files import FileMetrics
from dagster_checkpoints.sinks.lake.table_log import DataFile, StagedTransaction

RECORDS = [
    StagedParts("csv", (StagedPart(0, "day=2026-01-01", 2, 30),)),
    StageMark("flights", "delays", "h1"),
    FileColumns("1.h1", "csv", ("day",), (("n", "int64"),)),
    StagedTransaction("id", "{}", ("day",), (DataFile("a.parquet", 30, 2, "{}", {"day": "2026-01-01"}),)),
    FileMetrics({"n": 1}, {"n": 1}, {"n": 0}, {"n": "AA=="}, {"n": "AA=="}, (4,)),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_damaged_name_is_refused(record: Any) -> None:
    data = msgspec.json.encode(record)
    own = {field for kind in (type(record), StagedPart, DataFile) for field in kind.__struct_fields__}
    names = [name for name in re.finditer(rb'"([a-z_]+)":', data) if name[1].decode() in own]
    assert len(names) >= len(type(record).__struct_fields__)
    assert msgspec.json.decode(data, type=type(record)) == record
    for name in names:
        damaged = data[: name.start(1)] + bytes([data[name.start(1)] ^ 1]) + data[name.start(1) + 1 :]
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(damaged, type=type(record))
