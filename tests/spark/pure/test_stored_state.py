"""What a checkpoint holds of a stage, as far as no Spark is needed to say it."""

from __future__ import annotations

from dagster_checkpoints.spark.stored_state.stage_state import segments_in_flight
from dagster_checkpoints.state import ChannelSnapshot, Segment, StateFile, TaskSnapshot, WatermarkAt


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
