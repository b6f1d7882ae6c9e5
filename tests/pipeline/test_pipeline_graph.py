"""A pipeline as a whole: order, boundedness, event time, and mistakes that only the whole pipeline shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.pipeline import (
    Chain,
    EdgePattern,
    Pipeline,
    PipelineDefinitionError,
    Stage,
    StageContext,
    StageEdge,
    StageInput,
    StageKind,
    Watermark,
    bounded_source,
    build_chains,
    execution_graph,
    stage,
    unbounded_source,
)
from dagster_checkpoints.pipeline.errors import (
    ChainLayoutError,
    DuplicateStageError,
    DuplicateUidError,
    EmptyPipelineError,
    InstancesMismatchError,
    InvalidNameError,
    InvalidWatermarkError,
    NotAStageError,
    OutputModeError,
    OverlappingSinksError,
    StageCycleError,
    UnboundedStaticInputError,
    UnknownStageError,
    UnusedStageError,
)

STREAM, STATIC = StageInput(), StageInput(mode="static")
ALL, BY_KEY = StageInput(edge="all_to_all"), StageInput(key="origin")
AIRPORTS, LETTERS = ("EWR", "JFK", "LGA"), ("a", "b", "c")


class Upserts:
    supported_output_modes = frozenset({"append", "update"})


class At:
    """A sink with a location."""

    def __init__(self, location: str) -> None:
        self.location = location


class Reads(Stage):
    def transform(self, context: StageContext, **inputs: Any) -> Any:
        return None


def source(name: str, watermark: tuple[str, str] | None = None, bounded: bool = True, **options: Any) -> Stage:
    kind = StageKind.BOUNDED_SOURCE if bounded else StageKind.UNBOUNDED_SOURCE
    return Reads(name, kind=kind, watermark=watermark, **options)


def derived(name: str, *streams: str, inputs: dict[str, StageInput] | None = None, **options: Any) -> Stage:
    return Reads(name, inputs={**dict.fromkeys(streams, STREAM), **(inputs or {})}, **options)


def names(stages: Sequence[Stage]) -> list[str]:
    return [each.name for each in stages]


def test_the_flights_pipeline_of_the_design() -> None:
    @bounded_source(watermark=("ts", "1 hour"))
    def flights_history(context: StageContext) -> object:
        return context.spark

    @unbounded_source(watermark=("ts", "1 hour"), instances=["EWR", "JFK", "LGA"])
    def flights_live(context: StageContext) -> object:
        return context.instance

    @bounded_source
    def airlines(context: StageContext) -> object:
        return context.spark

    @stage(inputs={"airlines": StageInput(mode="static")})
    def departures(flights_history: object, flights_live: object, airlines: object) -> object: ...

    @stage(sink=object())
    def hourly_delays(departures: object) -> object: ...

    flights = Pipeline("flights", [flights_history, flights_live, airlines, departures, hourly_delays])

    assert names(flights.stages) == [*("flights_history", "flights_live", "airlines", "departures", "hourly_delays")]
    assert flights.stage("departures") is departures
    assert flights.upstream("departures") == ("flights_history", "flights_live", "airlines")
    assert flights.downstream("airlines") == ("departures",)
    assert flights.edges == (
        StageEdge("flights_history", "departures", STREAM, EdgePattern.POINTWISE),
        StageEdge("flights_live", "departures", STREAM, EdgePattern.POINTWISE),
        StageEdge("airlines", "departures", STATIC, EdgePattern.ALL_TO_ALL),
        StageEdge("departures", "hourly_delays", STREAM, EdgePattern.POINTWISE),
    )
    bounded = [each.name for each in flights.stages if flights.is_bounded(each.name)]
    assert bounded == ["flights_history", "airlines"]
    assert flights.event_time("hourly_delays") == "ts"
    assert flights.event_time_lateness_ms("hourly_delays") == 3_600_000
    assert not flights.carries_watermark("airlines")
    assert [chain.stages for chain in build_chains(flights)] == [
        ("flights_history",),
        ("flights_live",),
        ("airlines",),
        ("departures", "hourly_delays"),
    ]
    graph = execution_graph(flights, build_chains(flights))
    assert [(vertex.name, vertex.parallelism) for vertex in graph.vertices] == [
        ("flights_history", 1),
        ("flights_live", 3),
        ("airlines", 1),
        ("departures", 1),
    ]


def test_stages_are_sorted_upstream_first_and_otherwise_as_written() -> None:
    pipeline = Pipeline(
        "p",
        [
            derived("d", "b", "c", sink=1),
            derived("c", "a"),
            source("z", sink=1),
            derived("b", "a"),
            source("a"),
        ],
    )
    assert names(pipeline.stages) == ["z", "a", "c", "b", "d"]
    assert pipeline.upstream("d") == ("b", "c")
    assert pipeline.downstream("a") == ("c", "b")


@pytest.mark.parametrize(
    ("upstream", "downstream", "options", "pattern"),
    [
        (("0",), ("0",), STREAM, EdgePattern.POINTWISE),
        (AIRPORTS, AIRPORTS, STREAM, EdgePattern.POINTWISE),
        (AIRPORTS, ("0",), STREAM, EdgePattern.POINTWISE),
        (("0",), AIRPORTS, STREAM, EdgePattern.POINTWISE),
        (AIRPORTS, ("x", "y"), STREAM, EdgePattern.POINTWISE),
        (("EWR",), ("0",), STREAM, EdgePattern.POINTWISE),
        (AIRPORTS, LETTERS, ALL, EdgePattern.ALL_TO_ALL),
        (AIRPORTS, LETTERS, BY_KEY, EdgePattern.ALL_TO_ALL),
        (AIRPORTS, AIRPORTS, BY_KEY, EdgePattern.ALL_TO_ALL),
        (AIRPORTS, LETTERS, STATIC, EdgePattern.ALL_TO_ALL),
        (AIRPORTS, AIRPORTS, STATIC, EdgePattern.ALL_TO_ALL),
        (AIRPORTS, AIRPORTS, StageInput(edge="pointwise"), EdgePattern.POINTWISE),
    ],
)
def test_the_pattern_of_an_edge(
    upstream: tuple[str, ...], downstream: tuple[str, ...], options: StageInput, pattern: EdgePattern
) -> None:
    pipeline = Pipeline(
        "p",
        [source("a", instances=upstream), derived("b", inputs={"a": options}, instances=downstream, sink=1)],
    )
    assert [edge.pattern for edge in pipeline.edges] == [pattern]


@pytest.mark.parametrize(
    ("inputs", "bounded"),
    [
        ({"history": STREAM}, True),
        ({"live": STREAM}, False),
        ({"history": STREAM, "live": STREAM}, False),
        ({"history": STREAM, "table": STATIC}, True),
        ({"live": STREAM, "table": STATIC}, False),
        ({"table": STATIC}, True),
    ],
)
def test_a_derived_stage_is_bounded_when_all_its_inputs_are(inputs: dict[str, StageInput], bounded: bool) -> None:
    pipeline = Pipeline(
        "p",
        [
            source("history", sink=1),
            source("live", bounded=False, sink=1),
            source("table", sink=1),
            derived("a", inputs=inputs),
            derived("b", "a", sink=1),
        ],
    )
    assert (pipeline.is_bounded("a"), pipeline.is_bounded("b")) == (bounded, bounded)


def test_event_time_flows_over_streaming_inputs() -> None:
    pipeline = Pipeline(
        "p",
        [
            source("history", ("ts", "1 hour")),
            source("live", ("at", "2 hours"), bounded=False),
            source("plain"),
            source("table", ("day", "30 days")),
            derived("joined", "plain", "history", "live", inputs={"table": STATIC}),
            derived("windows", "joined", event_time="window_end"),
            derived("last", "windows", sink=1),
            derived("without", "plain", inputs={"history": STATIC}, sink=1),
            derived("booked", "windows", event_time=("booked_at", "10 minutes 1.5 seconds"), sink=1),
            derived("again", "booked", event_time=["at", "1 second"], sink=1),
        ],
    )
    carried = {
        each.name: (
            pipeline.event_time(each.name),
            pipeline.event_time_lateness_ms(each.name),
            pipeline.carries_watermark(each.name),
        )
        for each in pipeline.stages
    }
    hour = 3_600_000
    assert carried == {
        "history": ("ts", hour, True),
        "live": ("at", 2 * hour, True),
        "plain": (None, None, False),
        "table": ("day", 720 * hour, True),
        "joined": ("ts", 2 * hour, True),
        "windows": ("window_end", 2 * hour, True),
        "last": ("window_end", 2 * hour, True),
        "without": (None, None, False),
        "booked": ("booked_at", 2 * hour + 601_500, True),
        "again": ("at", 2 * hour + 602_500, True),
    }


def test_a_lateness_that_adds_to_no_watermark_is_refused() -> None:
    with pytest.raises(InvalidWatermarkError, match="no watermark reaches it"):
        Pipeline("p", [source("plain"), derived("b", "plain", event_time=("at", "1 minute"), sink=1)])


def test_a_stage_with_a_lateness_of_its_own_ends_its_chain() -> None:
    stages = [source("a", ("ts", "1 hour")), derived("b", "a", event_time=("at", "1 minute")), derived("c", "b", sink=1)]
    pipeline = Pipeline("p", stages)
    assert [chain.stages for chain in build_chains(pipeline)] == [("a", "b"), ("c",)]
    with pytest.raises(ChainLayoutError, match=r"declares its own lateness with event_time="):
        execution_graph(pipeline, [Chain("a", ("a", "b", "c"), ("0",))])


def test_lateness_of_zero_is_a_watermark() -> None:
    pipeline = Pipeline("p", [source("a", ("ts", "0 seconds")), derived("b", "a", sink=1)])
    assert (pipeline.event_time_lateness_ms("b"), pipeline.carries_watermark("b")) == (0, True)


@pytest.mark.parametrize("ask", ["stage", "upstream", "downstream", "is_bounded", "event_time", "carries_watermark"])
def test_asking_for_a_stage_that_is_not_there(ask: str) -> None:
    pipeline = Pipeline("p", [source("departures", sink=1)])
    with pytest.raises(UnknownStageError, match=r"no stage 'departure'\. Did you mean 'departures'"):
        getattr(pipeline, ask)("departure")


class ForgotSuper(Stage):
    def __init__(self) -> None:
        pass


Definition = Callable[[], Pipeline]
WRONG: list[tuple[str, Definition, type[PipelineDefinitionError], list[str]]] = [
    ("name", lambda: Pipeline("a/b", [source("a", sink=1)]), InvalidNameError, ["Pipeline name 'a/b'"]),
    ("underscore", lambda: Pipeline("_a", [source("a", sink=1)]), InvalidNameError, ["Pipeline name '_a'", "digit first"]),
    ("empty", lambda: Pipeline("p", []), EmptyPipelineError, ["'p' has no stages"]),
    ("one stage", lambda: Pipeline("p", source("a")), NotAStageError, ["a list of stages", "'a'"]),  # type: ignore[arg-type]
    ("function", lambda: Pipeline("p", [source]), NotAStageError, ["item 0", "@stage"]),  # type: ignore[list-item]
    ("class", lambda: Pipeline("p", [source("a", sink=1), Reads]), NotAStageError, ["item 1"]),  # type: ignore[list-item]
    ("no super", lambda: Pipeline("p", [ForgotSuper()]), NotAStageError, ["ForgotSuper", "super().__init__"]),
    (
        "duplicate",
        lambda: Pipeline("p", [source("a", sink=1), source("a", sink=2)]),
        DuplicateStageError,
        ["two stages 'a'", f"{__file__}:"],
    ),
    (
        "duplicate uid",
        lambda: Pipeline("p", [source("a", sink=1), source("b", sink=2, uid="a")]),
        DuplicateUidError,
        ["Stage 'a'", "Stage 'b'", "one uid, 'a'"],
    ),
    ("uid", lambda: Pipeline("p", [source("a", sink=1, uid="a-b")]), InvalidNameError, ["Uid name 'a-b'"]),
    (
        "unknown",
        lambda: Pipeline("p", [source("flights_live"), derived("b", "flight_live", sink=1)]),
        UnknownStageError,
        ["reads 'flight_live'", "Did you mean 'flights_live'?", f"Stage 'b' ({__file__}:"],
    ),
    (
        "unknown, nothing near",
        lambda: Pipeline("p", [source("a"), derived("b", "weather", sink=1)]),
        UnknownStageError,
        ["Known are: 'a', 'b'."],
    ),
    (
        "cycle",
        lambda: Pipeline("p", [source("s"), derived("a", "s", "c"), derived("b", "a"), derived("c", "b", sink=1)]),
        StageCycleError,
        ["a -> b -> c -> a"],
    ),
    (
        "behind a cycle",
        lambda: Pipeline("p", [derived("z", "b", sink=1), derived("a", "b"), derived("b", "a")]),
        StageCycleError,
        [": a -> b -> a."],
    ),
    ("self", lambda: Pipeline("p", [derived("a", "a", sink=1)]), StageCycleError, ["a -> a", "'a' from"]),
    (
        "two sinks at one place",
        lambda: Pipeline("p", [source("a", sink=At("/data/t/")), source("c", sink=At("/data/t"))]),
        OverlappingSinksError,
        ["sink of Stage 'a'", "writes to /data/t,", "Stage 'c'", "the same location"],
    ),
    (
        "one sink inside another's place",
        lambda: Pipeline(
            "p",
            [source("a", sink=At("/data/t/x/y")), source("b", sink=At("/data/t-1")), source("c", sink=At("/data/t"))],
        ),
        OverlappingSinksError,
        ["sink of Stage 'c'", "writes to /data/t,", "Stage 'a'", "to /data/t/x/y, which is inside the other"],
    ),
    (
        "static and unbounded",
        lambda: Pipeline("p", [source("a", bounded=False), derived("b", inputs={"a": STATIC}, sink=1)]),
        UnboundedStaticInputError,
        ["reads 'a' as a static input", "'a' is unbounded.", 'mode="stream"'],
    ),
    (
        "static and unbounded further up",
        lambda: Pipeline(
            "p",
            [
                source("a"),
                source("l", bounded=False),
                derived("b", "a", "l"),
                derived("c", "b"),
                derived("d", "a", inputs={"c": STATIC}, sink=1),
            ],
        ),
        UnboundedStaticInputError,
        ["'c' is unbounded (it reads the unbounded source 'l')"],
    ),
    (
        "instances",
        lambda: Pipeline("p", [source("a", instances=AIRPORTS), derived("b", "a", instances=LETTERS, sink=1)]),
        InstancesMismatchError,
        ["'EWR' into 'a'", "StageInput(key=...)"],
    ),
    (
        "instances in another order, edge asked for",
        lambda: Pipeline(
            "p",
            [
                source("a", instances=["EWR", "JFK", "LGA"]),
                derived(
                    "b",
                    inputs={"a": StageInput(edge="pointwise")},
                    instances=["EWR", "LGA", "JFK"],
                    sink=1,
                ),
            ],
        ),
        InstancesMismatchError,
        ["'JFK' into 'LGA'", "same order"],
    ),
    ("source for nobody", lambda: Pipeline("p", [source("a")]), UnusedStageError, ["Stage 'a'", "no sink"]),
    (
        "stage for nobody",
        lambda: Pipeline("p", [source("a"), derived("b", "a")]),
        UnusedStageError,
        ["Stage 'b'"],
    ),
    (
        "update before another stage",
        lambda: Pipeline(
            "p",
            [source("a"), derived("b", "a", output_mode="update", sink=Upserts()), derived("c", "b", sink=1)],
        ),
        OutputModeError,
        ["'c' reads it", 'output_mode="append"'],
    ),
    (
        "complete into a sink that upserts",
        lambda: Pipeline("p", [source("a"), derived("b", "a", output_mode="complete", sink=Upserts())]),
        OutputModeError,
        ["Upserts supports append, update only"],
    ),
    (
        "update into a sink that says nothing",
        lambda: Pipeline("p", [source("a"), derived("b", "a", output_mode="update", sink=object())]),
        OutputModeError,
        ["object supports append only"],
    ),
]


@pytest.mark.parametrize(("define", "error", "says"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_pipeline_is_refused(define: Definition, error: type[PipelineDefinitionError], says: list[str]) -> None:
    with pytest.raises(error) as caught:
        define()
    assert [part for part in says if part not in str(caught.value)] == [], str(caught.value)


def test_a_sink_that_upserts_takes_updates() -> None:
    pipeline = Pipeline("p", [source("a"), derived("b", "a", output_mode="update", sink=Upserts())])
    assert pipeline.stage("b").output_mode == "update"


def test_a_stage_may_have_both_a_sink_and_consumers() -> None:
    pipeline = Pipeline("p", [source("a", sink=1), derived("b", "a", sink=1)])
    assert pipeline.downstream("a") == ("b",)


def test_one_stage_may_serve_in_two_pipelines() -> None:
    shared = source("a", ("ts", "1 hour"), sink=1)
    assert Pipeline("one", [shared]).stages == Pipeline("two", [shared]).stages
    assert shared.watermark == Watermark("ts", "1 hour")


@st.composite
def acyclic(draw: st.DrawFn) -> list[Stage]:
    """Stages s0, s1, ... that read earlier ones, shuffled."""
    count = draw(st.integers(1, 12))
    stages: list[Stage] = []
    for number in range(count):
        reads = draw(st.sets(st.integers(0, number - 1), max_size=4)) if number else set()
        bounded = draw(st.booleans())
        name = f"s{number}"
        stages.append(
            derived(name, *(f"s{each}" for each in sorted(reads)), sink=1) if reads else source(name, bounded=bounded, sink=1)
        )
    return draw(st.permutations(stages))


@given(acyclic())
def test_any_acyclic_graph_in_any_order_is_sorted(stages: list[Stage]) -> None:
    pipeline = Pipeline("p", stages)
    position = {each.name: number for number, each in enumerate(pipeline.stages)}
    assert sorted(position) == sorted(names(stages))
    assert all(position[edge.source] < position[edge.target] for edge in pipeline.edges)
    for each in pipeline.stages:
        if each.kind is StageKind.DERIVED:
            assert pipeline.is_bounded(each.name) == all(map(pipeline.is_bounded, pipeline.upstream(each.name)))


@given(acyclic(), st.data())
def test_any_edge_back_is_reported_as_a_circle_that_exists(stages: list[Stage], data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(names(stages)))
    by_name = {each.name: each for each in stages}
    behind = data.draw(st.sampled_from(sorted(reached_from(target, by_name))))
    reads = {**by_name[target].inputs, behind: STREAM}
    changed = [Reads(each.name, inputs=reads, sink=1) if each.name == target else each for each in stages]
    with pytest.raises(StageCycleError) as caught:
        Pipeline("p", changed)
    circle = str(caught.value).split(": ", 1)[1].split(". ", 1)[0].split(" -> ")
    inputs = {each.name: set(each.inputs) for each in changed}
    assert circle[0] == circle[-1]
    assert all(one in inputs[other] for one, other in pairwise(circle))
    assert (behind, target) in pairwise(circle)


def reached_from(name: str, by_name: dict[str, Stage]) -> set[str]:
    reached = {name}
    while more := {each.name for each in by_name.values() if reached & set(each.inputs)} - reached:
        reached |= more
    return reached


def test_sinks_beside_each_other_are_welcome() -> None:
    places = ["/data/t", "/data/t-1", "/data/u/t", "s3://b/data/t"]
    sinks = [source(f"s{number}", sink=At(place)) for number, place in enumerate(places)]
    Pipeline("p", [*sinks, source("unknown", sink=1), source("unknown_too", sink=1)])
