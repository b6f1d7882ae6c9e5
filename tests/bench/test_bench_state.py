"""The measures of metadata and redistribution compare what they made; their numbers are not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import state
from bench.setting import BenchFailed, Setting
from dagster_checkpoints.state import CheckpointMetadata, decode, encode


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Setting:
    monkeypatch.setattr(state, "SIZES", ((2, 2), (2, 3)))
    monkeypatch.setattr(state, "GROUPS", 1000)
    monkeypatch.setattr(state, "ITEMS", 1000)
    return Setting(1, 1, tmp_path, tmp_path)


def test_metadata_and_redistribution_are_measured(small: Setting) -> None:
    assert len(list(state.measure_metadata(small))) == 2 * 3 + 2
    assert len(list(state.measure_redistribution(small))) == 2 * 2


def test_metadata_that_reads_back_as_something_else_fails_the_bench(small: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "decode", lambda data, where: CheckpointMetadata("another", 1))
    with pytest.raises(BenchFailed, match="not what was written"):
        list(state.measure_metadata(small))


@pytest.mark.parametrize("function", ["redistribute_key_groups", "redistribute_lists"])
def test_lost_state_fails_the_bench(small: Setting, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    real = getattr(state, function)
    monkeypatch.setattr(state, function, lambda *arguments: real(*arguments)[1:])
    with pytest.raises(BenchFailed, match="lost"):
        list(state.measure_redistribution(small))


def test_the_made_up_checkpoint_is_one_that_can_be_read() -> None:
    metadata = state.checkpoint(2, 3)
    assert len(metadata.files()) == 2 * 3 * 2
    assert decode(encode(metadata), "x") == metadata
