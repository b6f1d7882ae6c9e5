"""The measures of metadata and redistribution check their results; their numbers are not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import state
from bench.environment import BenchFailed, Environment
from dagster_checkpoints.state.metadata import CheckpointMetadata
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.rescaled_instances import redistribute_lists


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Environment:
    monkeypatch.setattr(state, "SIZES", ((2, 2), (2, 3)))
    monkeypatch.setattr(state, "ITEMS", 1000)
    return Environment(1, 1, tmp_path, tmp_path)


def test_metadata_and_redistribution_are_measured(small: Environment) -> None:
    assert len(list(state.measure_metadata(small))) == 2 * 3 + 2
    assert len(list(state.measure_redistribution(small))) == 2


def test_metadata_that_changes_when_read_back_fails_the_bench(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "decode", lambda data, where: CheckpointMetadata("another", 1))
    with pytest.raises(BenchFailed, match="differs from the metadata that was written"):
        list(state.measure_metadata(small))


def test_lost_state_fails_the_bench(small: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "redistribute_lists", lambda *arguments: redistribute_lists(*arguments)[1:])
    with pytest.raises(BenchFailed, match="lost"):
        list(state.measure_redistribution(small))


def test_the_made_up_checkpoint_is_one_that_can_be_read() -> None:
    metadata = state.checkpoint(2, 3)
    assert len(metadata.files()) == 2 * 3 * 2
    assert decode(encode(metadata), "x") == metadata
