"""What a checkpoint holds of a stage, corrections of a savepoint, and exports, as far as no Spark is needed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.spark.query.query_log import QueryLog
from dagster_checkpoints.spark.stored_state import CorrectionError, correct_savepoint, export_checkpoint
from dagster_checkpoints.spark.stored_state.stage_state import segments_in_flight
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    InputMetadata,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
    WatermarkAt,
)
from dagster_checkpoints.state.metadata_file import encode
from dagster_checkpoints.storage import CheckpointStorage, open_store
from dagster_checkpoints.storage.locating import opened_at


def segment(name: str) -> Segment:
    return Segment((StateFile(f"segments/{name}.parquet", name, 1),), 1)


def test_rows_in_flight_are_those_of_the_channels_from_all_instances_upstream() -> None:
    tasks = {
        "one": TaskSnapshot(
            channels=(
                ChannelSnapshot("live[0]->sums[0]", 3, in_flight=(segment("a"), WatermarkAt(5), segment("b"))),
                ChannelSnapshot("live[1]->sums[0]", 2, in_flight=(segment("c"),)),
                ChannelSnapshot("other[0]->sums[0]", 1),
            )
        ),
        "two": TaskSnapshot(channels=(ChannelSnapshot("live[0]->sums[1]", 3, in_flight=(segment("d"),)),)),
    }
    found = {
        key: [file.sha256 for each in segments for file in each.files] for key, segments in segments_in_flight(tasks).items()
    }
    assert found == {("live", "one"): ["a", "b", "c"], ("other", "one"): [], ("live", "two"): ["d"]}


POSITIONS = {"live[0]->sums[0]": 7}
KAFKA = {"clicks": {"0": 40, "1": 50}, "orders": {"0": 60}}


@pytest.fixture
def savepoint(tmp_path: Path) -> str:
    """A savepoint of a source that reads Kafka, and of a stage behind it."""
    offsets: dict[str, dict[str, Any]] = {"live": KAFKA, "sums": POSITIONS}
    files = {}
    for name, offset in offsets.items():
        files[name] = tmp_path / name
        files[name].write_text(f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(offset)}')
    files["commits"] = tmp_path / "commits"
    files["commits"].write_text('v1\n{"nextBatchWatermarkMs":0}')
    with CheckpointStorage(open_store(str(tmp_path / "storage")), "shop") as storage:
        directory = storage.savepoint_directory(1, "x")
        stored = directory.upload_files(files)
        chains = tuple(
            ChainMetadata(
                name,
                (name,),
                {
                    0: TaskSnapshot(
                        {name: StageInstanceSnapshot()},
                        QuerySnapshot(
                            0,
                            tuple(
                                StateFile(f"{log}/0", stored[file].sha256, stored[file].size)
                                for log, file in (("commits", "commits"), ("offsets", name))
                            ),
                        ),
                    )
                },
            )
            for name in offsets
        )
        stages = (
            StageMetadata("live", 1, ("0",), inputs=()),
            StageMetadata("sums", 1, ("0",), inputs=(InputMetadata("live"),)),
        )
        metadata = CheckpointMetadata("shop", 1, stages, chains, kind="savepoint")
        directory.write_metadata(encode(metadata), {each.sha256: each.size for each in stored.values()})
        return directory.url


def correct(savepoint: str, target: Path, stage: str, offset: Any) -> str:
    return correct_savepoint(savepoint, str(target), offsets={stage: {"0": {0: offset}}})


def test_an_offset_names_every_partition_that_the_present_one_names(savepoint: str, tmp_path: Path) -> None:
    """Spark takes a partition of Kafka that an offset does not name for a new one, and reads it from its beginning."""
    earlier = {**KAFKA, "clicks": {"0": 4, "1": 50}}
    with opened_at(correct(savepoint, tmp_path / "new", "live", earlier)) as stored:
        [task] = [chain.tasks[0] for chain in stored.read().chains if chain.name == "live"]
        assert task.query is not None
        stored.fetch(task.query.files, tmp_path / "read")
    assert QueryLog(tmp_path / "read").planned(0).sources == (earlier,)

    for offset in (
        {"clicks": {"0": 4}, "orders": {"0": 60}},
        {"clicks": {"0": 4, "1": 50}},
        {**KAFKA, "clicks": {"0": 4, "1": "50"}},
        {**KAFKA, "clicks": {"0": 4, "1": 50, "2": 0}},
    ):
        with pytest.raises(CorrectionError, match=r"an offset like its present one .* with all that it names, found 0: .* too$"):
            correct(savepoint, tmp_path / "refused", "live", offset)
    assert not (tmp_path / "refused").exists()


def test_positions_in_channels_are_no_offsets_of_sources(savepoint: str, tmp_path: Path) -> None:
    """At a later position a stage would leave out the rows that come next, and at an earlier one there are none."""
    with pytest.raises(
        CorrectionError, match=r"'sums', with which .* begins, reads other stages .* Correct the offsets of the so"
    ):
        correct(savepoint, tmp_path / "refused", "sums", {"live[0]->sums[0]": 100})


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_goes_into_a_directory_that_cannot_be_replaced(
    savepoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """A volume that a container mounts."""
    target = tmp_path / "volume" / "checkpoint"
    (target if exists else target.parent).mkdir(parents=True)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as mounted:
        mounted.setattr(Path, "rmdir", busy)
        exported = export_checkpoint(savepoint, target, stage="live")
    assert exported.sources == (("", KAFKA),)
    assert {path.relative_to(target).as_posix() for path in target.rglob("*")} == {
        "commits", "commits/0", "metadata", "offsets", "offsets/0",
    }  # fmt: skip
    assert list(target.parent.iterdir()) == [target]
