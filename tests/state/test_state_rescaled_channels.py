"""What channels begin with after a restore with other instances: rows in flight, and event time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.state.fitted_checkpoint import FittedCheckpoint
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.key_groups import key_groups_of, owner_of
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelElement,
    ChannelEnd,
    ChannelSnapshot,
    CheckpointMetadata,
    EndOfData,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
    WatermarkAt,
    WatermarkStatus,
)
from dagster_checkpoints.state.rescaled_channels import (
    MergedEventTime,
    OldChannel,
    SegmentShare,
    least_watermark,
    one_after_the_other,
)
from dagster_checkpoints.state.rescaled_checkpoint import with_instances

SINK: Any = object()
GROUPS = 128


def pipeline(feeds: str, readers: int, key: str | None) -> Pipeline:
    @unbounded_source(watermark=("ts", "1 minute"), instances=list(feeds), sink=SINK)
    def live(context: Any) -> None: ...

    how = StageInput(key=key) if key else StageInput(edge="all_to_all")

    @stage(inputs={"live": how}, instances=[str(index) for index in range(readers)], sink=SINK)
    def counted(live: Any) -> None: ...

    return Pipeline("p", [live, counted])


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Pipeline, Pipeline, CheckpointMetadata]:
    """A checkpoint with elements in flight, its pipeline, and one with other instances."""
    key = draw(st.sampled_from(["k", None]))
    feeds = draw(st.sampled_from(["a", "ab", "abc"]))
    readers, others = draw(st.permutations(range(1, 6)))[:2]
    before = pipeline(feeds, readers, key if readers > 1 else "k")
    now = pipeline("".join(draw(st.permutations(feeds + draw(st.sampled_from(["", "x"]))))), others, key)
    inputs, number = recorded_inputs(before), itertools.count()
    live, counted = before.stages
    stages = (
        StageMetadata("live", live.parallelism, live.instances, inputs=inputs["live"]),
        StageMetadata("counted", counted.parallelism, counted.instances, inputs=inputs["counted"], max_parallelism=GROUPS),
    )
    ahead = draw(st.integers(0, 90))  # the sources are as far as their last watermark in flight, or further
    tasks = {}
    for reader in range(readers):
        channels = []
        for sender in range(live.parallelism):
            reached = draw(st.none() | st.integers(0, 50))
            elements: list[ChannelElement] = []
            time = reached if reached is not None else 0
            for what in draw(st.lists(st.sampled_from(["rows", "watermark", "idle"]), max_size=4)):
                time += 10 * (what == "watermark")
                row = Segment((StateFile(f"{next(number)}", "", 0),), 3)
                elements.append({"rows": row, "watermark": WatermarkAt(time), "idle": WatermarkStatus(idle=False)}[what])
            channels.append(ChannelSnapshot(f"live[{sender}]->counted[{reader}]", 4, reached, in_flight=tuple(elements)))
        tasks[reader] = TaskSnapshot({"counted": StageInstanceSnapshot(state_plan=())}, channels=tuple(channels))
    sources = {i: TaskSnapshot({"live": StageInstanceSnapshot()}, watermark=90 + ahead) for i in range(live.parallelism)}
    chains = (ChainMetadata("live", ("live",), sources), ChainMetadata("counted", ("counted",), tasks))
    return before, now, CheckpointMetadata("p", 3, stages, chains)


def rows_of(channel: ChannelSnapshot) -> Iterator[tuple[Segment, int | None]]:
    """The segments in flight on a channel, each with the watermark in front of it."""
    watermark = channel.watermark
    for element in channel.in_flight:
        if isinstance(element, WatermarkAt):
            watermark = element.ms
        elif isinstance(element, Segment):
            yield element, watermark


@given(checkpoints())
def test_each_row_in_flight_reaches_the_one_owner_of_its_key_group_in_time(
    drawn: tuple[Pipeline, Pipeline, CheckpointMetadata],
) -> None:
    before, now, metadata = drawn
    rescaled = with_instances(FittedCheckpoint(now, metadata)).metadata
    readers, others = before.stages[1].parallelism, now.stages[1].parallelism
    by_key = now.stages[1].inputs["live"].key is not None
    got: dict[tuple[str, int], list[int]] = {}
    order: dict[int, list[str]] = {}
    for index, task in next(c.tasks for c in rescaled.chains if c.name == "counted").items():
        assert [c.in_flight for c in task.channels if c.ended != "none"] == []
        for channel in task.channels:
            times = [element.ms for element in channel.in_flight if isinstance(element, WatermarkAt)]
            assert times == sorted(times) and not {channel.watermark} & set(times)
            for segment, watermark in rows_of(channel):
                order.setdefault(index, []).append(segment.files[0].path)
                groups = segment.groups if isinstance(segment, SegmentShare) else range(GROUPS)
                for group in groups:
                    got.setdefault((segment.files[0].path, group), []).append(index)
                then = next(w for s, w in known(metadata) if s.files == segment.files)
                assert watermark is None or (then is not None and watermark <= then), "a row becomes late"
    for index, task in metadata.chains[1].tasks.items():
        held = key_groups_of(index, readers, GROUPS) if by_key else range(GROUPS)
        for channel in task.channels:
            paths = [segment.files[0].path for segment, _ in rows_of(channel)]
            for path, group in itertools.product(paths, held):
                found = got[path, group]
                assert len(found) == 1 and (not by_key or found == [owner_of(group, others, GROUPS)])
            for seen in order.values():
                assert [path for path in seen if path in paths] == [path for path in paths if path in seen], "their order is kept"


def known(metadata: CheckpointMetadata) -> list[tuple[Segment, int | None]]:
    return [each for task in metadata.chains[1].tasks.values() for channel in task.channels for each in rows_of(channel)]


@pytest.mark.parametrize(
    ("channels", "idle", "behind"),
    [
        (["idle", "idle"], True, False),
        (["idle", "behind"], False, True),
        (["behind", "behind"], False, True),
        (["behind", "active"], False, False),
        (["idle", "active"], False, False),
    ],
)
def test_several_channels_are_left_out_of_the_minimum_if_each_of_them_was(channels: list[str], idle: bool, behind: bool) -> None:
    saved = [ChannelSnapshot("c", 0, 5, each == "idle", behind=each == "behind") for each in channels]
    merged = MergedEventTime.of([OldChannel(0, reader, each) for reader, each in enumerate(saved)])
    assert (merged.idle, merged.behind) == (idle, behind)


ROWS, LATER = Segment((), 1), Segment((), 2)


@pytest.mark.parametrize(
    ("channels", "watermark", "limit", "expected"),
    [
        ([(5, [ROWS, WatermarkAt(20)])], 5, 100, [ROWS, WatermarkAt(20)]),
        ([(5, [WatermarkAt(20), ROWS]), (7, [WatermarkAt(30), LATER])], 5, 100, [WatermarkAt(7), ROWS, WatermarkAt(20), LATER]),
        ([(5, [WatermarkAt(20), ROWS])], 5, 12, [WatermarkAt(12), ROWS]),
        ([(None, [ROWS]), (7, [WatermarkAt(30)])], None, 100, [ROWS]),
        (
            [(5, [ROWS, EndOfData(drain=True)]), (7, [LATER, WatermarkAt(30)])],
            5,
            100,
            [ROWS, WatermarkAt(7), LATER, WatermarkAt(30)],
        ),
        ([(5, [WatermarkStatus(idle=True), ROWS])], 5, None, [ROWS]),
    ],
)
def test_several_channels_one_after_the_other(
    channels: list[tuple[float | None, list[ChannelElement]]],
    watermark: float | None,
    limit: float | None,
    expected: list[ChannelElement],
) -> None:
    assert list(one_after_the_other(channels, watermark, limit)) == expected


def with_a_table(readers: int) -> Pipeline:
    @unbounded_source(sink=SINK)
    def live(context: Any) -> None: ...

    @bounded_source
    def names(context: Any) -> None: ...

    how = {"live": StageInput(key="k"), "names": StageInput(mode="static")}

    @stage(inputs=how, instances=[str(index) for index in range(readers)], sink=SINK)
    def counted(live: Any, names: Any) -> None: ...

    return Pipeline("p", [live, names, counted])


def table_channels(saved: list[ChannelSnapshot], readers: int) -> list[ChannelSnapshot | None]:
    """What each of a number of new instances begins with on the channel of its static input; `saved`: by old instance."""
    before = with_a_table(len(saved))
    stages = tuple(
        StageMetadata(each.name, each.parallelism, each.instances, inputs=recorded_inputs(before)[each.name])
        for each in before.stages
    )
    none = StageInstanceSnapshot(state_plan=())
    chains = tuple(ChainMetadata(name, (name,), {0: TaskSnapshot({name: none})}) for name in ("live", "names"))
    tasks = {i: TaskSnapshot({"counted": none}, channels=(channel,)) for i, channel in enumerate(saved)}
    metadata = CheckpointMetadata("p", 3, stages, (*chains, ChainMetadata("counted", ("counted",), tasks)))
    rescaled = with_instances(FittedCheckpoint(with_a_table(readers), metadata)).metadata.chains[2].tasks
    return [next((c for c in rescaled[i].channels if c.channel.startswith("names")), None) for i in range(readers)]


def test_each_new_instance_gets_the_rows_in_flight_of_a_static_input_once_and_their_end_behind_them() -> None:
    parts = [Segment((StateFile(f"{index}", "", 0),), 3) for index in range(2)]
    saved = [
        ChannelSnapshot(f"names[0]->counted[{i}]", 7, ended=("drain", "none")[i], in_flight=(part, EndOfData(drain=True)))
        for i, part in enumerate(parts)
    ]
    for channel in table_channels(saved, 3):
        assert channel is not None and (channel.ended, channel.in_flight) == ("none", (parts[0],))


@pytest.mark.parametrize(("ended", "known"), [(("drain", "none"), "drain"), (("none", "drain"), None), (("none", "none"), None)])
def test_a_static_input_without_rows_in_flight_has_ended_where_the_instance_that_is_copied_knew_it(
    ended: tuple[ChannelEnd, ChannelEnd], known: str | None
) -> None:
    saved = [ChannelSnapshot(f"names[0]->counted[{i}]", 0, ended=end) for i, end in enumerate(ended)]
    assert [channel and channel.ended for channel in table_channels(saved, 3)] == [known] * 3


def test_a_rescaled_job_begins_with_the_earliest_watermark() -> None:
    assert least_watermark([30, 10, 20]) == 10
    assert least_watermark([5, 0]) == 0
    assert least_watermark([30, None, 20]) is None, "one had none: any row may still come"
    assert least_watermark([None]) is None
    assert least_watermark([]) is None
    assert least_watermark(ms for ms in (4, 3)) == 3
