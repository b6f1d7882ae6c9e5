"""Definitions of quarantines: what is refused by name, the stages that a pipeline adds, and the limit of refused rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.execution.task_machine import config_of_task
from dagster_checkpoints.pipeline import (
    Pipeline,
    Quarantine,
    RefusedRowLimit,
    RefusedRows,
    Stage,
    StageInput,
    bounded_source,
    build_chains,
    commit_check,
    split_source,
    stage,
    unbounded_source,
)
from dagster_checkpoints.pipeline.errors import (
    DuplicateStageError,
    InvalidNameError,
    InvalidQuarantineError,
    OverlappingSinksError,
    UnusedStageError,
)
from dagster_checkpoints.sinks import DeltaSink, FileSink, IcebergSink, KafkaSink, ParquetSink, SqlSink


class Sink:
    supported_output_modes = frozenset({"append", "update"})

    def __init__(self, location: str = "") -> None:
        self.location = location


SINK: Any = Sink()
GOOD: dict[str, Any] = {"is_positive": "v > 0"}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"conditions": {}}, InvalidQuarantineError, "expected a dict of 1 to 62 conditions by name"),
        ({"conditions": ["v > 0"]}, InvalidQuarantineError, "found ['v > 0']"),
        ({"conditions": {f"c{n}": "true" for n in range(63)}}, InvalidQuarantineError, "1 to 62"),
        (
            {"conditions": {"is_positive": None}},
            InvalidQuarantineError,
            "condition 'is_positive' is None; expected Spark's SQL as text",
        ),
        ({"conditions": {"is_positive": " "}}, InvalidQuarantineError, "condition 'is_positive' is ' '"),
        (
            {"conditions": {"is_positive": bool}},
            InvalidQuarantineError,
            "or a function from the DataFrame of the rows to a Column",
        ),
        ({"conditions": {"v > 0": "v > 0"}}, InvalidNameError, "Condition name 'v > 0'"),
        ({"most_rows": -1}, InvalidQuarantineError, "most_rows=-1; expected a number of rows, 0 or more"),
        ({"most_rows": 0.5}, InvalidQuarantineError, "most_rows=0.5"),
        ({"most_rows": True}, InvalidQuarantineError, "most_rows=True"),
        ({"most_share": 1.5}, InvalidQuarantineError, "most_share=1.5; expected a share from 0 to 1"),
        ({"most_share": -0.1}, InvalidQuarantineError, "most_share=-0.1"),
        ({"most_share": float("nan")}, InvalidQuarantineError, "most_share=nan"),
    ],
)
def test_what_is_no_quarantine(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Quarantine(**{"conditions": GOOD, "sink": SINK, **arguments})


@commit_check(name="quarantine")
def taken(rows: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quarantine": GOOD}, "Stage 'orders' .*: quarantine={'is_positive': 'v > 0'}; expected a Quarantine"),
        (
            {"quarantine": Quarantine(GOOD, SINK), "output_mode": "update"},
            'Stage .orders.* expected output_mode="append".*found .update',
        ),
        (
            {"quarantine": Quarantine(GOOD, SqlSink("sqlite:////never.db", "refused", key="k"))},
            r"Stage 'orders' .* keeps each of them, found SqlSink\(.*key=\['k'\].* with key=: of two refused rows with one key",
        ),
        (
            {
                "quarantine": Quarantine(
                    GOOD, DeltaSink("/never", partition_by="day", overwrite_partitions=True, at_new_start="keep")
                )
            },
            r"Stage 'orders' .* keeps each of them, found DeltaSink\('/never', overwrite_partitions=True\): where a later job",
        ),
        ({"quarantine": Quarantine(GOOD, SINK), "checks": [taken]}, "Stage 'orders' .* expected no check 'quarantine'"),
    ],
)
def test_a_quarantine_that_does_not_fit_its_stage(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidQuarantineError, match=text):

        @stage(sink=SINK, **options)
        def orders(raw: Any) -> Any: ...


def orders_pipeline(quarantine: Quarantine | None = None, name: str = "orders", **options: Any) -> Pipeline:
    @bounded_source
    def raw(context: Any) -> Any: ...

    quarantine = quarantine or Quarantine(GOOD, SINK)
    orders = stage(**{"sink": SINK, "quarantine": quarantine, "name": name, **options})(lambda raw: raw)
    return Pipeline("p", [raw, orders])


def test_a_dict_that_is_changed_later_changes_no_quarantine() -> None:
    conditions = dict(GOOD)
    first = Quarantine(conditions, SINK)
    conditions["has_key"] = "k IS NOT NULL"
    second = Quarantine(conditions, SINK)
    assert ([*first.conditions], [*second.conditions]) == (["is_positive"], ["is_positive", "has_key"])


def test_the_stage_of_refused_rows_is_a_stage_of_the_pipeline() -> None:
    pipeline = orders_pipeline(Quarantine({**GOOD, "has_key": lambda rows: rows.k}, SINK), uid="o", instances=["a", "b"])
    refused = pipeline.stage("orders_refused")
    assert isinstance(refused, RefusedRows) and refused.location == pipeline.stage("orders").location
    assert (refused.uid, refused.instances, refused.sink, refused.checks) == ("o_refused", ("a", "b"), SINK, ())
    assert refused.description == "Rows of orders that do not meet its conditions: is_positive, has_key."
    assert [(edge.source, edge.target, edge.refused) for edge in pipeline.edges] == [
        ("raw", "orders", False),
        ("orders", "orders_refused", True),
    ]
    again = Pipeline("again", pipeline.stages)
    assert [each.name for each in again.stages] == [each.name for each in pipeline.stages], "stages of another pipeline"
    named = orders_pipeline(Quarantine(GOOD, SINK, name="bad_orders"))
    assert named.stage("bad_orders").uid == "orders_refused", "another name is the same stage in checkpoints"
    assert config_of_task(CheckpointConfig(1.0, unaligned=True, aligned_checkpoint_timeout=0.2), refused) == CheckpointConfig(1.0)
    config = CheckpointConfig(1.0, unaligned=True)
    assert config_of_task(config, pipeline.stage("orders")) is config


def test_every_kind_of_stage_takes_a_quarantine() -> None:
    quarantine = Quarantine(GOOD, SINK)

    class OfClass(Stage):
        def transform(self, context: Any, raw: Any) -> Any: ...

    OfClass.quarantine = quarantine
    made = [
        bounded_source(name="a", quarantine=quarantine)(lambda context: None),
        unbounded_source(name="b", quarantine=quarantine)(lambda context: None),
        split_source(name="c", schema="v long", discover=["1"], quarantine=quarantine)(lambda split: None),
        stage(name="d", quarantine=quarantine)(lambda raw: raw),
        OfClass(),
        OfClass(quarantine=Quarantine(GOOD, None)),
    ]
    assert [each.quarantine.sink for each in made if each.quarantine] == [*[SINK] * 5, None]


@pytest.mark.parametrize(
    ("stages", "error", "text"),
    [
        ("unread", UnusedStageError, "Stage 'orders' .* is read by no stage and has no sink"),
        ("no sink", UnusedStageError, "Stage 'orders_refused' .* is read by no stage and has no sink"),
        ("same name", DuplicateStageError, "two stages 'orders_refused'"),
        ("same place", OverlappingSinksError, "the sink of Stage 'orders.* writes to .*/orders"),
    ],
)
def test_pipelines_that_cannot_run(stages: str, error: type[Exception], text: str) -> None:
    place: Any = Sink("s3://lake/orders")
    sink, refused = {"unread": (None, SINK), "no sink": (SINK, None), "same name": (SINK, SINK), "same place": (place, place)}[
        stages
    ]

    @bounded_source
    def raw(context: Any) -> Any: ...

    @stage(sink=sink, quarantine=Quarantine(GOOD, refused))
    def orders(raw: Any) -> Any: ...

    @stage(sink=SINK, name="orders_refused")
    def another(raw: Any) -> Any: ...

    with pytest.raises(error, match=text):
        Pipeline("p", [raw, orders, *([another] if stages == "same name" else [])])


@pytest.mark.parametrize(
    "sink",
    [
        lambda: ParquetSink("/data/orders"),
        lambda: FileSink("/data/orders/", "csv"),
        lambda: FileSink("s3://lake/orders"),
        lambda: DeltaSink("file:///data/orders"),
        lambda: IcebergSink("lake.orders", warehouse="/data/lake"),
        lambda: SqlSink("sqlite:////data/shop.db", "orders"),
        lambda: KafkaSink("orders", "broker:9092", staging="/data/staging"),
    ],
)
def test_both_tables_are_one_table(sink: Any) -> None:
    @bounded_source(sink=sink(), quarantine=Quarantine(GOOD, sink()))
    def orders(context: Any) -> Any: ...

    with pytest.raises(OverlappingSinksError, match=r"that of Stage 'orders_refused' .* which is the same location"):
        Pipeline("p", [orders])


def test_a_stage_with_a_quarantine_ends_its_query() -> None:
    """Its rows are written once, and each of the two kinds has its readers."""

    @bounded_source(quarantine=Quarantine(GOOD, SINK))
    def raw(context: Any) -> Any: ...

    @stage(quarantine=Quarantine(GOOD, None))
    def orders(raw: Any) -> Any: ...

    @stage(sink=SINK)
    def good(orders: Any) -> Any: ...

    @stage(sink=SINK)
    def looked_at(orders_refused: Any) -> Any: ...

    @stage(sink=SINK, inputs={"orders": StageInput(mode="static")})
    def joined(orders_refused: Any, orders: Any) -> Any: ...

    chains = build_chains(Pipeline("p", [raw, orders, good, looked_at, joined]))
    assert {chain.stages for chain in chains} == {(name,) for name in (
        "raw", "raw_refused", "orders", "orders_refused", "good", "looked_at", "joined",
    )}  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=12),
    st.sampled_from([None, 0, 2, 5]),
    st.sampled_from([None, 0.0, 0.25, 1.0]),
)
def test_the_limit_counts_the_rows_since_the_last_commit(
    snapshots: list[tuple[int, int, int]], most_rows: int | None, most_share: float | None
) -> None:
    """Checkpoints that do not complete leave their rows to the next one; one that completes commits those before it, too."""
    limit = RefusedRowLimit(Quarantine(GOOD, SINK, most_rows, most_share), "left")
    passed = refused = 0
    taken: dict[int, tuple[int, int]] = {}
    committed = (0, 0)
    for number, (good, bad, then) in enumerate(snapshots, 1):
        passed, refused = passed + good, refused + bad
        found = limit.evaluate(number, passed, refused)
        taken[number] = (passed, refused)
        rows, wrong = passed + refused - sum(committed), refused - committed[1]
        exceeded = (most_rows is not None and wrong > most_rows) or (most_share is not None and wrong > most_share * rows)
        assert bool(found) == bool(rows)
        for each in found:
            assert (each.check, each.instance, each.checkpoint_id) == ("quarantine", "left", number)
            assert each.blocking is (most_rows is not None or most_share is not None)
            assert each.result.passed is not exceeded
            assert each.result.metadata == {"refused_rows": wrong, "rows": rows}
            assert f"{wrong} of {rows} rows since the last commit were refused" in str(each.result.description)
        if then and number - then > 0 and taken.get(number - then):
            limit.committed(number - then)
            committed = taken[number - then]
            taken = {each: counts for each, counts in taken.items() if each > number - then}


def test_a_share_that_is_reached_exactly_is_within_the_limit() -> None:
    """`0.29 * 100` is less than 29 in floating point."""
    for most in range(101):
        limit = RefusedRowLimit(Quarantine(GOOD, SINK, most_share=most / 100), "0")
        (reached,) = limit.evaluate(1, 100 - most, most)
        assert reached.result.passed, reached.result.description
        if most < 100:
            (exceeded,) = limit.evaluate(2, 99 - most, most + 1)
            assert not exceeded.result.passed
