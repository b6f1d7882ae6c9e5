"""The channels between tasks: which there are, in which order, and their names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.pipeline import (
    Chain,
    ChannelId,
    Pipeline,
    Stage,
    StageContext,
    StageInput,
    StageKind,
    TaskId,
    build_chains,
    channel_groups,
)

STATIC, ALL, BY_KEY = StageInput(mode="static"), StageInput(edge="all_to_all"), StageInput(key="origin")
POINTWISE = StageInput()

Row = tuple[str, list[str], bool, str | None]
"""A group: its producer, its channels with their consumers, whether it is static, its key."""


class Plain(Stage):
    def transform(self, context: StageContext, **inputs: Any) -> Any:
        return None


class Sink:
    supported_output_modes = frozenset({"append"})


def stage(name: str, instances: int = 1, **inputs: StageInput) -> Stage:
    names = [str(i) for i in range(instances)]
    return Plain(
        name, inputs=inputs, instances=names, sink=Sink(), kind=StageKind.DERIVED if inputs else StageKind.BOUNDED_SOURCE
    )


def rows(pipeline: Pipeline, chains: tuple[Chain, ...] | None = None) -> list[Row]:
    groups = channel_groups(pipeline, build_chains(pipeline) if chains is None else chains)
    return [(str(g.producer), [f"{c} by {t}" for t, c in g.channels.items()], g.static, g.key) for g in groups]


@pytest.mark.parametrize(
    ("producers", "consumers", "how", "expected"),
    [
        (2, 1, POINTWISE, [("a[0]", ["a[0]->b[0] by b[0]"]), ("a[1]", ["a[1]->b[0] by b[0]"])]),
        (1, 2, POINTWISE, [("a[0]", ["a[0]->b[0] by b[0]", "a[0]->b[1] by b[1]"])]),
        (
            2,
            3,
            POINTWISE,
            [("a[0]", ["a[0]->b[0] by b[0]", "a[0]->b[1] by b[1]"]), ("a[1]", ["a[1]->b[2] by b[2]"])],
        ),
        (
            2,
            2,
            ALL,
            [
                ("a[0]", ["a[0]->b[0] by b[0]", "a[0]->b[1] by b[1]"]),
                ("a[1]", ["a[1]->b[0] by b[0]", "a[1]->b[1] by b[1]"]),
            ],
        ),
    ],
)
def test_the_pattern_of_an_edge_says_which_channels_there_are(
    producers: int, consumers: int, how: StageInput, expected: list[tuple[str, list[str]]]
) -> None:
    pipeline = Pipeline("p", [stage("a", producers), stage("b", consumers, a=how)])
    assert rows(pipeline) == [(producer, channels, False, None) for producer, channels in expected]


def test_stages_of_one_chain_have_no_channel_and_channels_of_a_chain_are_those_of_its_tasks() -> None:
    pipeline = Pipeline("p", [stage("a", 2), stage("b", 2, a=POINTWISE), stage("c", 1, b=POINTWISE)])
    chained = (Chain("c", ("c",), ("0",)), Chain("a", ("a", "b"), ("0", "1")))
    assert rows(pipeline, chained) == [
        ("a[0]", ["b[0]->c[0] by c[0]"], False, None),
        ("a[1]", ["b[1]->c[0] by c[0]"], False, None),
    ], "the producer is the chain's task; the channel has the name of the stage"
    joined = Pipeline("p", [stage("a", 2), stage("b", 1, a=POINTWISE), stage("c", 1, b=POINTWISE)])
    chains = (Chain("a", ("a",), ("0", "1")), Chain("b", ("b", "c"), ("0",)))
    assert [channels for _, channels, _, _ in rows(joined, chains)] == [["a[0]->b[0] by b[0]"], ["a[1]->b[0] by b[0]"]]


def test_a_stage_that_is_read_twice_sends_over_a_group_per_reader_in_the_order_of_edges() -> None:
    pipeline = Pipeline("p", [stage("x"), stage("a"), stage("b", 1, a=BY_KEY, x=STATIC), stage("c", 1, a=POINTWISE)])
    assert rows(pipeline) == [
        ("a[0]", ["a[0]->b[0] by b[0]"], False, "origin"),
        ("x[0]", ["x[0]->b[0] by b[0]"], True, None),
        ("a[0]", ["a[0]->c[0] by c[0]"], False, None),
    ]


COUNTS = st.integers(1, 12)


@given(COUNTS, COUNTS, st.sampled_from([POINTWISE, ALL]))
def test_each_reader_has_its_channels_in_the_order_of_the_producers(producers: int, consumers: int, how: StageInput) -> None:
    pipeline = Pipeline("p", [stage("a", producers), stage("b", consumers, a=how)], chaining=False)
    read: dict[TaskId, list[int]] = {TaskId("b", i): [] for i in range(consumers)}
    for group in channel_groups(pipeline, build_chains(pipeline)):
        assert {(i.producer, i.producer_index, i.consumer) for i in group.channels.values()} == {("a", group.producer.index, "b")}
        for consumer, identity in group.channels.items():
            assert consumer == TaskId("b", identity.consumer_index)
            read[consumer].append(identity.producer_index)
    assert all(found == sorted(set(found)) and found for found in read.values())
    if how is ALL:
        assert all(found == list(range(producers)) for found in read.values())


def test_the_name_of_a_channel() -> None:
    assert str(ChannelId("flights", 3, "delays", 12)) == "flights[3]->delays[12]"


def test_the_name_of_a_channel_is_made_of_uids() -> None:
    first = Plain("a", kind=StageKind.BOUNDED_SOURCE, sink=Sink(), uid="old")
    pipeline = Pipeline("p", [first, stage("b", a=ALL), Plain("c", inputs={"a": ALL}, sink=Sink(), uid="reader")])
    groups = list(channel_groups(pipeline, build_chains(pipeline)))
    found = [(str(channel), channel.producer, channel.consumer) for group in groups for channel in group.channels.values()]
    assert found == [("old[0]->b[0]", "a", "b"), ("old[0]->reader[0]", "a", "c")]
