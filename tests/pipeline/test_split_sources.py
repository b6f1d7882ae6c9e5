"""The definition of split sources, and their splits as text."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.pipeline import Pipeline, SplitSource, StageKind, build_chains, split_source, stage
from dagster_checkpoints.pipeline.errors import InvalidSplitError, InvalidSplitSourceError

SCHEMA = "day DATE, delay INT"


class Part(msgspec.Struct, frozen=True):
    table: str
    day: dt.date


class Days(SplitSource):
    schema = SCHEMA
    split_type = dt.date
    bounded = False
    discovery_interval = 2.5

    def discover(self, context: Any) -> Any:
        return [dt.date(2026, 1, 1)]

    def read(self, context: Any, split: Any) -> Any:
        return split


def flights(**options: Any) -> Any:
    return split_source(**{"schema": SCHEMA, "discover": ["a", "b"], "name": "flights", **options})(lambda split: split)


def test_a_function_and_a_class_are_sources_that_begin_a_query_of_their_own() -> None:
    @split_source(schema=SCHEMA, discover=lambda context: [context], instances=["x", "y"])
    def flights(context, split):
        """Flights by day."""
        return context, split

    assert (flights.name, flights.kind, flights.split_interval, flights.description) == (
        "flights",
        StageKind.BOUNDED_SOURCE,
        10.0,
        "Flights by day.",
    )
    assert flights.discover("context") == ["context"]
    assert flights.read("c", "s") == flights("c", "s") == ("c", "s")
    days = Days(sink=object())
    assert (days.name, days.kind, days.split_interval) == ("days", StageKind.UNBOUNDED_SOURCE, 2.5)
    assert "test_split_sources.py" in str(days.location)


@pytest.mark.parametrize(
    ("split_type", "split", "text"),
    [
        (str, "2026-01-01", "2026-01-01"),
        (dt.date, dt.date(2026, 1, 1), '"2026-01-01"'),
        (Part, Part("t", dt.date(2026, 1, 1)), '{"table":"t","day":"2026-01-01"}'),
        (int, 7, "7"),
        (frozenset[int], frozenset([8, 1]), "[1,8]"),  # in a fixed order, whatever the process
    ],
)
def test_a_split_becomes_text_and_comes_back(split_type: Any, split: Any, text: str) -> None:
    source = flights(split_type=split_type)
    assert source.encode_split(split) == text
    assert source.decode_split(text) == split


def test_a_split_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidSplitError, match="expected discover to give texts, found 7"):
        flights().encode_split(7)
    with pytest.raises(InvalidSplitError, match="found 'x'"):
        flights(split_type=int).encode_split("x")
    with pytest.raises(InvalidSplitError, match="in the checkpoint, found '\"x\"'"):
        flights(split_type=int).decode_split('"x"')


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schema": None}, "found no schema"),
        ({"discover": "a"}, "or a list of splits, found 'a'"),
        ({"discover": 7}, "or a list of splits, found 7"),
        ({"bounded": False}, "a list of splits does not grow"),
        ({"discovery_interval": 0.01}, "at least 0.1 seconds, found 0.01"),
        ({"split_type": object()}, "a type of splits that msgspec encodes"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSplitSourceError, match=words):
        flights(**options)


def test_the_function_takes_a_split() -> None:
    with pytest.raises(InvalidSplitSourceError, match=r"the parameters 'split' .* found \['day'\]"):
        split_source(schema=SCHEMA, discover=["a"], name="flights")(lambda day: day)


def test_no_stage_runs_in_the_query_of_a_split_source() -> None:
    class Sink:
        supported_output_modes = frozenset({"append"})

    source = split_source(schema=SCHEMA, discover=["a"], name="flights")(lambda split: split)

    @stage(sink=Sink())
    def delays(flights):
        return flights

    assert [chain.stages for chain in build_chains(Pipeline("p", [source, delays]))] == [("flights",), ("delays",)]
