"""IcebergSink with a REST catalog: one request for each commit, conflicts, and answers that are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

from dagster_checkpoints.sinks import IcebergSink, SinkFenced, SinkUnavailable
from tests.sinks.iceberg_lake import NAME
from tests.sinks.rest_catalog import Answer, RestCatalogServer, running_rest_catalog
from tests.sinks.sink_instance import opened, staged


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[tuple[RestCatalogServer, dict[str, str]]]:
    with running_rest_catalog(tmp_path, token="hidden") as (server, url):
        yield server, {"name": "prod", "type": "rest", "uri": url, "token": "hidden"}


def _opened(properties: dict[str, str], epoch: int, **settings: str) -> IcebergSink:
    return opened(IcebergSink(NAME, catalog=properties, **settings), epoch)  # type: ignore[arg-type]


def _rows(properties: dict[str, str]) -> list[int]:
    others = {name: value for name, value in properties.items() if name != "name"}
    return sorted(load_catalog("prod", **others).load_table(NAME).scan().to_arrow()["n"].to_pylist())


def test_rows_and_the_sinks_numbers_are_one_request(rest: tuple[RestCatalogServer, dict[str, str]], tmp_path: Path) -> None:
    server, properties = rest
    sink = _opened(properties, 1)
    sink.commit(staged(sink, tmp_path, 1, 1, 2))
    (*_, body) = server.commits
    assert {update["action"] for update in body["updates"]} == {"set-properties", "add-snapshot", "set-snapshot-ref"}
    assert {each["type"] for each in body["requirements"]} >= {"assert-ref-snapshot-id", "assert-table-uuid"}
    assert _rows(properties) == [1, 2]
    back = _opened(properties, 2)
    back.recover([], restored=0)
    assert _rows(properties) == []
    by_key = _opened(properties, 3, key="n")
    for checkpoint_id, rows in ((2, (5, 6)), (3, (6, 7))):
        by_key.commit(staged(by_key, tmp_path, checkpoint_id, *rows))
    assert _rows(properties) == [5, 6, 7]


@pytest.mark.parametrize(("status", "landed"), [(409, False), (500, False), (500, True), (504, True)])
def test_conflicts_and_lost_answers(
    rest: tuple[RestCatalogServer, dict[str, str]], tmp_path: Path, status: int, landed: bool
) -> None:
    server, properties = rest
    sink = _opened(properties, 1)
    text = staged(sink, tmp_path, 1, 1)

    def fault(commit: Callable[[], Answer]) -> Answer:
        if landed:
            commit()
        return status, {"error": {"message": "lost", "type": "Lost", "code": status}}

    server.fault = fault
    done = sink.commit(text)
    assert (done.rows, done.version is None) == (1, landed)
    assert _rows(properties) == [1]


def test_a_newer_owner_wins_and_wrong_credentials_are_named_but_not_shown(
    rest: tuple[RestCatalogServer, dict[str, str]], tmp_path: Path
) -> None:
    _, properties = rest
    late = _opened(properties, 1)
    text = staged(late, tmp_path, 1, 1)
    _opened(properties, 2).recover([])
    with pytest.raises(SinkFenced, match=r"epoch 1.*epoch 2"):
        late.commit(text.replace("1-since", "9-since"))
    assert _rows(properties) == []
    with pytest.raises(SinkUnavailable, match=r"Forbidden.*credentials") as refused:
        _opened({**properties, "token": "secret"}, 3)
    assert "secret" not in str(refused.value)
