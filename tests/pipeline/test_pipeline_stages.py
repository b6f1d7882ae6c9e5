"""Stages as a user writes them: the meaning of a function's signature, and mistakes refused at the definition."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.errors import DagsterCheckpointsError
from dagster_checkpoints.pipeline import (
    FunctionStage,
    PipelineDefinitionError,
    Stage,
    StageContext,
    StageInput,
    StageKind,
    Watermark,
    bounded_source,
    interval_ms,
    stage,
    unbounded_source,
)
from dagster_checkpoints.pipeline.errors import (
    InvalidBatchLimitError,
    InvalidInstancesError,
    InvalidNameError,
    InvalidStageInputError,
    InvalidStatePartitionsError,
    InvalidWatermarkError,
    OutputModeError,
    SourceWithInputsError,
    StageSignatureError,
    StageWithoutInputsError,
)

STATIC = StageInput(mode="static")
CONTEXT: Any = object()


def test_bare_decorators_make_stages_named_after_their_functions() -> None:
    @bounded_source
    def history(context: StageContext) -> str:
        return "rows"

    @unbounded_source
    def live() -> str:
        return "rows"

    @stage
    def joined(history: str, live: str) -> str:
        """Joins both inputs."""
        return f"{history}+{live}"

    assert [(each.name, each.kind) for each in (history, live, joined)] == [
        ("history", StageKind.BOUNDED_SOURCE),
        ("live", StageKind.UNBOUNDED_SOURCE),
        ("joined", StageKind.DERIVED),
    ]
    assert dict(joined.inputs) == {"history": StageInput(), "live": StageInput()}
    assert joined.instances == ("0",)
    assert joined.description == "Joins both inputs."
    assert history.description is None


def test_decorators_take_the_options() -> None:
    sink = object()

    @unbounded_source(watermark=("ts", "1 hour"), idle_after=30, instances=["EWR", "JFK"], name="live")
    def anything(context: StageContext) -> None: ...

    @stage(inputs={"airlines": STATIC}, sink=sink, instances=["a"], event_time="window_end", output_mode="update")
    def departures(live: object, airlines: object) -> None: ...

    assert (anything.name, anything.instances, anything.parallelism) == ("live", ("EWR", "JFK"), 2)
    assert anything.watermark == Watermark("ts", "1 hour", 30)
    assert list(departures.inputs.items()) == [("live", StageInput()), ("airlines", STATIC)]
    assert (departures.sink, departures.event_time, departures.output_mode) == (sink, "window_end", "update")


def test_the_uid_is_the_name_unless_it_is_given() -> None:
    @bounded_source(uid="history")
    def archive(context: StageContext) -> None: ...

    @unbounded_source(name="live", uid="now")
    def anything(context: StageContext) -> None: ...

    @stage(name="joined")
    def both(archive: object, live: object) -> None: ...

    @stage(uid="last")
    def final(joined: object) -> None: ...

    class Hourly(Stage):
        uid = "hours"

        def transform(self, context: StageContext, joined: object) -> Any: ...  # type: ignore[override]

    stages = (archive, anything, both, final, Hourly(), Hourly("daily", uid="days"))
    found = [
        ("archive", "history"),
        ("live", "now"),
        ("joined", "joined"),
        ("final", "last"),
        ("hourly", "hours"),
        ("daily", "days"),
    ]
    assert [(each.name, each.uid) for each in stages] == found


def test_idle_after_is_added_to_a_watermark_that_is_a_value() -> None:
    @bounded_source(watermark=Watermark("ts", "1 hour"), idle_after=2.5)
    def live(context: StageContext) -> None: ...

    assert live.watermark == Watermark("ts", "1 hour", 2.5)


def test_transform_passes_the_context_only_to_a_function_that_asks() -> None:
    @stage
    def with_context(flights: str, context: Any) -> tuple[str, Any]:
        return flights, context

    @stage
    def without_context(flights: str) -> str:
        return flights

    assert list(with_context.inputs) == ["flights"]
    called: list[Any] = [each.transform(CONTEXT, flights="rows") for each in (with_context, without_context)]
    assert called == [("rows", CONTEXT), "rows"]


def test_a_decorated_function_can_still_be_called() -> None:
    @stage
    def twice(flights: int) -> int:
        return 2 * flights

    assert twice(21) == 42
    assert vars(twice)["__name__"] == "twice"


def test_the_location_is_that_of_the_users_code_behind_other_decorators() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @logged
    def flights(departures: object) -> None: ...

    made = FunctionStage(flights)
    assert made.location.file == __file__
    assert made.location.line == flights.__wrapped__.__code__.co_firstlineno  # type: ignore[attr-defined]
    assert list(made.inputs) == ["departures"]
    assert f"({__file__}:{made.location.line})" in made.where


class Dedup(Stage):
    """Drops repeated flights."""

    instances: tuple[str, ...] = ("a", "b")

    def transform(self, context: StageContext, flights: Any, airlines: Any = None) -> Any:
        return flights, airlines

    def finish(self) -> None:
        return None


class FlightsLive(Stage):
    kind = StageKind.UNBOUNDED_SOURCE

    def transform(self, context: StageContext) -> Any:
        return "rows"


class PassOn(Stage):
    def process_batch(self, batch: Any, batch_id: int) -> Any:
        return batch


class Union(Stage):
    def transform(self, context: StageContext, **inputs: Any) -> Any:
        return sorted(inputs)


def test_a_subclass_reads_the_signature_of_transform_and_its_class_attributes() -> None:
    dedup = Dedup(inputs={"airlines": STATIC}, sink="sink")
    assert dedup.name == "dedup"
    assert list(dedup.inputs.items()) == [("flights", StageInput()), ("airlines", STATIC)]
    assert (dedup.instances, dedup.sink, dedup.description) == (("a", "b"), "sink", "Drops repeated flights.")
    assert Dedup("other", instances=["c"]).instances == ("c",)
    assert Dedup().instances == ("a", "b")
    assert Dedup.inputs == {}
    assert dedup.location.file == __file__
    assert dedup.location.line == Dedup.transform.__code__.co_firstlineno


def test_a_subclass_can_be_a_source() -> None:
    live = FlightsLive(watermark=("ts", "5 minutes"))
    assert (live.name, live.kind, dict(live.inputs)) == ("flights_live", StageKind.UNBOUNDED_SOURCE, {})
    assert live.watermark == Watermark("ts", "5 minutes")


def test_without_transform_the_only_input_is_passed_on() -> None:
    pass_on = PassOn(inputs={"flights": StageInput()})
    rows: Any = "rows"
    assert pass_on.transform(CONTEXT, flights=rows) is rows
    assert pass_on.location.line == PassOn.process_batch.__code__.co_firstlineno


def test_a_transform_with_any_inputs_reads_those_that_are_given() -> None:
    union = Union(inputs={"b": StageInput(), "a": StageInput()})
    assert list(union.inputs) == ["b", "a"]
    assert union.transform(CONTEXT, a=1, b=2) == ["a", "b"]


def test_what_a_stage_overrides() -> None:
    @stage
    def plain(flights: object) -> None: ...

    def overridden(each: Stage) -> tuple[bool, bool]:
        return each.overrides_process_batch, each.overrides_finish

    assert overridden(plain) == (False, False)
    assert overridden(Dedup()) == (False, True)
    assert overridden(PassOn(inputs={"flights": StageInput()})) == (True, False)


def test_the_life_cycle_does_nothing_unless_overridden() -> None:
    union = Union(inputs={"a": StageInput()})
    batch: Any = object()
    union.open(CONTEXT)
    assert union.process_batch(batch, 0) is batch
    union.end_input("a")
    assert union.finish() is None
    union.snapshot_state(1)
    union.notify_checkpoint_complete(1)
    union.notify_checkpoint_aborted(1)
    union.close()


def test_instances_work_on_copies_of_their_own() -> None:
    dedup = Dedup()
    one, other = dedup.for_instance(), dedup.for_instance()
    one.buffer = [1]  # type: ignore[attr-defined]
    assert not hasattr(other, "buffer") and not hasattr(dedup, "buffer")
    assert (one.name, one.inputs, type(one)) == (dedup.name, dedup.inputs, Dedup)


def reads_flights(flights: object) -> None: ...


def by_origin(state_partitions: object, **options: Any) -> Stage:
    inputs = {"flights": StageInput(key="origin")}
    return any_stage(inputs=inputs, state_partitions=state_partitions, **options)(reads_flights)


class Divided(Stage):
    state_partitions = 8

    def transform(self, context: StageContext) -> Any: ...


class Limited(Stage):
    max_rows_per_trigger = 5

    def transform(self, context: StageContext) -> Any: ...


def takes_context(context: StageContext) -> None: ...


def takes_nothing() -> None: ...


def positional_only(flights: object, /) -> None: ...


def any_number(*flights: object) -> None: ...


def any_names(**flights: object) -> None: ...


class ForgotContext(Stage):
    def transform(self, flights: Any) -> Any:
        return flights


any_stage: Any = stage  # for calls that a type checker would refuse as well
any_bounded_source: Any = bounded_source
any_unbounded_source: Any = unbounded_source

REFUSED: list[tuple[str, Callable[[], object], type[PipelineDefinitionError], str]] = [
    ("name", lambda: any_stage(name="a-b")(reads_flights), InvalidNameError, "'a-b'"),
    ("name with a path", lambda: any_stage(name="../a")(reads_flights), InvalidNameError, "letters, digits"),
    ("name not ASCII", lambda: any_stage(name="flüge")(reads_flights), InvalidNameError, "flüge"),
    ("name with newline", lambda: any_stage(name="a\n")(reads_flights), InvalidNameError, "letters"),
    ("empty name", lambda: any_stage(name="")(reads_flights), InvalidNameError, "''"),
    ("lambda", lambda: any_stage(lambda flights: flights), InvalidNameError, "<lambda>"),
    ("called context", lambda: any_stage(name="context")(reads_flights), StageSignatureError, "StageContext"),
    ("a class", lambda: any_stage(Dedup), StageSignatureError, "instantiated"),
    ("no function", lambda: any_stage(42), StageSignatureError, "expect a function"),
    ("positional only", lambda: any_stage(positional_only), StageSignatureError, "without * or /"),
    ("*args", lambda: any_stage(any_number), StageSignatureError, "*flights"),
    ("**kwargs", lambda: any_stage(any_names), StageSignatureError, "**flights"),
    (
        "no such parameter",
        lambda: any_stage(inputs={"flight": STATIC})(reads_flights),
        StageSignatureError,
        "Did you",
    ),
    (
        "no option",
        lambda: any_stage(inputs={"flights": "static"})(reads_flights),
        InvalidStageInputError,
        "'static'",
    ),
    (
        "no mapping",
        lambda: any_stage(inputs=["flights"])(reads_flights),
        InvalidStageInputError,
        "expected {",
    ),
    ("source reads", lambda: any_bounded_source(reads_flights), SourceWithInputsError, "'flights'"),
    ("source class reads", lambda: Dedup(kind=StageKind.BOUNDED_SOURCE), SourceWithInputsError, "'flights'"),
    ("stage reads nothing", lambda: any_stage(takes_context), StageWithoutInputsError, "@bounded_source"),
    ("no context first", ForgotContext, StageSignatureError, "(self, context, ...)"),
    (
        "no transform, two inputs",
        lambda: PassOn(inputs={"a": STATIC, "b": STATIC}),
        StageSignatureError,
        "override",
    ),
    ("no transform, source", lambda: PassOn(kind=StageKind.BOUNDED_SOURCE), StageSignatureError, "override"),
    ("no transform, no input", PassOn, StageWithoutInputsError, "reads no stage"),
    ("no instances", lambda: any_stage(instances=[])(reads_flights), InvalidInstancesError, "empty"),
    (
        "repeated",
        lambda: any_stage(instances=["a", "b", "a"])(reads_flights),
        InvalidInstancesError,
        "'a' more",
    ),
    (
        "text as instances",
        lambda: any_stage(instances="EWR")(reads_flights),
        InvalidInstancesError,
        "list of names",
    ),
    (
        "number as instances",
        lambda: any_stage(instances=3)(reads_flights),
        InvalidInstancesError,
        "list of names",
    ),
    ("name of an instance", lambda: any_stage(instances=["a/b"])(reads_flights), InvalidNameError, "'a/b'"),
    ("output mode", lambda: any_stage(output_mode="upsert")(reads_flights), OutputModeError, "'upsert'"),
    ("no rows", lambda: any_stage(max_rows_per_trigger=0)(reads_flights), InvalidBatchLimitError, "at least 1"),
    ("text as rows", lambda: any_stage(max_rows_per_trigger="5")(reads_flights), InvalidBatchLimitError, "number of rows"),
    ("true as rows", lambda: any_stage(max_rows_per_trigger=True)(reads_flights), InvalidBatchLimitError, "number of rows"),
    (
        "rows at a source",
        lambda: Limited(kind=StageKind.BOUNDED_SOURCE),
        InvalidBatchLimitError,
        "maxOffsetsPerTrigger",
    ),
    (
        "rows of static inputs",
        lambda: any_stage(inputs={"flights": StageInput(mode="static")}, max_rows_per_trigger=5)(reads_flights),
        InvalidBatchLimitError,
        "read as a whole",
    ),
    ("no partitions", lambda: by_origin(0), InvalidStatePartitionsError, "1 to 32768"),
    ("too many partitions", lambda: by_origin(32769), InvalidStatePartitionsError, "1 to 32768"),
    ("true as partitions", lambda: by_origin(True), InvalidStatePartitionsError, "expected a number of partitions"),
    (
        "uneven partitions",
        lambda: by_origin(9, instances=["a", "b"]),
        InvalidStatePartitionsError,
        "9 with 2 instances; expected a",
    ),
    (
        "partitions without a key",
        lambda: any_stage(inputs={"flights": StageInput(edge="all_to_all")}, state_partitions=8)(reads_flights),
        InvalidStatePartitionsError,
        "found None. Name the column",
    ),
    (
        "partitions at a source",
        lambda: Divided(kind=StageKind.BOUNDED_SOURCE),
        InvalidStatePartitionsError,
        "found no stream",
    ),
    (
        "lateness",
        lambda: any_bounded_source(watermark=("ts", "soon"))(takes_nothing),
        InvalidWatermarkError,
        "'soon'",
    ),
    (
        "nested",
        lambda: any_bounded_source(watermark=("a.ts", "1 day"))(takes_nothing),
        InvalidWatermarkError,
        "window_time",
    ),
    (
        "a dot in a name",
        lambda: any_bounded_source(watermark=("a.ts", "1 day"))(takes_nothing),
        InvalidWatermarkError,
        "rename the column",
    ),
    (
        "a backtick in a name",
        lambda: any_stage(event_time="t`s")(reads_flights),
        InvalidWatermarkError,
        "rename the column",
    ),
    (
        "watermark",
        lambda: any_bounded_source(watermark="ts")(takes_nothing),
        InvalidWatermarkError,
        "(column, lateness)",
    ),
    (
        "half a watermark and idle_after",
        lambda: any_bounded_source(watermark=("ts",), idle_after=1)(takes_nothing),
        InvalidWatermarkError,
        "(column, lateness)",
    ),
    (
        "idle alone",
        lambda: any_unbounded_source(idle_after=3)(takes_nothing),
        InvalidWatermarkError,
        "without a watermark",
    ),
    (
        "idle_after",
        lambda: any_unbounded_source(watermark=("ts", "1 day"), idle_after=-1)(takes_nothing),
        InvalidWatermarkError,
        "greater than 0",
    ),
    ("derived watermark", lambda: Dedup(watermark=("ts", "1 day")), InvalidWatermarkError, "event_time="),
    (
        "event time",
        lambda: any_stage(event_time="window.end")(reads_flights),
        InvalidWatermarkError,
        "window_time",
    ),
    (
        "event time, lateness",
        lambda: any_stage(event_time=("at", "a while"))(reads_flights),
        InvalidWatermarkError,
        "lateness 'a while'",
    ),
    (
        "event time, neither",
        lambda: any_stage(event_time=("at", "1 minute", 5))(reads_flights),
        InvalidWatermarkError,
        "(column, lateness)",
    ),
    (
        "event time, lateness at a source",
        lambda: any_bounded_source(watermark=("ts", "1 day"), event_time=("ts", "1 hour"))(takes_nothing),
        InvalidWatermarkError,
        "Leave out event_time",
    ),
    (
        "event time, source",
        lambda: any_bounded_source(event_time="ts")(takes_nothing),
        InvalidWatermarkError,
        "watermark=",
    ),
    (
        "two event times",
        lambda: any_bounded_source(watermark=("ts", "1 day"), event_time="at")(takes_nothing),
        InvalidWatermarkError,
        "'at'",
    ),
]


@pytest.mark.parametrize(("define", "error", "says"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_wrong_stage_is_refused_where_it_is_written(
    define: Callable[[], object], error: type[PipelineDefinitionError], says: str
) -> None:
    with pytest.raises(error) as caught:
        define()
    assert says in str(caught.value)
    assert isinstance(caught.value, DagsterCheckpointsError)


@pytest.mark.parametrize("define", [row[1] for row in REFUSED if row[0] not in ("a class", "no function")])
def test_the_error_of_a_stage_shows_the_users_own_line(define: Callable[[], object]) -> None:
    with pytest.raises(PipelineDefinitionError, match=rf"{__file__}:\d+"):
        define()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "table"}, "'table'"),
        ({"edge": "ring"}, "'ring'"),
        ({"key": ""}, "name of a column"),
        ({"key": 3}, "name of a column"),
        ({"edge": "pointwise", "key": "origin"}, "which a POINTWISE edge cannot do"),
        ({"mode": "static", "edge": "pointwise"}, 'edge="pointwise"'),
        ({"mode": "static", "key": "origin"}, "key='origin'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidStageInputError) as caught:
        StageInput(**options)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0 seconds", 0),
        ("10 seconds", 10_000),
        ("1 second", 1_000),
        ("1.5 seconds", 1_500),
        ("1 hour", 3_600_000),
        ("1 day 2 hours", 93_600_000),
        ("  INTERVAL 2 Weeks  3 minutes ", 2 * 7 * 86_400_000 + 180_000),
        ("250 milliseconds", 250),
        ("1999 microseconds", 1),
        ("0.9999 seconds", 999),
    ],
)
def test_lateness_is_read_as_spark_writes_intervals(text: str, milliseconds: int) -> None:
    assert interval_ms(text) == milliseconds
    assert Watermark("ts", text).lateness_ms == milliseconds


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "soon",
            "10",
            "seconds",
            "10seconds",
            "-10 seconds",
            "- 10 seconds",
            "1 day 2",
            "1 fortnight",
        ),
        *(
            "1 month",
            "1 year",
            "1.5 hours",
            "interval",
            "1 secondss",
            "1e3 seconds",
            "\u0661 second",
            "1 day, 2 hours",
        ),
        *("253402300800 seconds", None, 10, 1.5),
    ],
)
def test_what_is_no_interval_is_refused(text: Any) -> None:
    with pytest.raises(InvalidWatermarkError, match="lateness"):
        Watermark("ts", text)


UNITS: dict[str, Fraction | int] = {
    "week": 604_800,
    "day": 86_400,
    "hour": 3_600,
    "minute": 60,
    "second": 1,
    "millisecond": Fraction(1, 1000),
}


@given(st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(sorted(UNITS)), st.booleans()), min_size=1))
def test_an_interval_is_the_sum_of_its_terms(terms: list[tuple[int, str, bool]]) -> None:
    text = " ".join(f"{number} {unit}{'s' if plural else ''}" for number, unit, plural in terms)
    assert interval_ms(text) == sum((number * UNITS[unit] * 1000 for number, unit, _ in terms), start=Fraction(0))


@pytest.mark.parametrize("idle_after", [0, -1, float("inf"), float("nan"), "10", True])
def test_an_idle_time_out_is_a_positive_number_of_seconds(idle_after: Any) -> None:
    with pytest.raises(InvalidWatermarkError, match="seconds"):
        Watermark("ts", "1 hour", idle_after)


@pytest.mark.parametrize("column", ["", " ", None, "a.b", "`a`"])
def test_event_time_is_a_top_level_column(column: Any) -> None:
    with pytest.raises(InvalidWatermarkError, match="top-level"):
        Watermark(column, "1 hour")


def test_the_floor_needs_neither_spark_nor_dagster() -> None:
    program = (
        "import sys, dagster_checkpoints.pipeline\n"
        "heavy = {'pyspark', 'py4j', 'dagster', 'boto3', 'pyarrow', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
