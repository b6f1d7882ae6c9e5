"""Tables and transactions that an earlier release has written, at the moment of a crash, are restored to exactly their rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dagster_checkpoints.sinks import SinkPathInUse, UnreadableSinkTransaction
from tests.sinks.recorded_tables import FORMER, FORMER_TEXTS, INSTANCES, KINDS, model_job, record, unpack


@pytest.mark.parametrize("newest", [True, False], ids=["checkpoint", "savepoint"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_table_is_restored_and_written_on(tmp_path: Path, kind: str, newest: bool) -> None:
    savepoint, checkpoint = unpack(kind, tmp_path)
    restored = checkpoint if newest else savepoint
    suite = KINDS[kind]()
    before = suite.read(tmp_path / "target")
    assert sorted(before) == sorted(savepoint.visible), "the last checkpoint was not committed"
    job = model_job(kind, tmp_path)
    job.start(restored, epoch=2)
    assert sorted(suite.read(tmp_path / "target")) == sorted(restored.visible)
    for index in range(INSTANCES):
        job.write(1, index)
    assert sorted(suite.read(tmp_path / "target")) == sorted(restored.visible)
    last = job.checkpoint(4)
    job.close()
    assert sorted(suite.read(tmp_path / "target")) == sorted(last.visible)


@pytest.mark.parametrize("kind", FORMER)
def test_a_recorded_table_of_a_former_format_is_refused_by_name_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    for checkpoint in (None, *unpack(kind, tmp_path)):
        before = FORMER[kind]().read(tmp_path / "target")
        with pytest.raises(SinkPathInUse, match="no record of an earlier release"):
            model_job(kind, tmp_path).start(checkpoint, epoch=2)
        assert FORMER[kind]().read(tmp_path / "target") == before


@pytest.mark.parametrize("kind", FORMER_TEXTS)
def test_transactions_of_a_former_format_are_refused_by_name_and_the_table_takes_a_new_job(tmp_path: Path, kind: str) -> None:
    read = FORMER_TEXTS[kind]().read
    checkpoints = unpack(kind, tmp_path)
    before = sorted(read(tmp_path / "target"))
    for checkpoint in checkpoints:
        with pytest.raises(UnreadableSinkTransaction, match="an earlier release"):
            model_job(kind, tmp_path).start(checkpoint, epoch=2)
        assert sorted(read(tmp_path / "target")) == before
    with pytest.raises(SinkPathInUse, match="counts its jobs from 1"):
        model_job(kind, tmp_path).sink.check_new_start(model_job(kind, tmp_path).context(0, epoch=2))
    job = model_job(kind, tmp_path)
    job.start(epoch=2, job_id=2)
    job.write(9)
    new = job.checkpoint(1).visible
    job.close()
    after = set(read(tmp_path / "target"))
    assert after == {*before, *new}


@pytest.mark.parametrize("kind", KINDS)
def test_todays_tables_are_as_the_recorded_ones(tmp_path: Path, kind: str) -> None:
    """The fields of transactions and their types: a format that has changed needs a recorded table of its own."""
    for folder in ("recorded", "today"):
        (tmp_path / folder).mkdir()
    recorded, today = unpack(kind, tmp_path / "recorded"), record(kind, tmp_path / "today")
    assert [shape(c.transactions) for c in today] == [shape(c.transactions) for c in recorded]


def shape(transactions: tuple[tuple[str, ...], ...]) -> list[list[object]]:
    return [[fields(msgspec.json.decode(text)) for text in of_instance] for of_instance in transactions]


def fields(value: object) -> object:
    if isinstance(value, dict):
        return {name: fields(each) for name, each in sorted(value.items())}
    return [fields(each) for each in value] if isinstance(value, list) else type(value).__name__
