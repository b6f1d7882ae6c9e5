"""The lines of a run's log and of `verify` on what a restore makes of a checkpoint: one for each rule that changes something."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dagster_checkpoints.pipeline import FunctionSplitSource, Pipeline, Quarantine, Stage, StageInput, StageKind
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.state.errors import InputRowsGone, InputsChanged, RestoreError
from dagster_checkpoints.state.inputs import recorded_inputs
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    ChannelSnapshot,
    CheckpointMetadata,
    EnumeratorState,
    QuerySnapshot,
    Segment,
    StageInstanceSnapshot,
    StageMetadata,
    StateFile,
    TaskSnapshot,
    WatermarkAt,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from dagster_checkpoints.state.restore import validate_restore
from dagster_checkpoints.state.stage_names import with_uids

BY_K, POINTWISE = StageInput(key="k"), StageInput()
CHANGES = {
    "renamed": ("by uid", "'flights' is 'feed' in the checkpoint"),
    "between": ("other inputs", "'counts' keeps its state, and reads 'cleaned' in place of {feed!r}"),
    "reader": ("divided", "the query of p -> q -> r, with its state, into p -> q and r"),
    "removed": ("left behind", "the state of 'old'; rows for the sinks that 'old' had, unless they have been committed"),
    "no_sink": ("left behind", "rows for the sinks that 'shown' had, unless they have been committed"),
    "wider": ("rescaled", "2 to 3 instances of sums -> last, with the state of their keys"),
    "named": ("rescaled", "the instances 'a', 'b' of boards are now 'b', 'a'"),
    "narrower": ("rescaled", "3 to 1 instances of totals"),
    "shared": ("rescaled", "1 to 2 instances of files, which share its splits"),
}
"""By change of the pipeline, the name of its line, and the part of the line that it causes; in the order of the rules."""
NEW = {"between": "cleaned", "reader": "seen"}


class AnyStage(Stage):
    def transform(self, context: Any, **inputs: Any) -> Any:
        raise NotImplementedError


def pipeline(changed: Sequence[str] = ()) -> Pipeline:
    stages: list[Stage] = []

    def add(name: str, instances: Sequence[str] = "0", sink: bool = False, uid: str | None = None, **inputs: StageInput) -> None:
        kind = StageKind.DERIVED if inputs else StageKind.UNBOUNDED_SOURCE
        target = ParquetSink(f"/never/{name}") if sink else None
        stages.append(AnyStage(name, kind=kind, inputs=inputs, instances=list(instances), sink=target, uid=uid))

    feed = "flights" if "renamed" in changed else "feed"
    add(feed, uid="feed")
    if "between" in changed:
        add("cleaned", **{feed: POINTWISE})
    add("counts", "01", sink=True, **{"cleaned" if "between" in changed else feed: BY_K})
    add("p")
    add("q", p=POINTWISE)
    add("r", sink=True, q=POINTWISE)
    if "reader" in changed:
        add("seen", sink=True, q=POINTWISE)
    if "removed" not in changed:
        add("old", sink=True)
    add("shown", sink="no_sink" not in changed)
    add("behind", sink=True, shown=BY_K)
    add("clicks")
    add("sums", "012" if "wider" in changed else "01", clicks=BY_K)
    add("last", "012" if "wider" in changed else "01", sink=True, sums=POINTWISE)
    add("boards", "ba" if "named" in changed else "ab")
    add("totals", "0" if "narrower" in changed else "012", sink=True, boards=BY_K)
    instances = list("01" if "shared" in changed else "0")
    stages.append(
        FunctionSplitSource(lambda split: None, ["1"], schema="k string", name="files", instances=instances)  # type: ignore[arg-type]
    )
    add("files_read", sink=True, files=BY_K)
    return Pipeline("p", stages)


def checkpoint() -> CheckpointMetadata:
    before = pipeline()
    chains = [("p", "q", "r"), ("sums", "last")]
    alone = ((stage.name,) for stage in before.stages if not any(stage.name in chain for chain in chains))
    recorded = []
    for chain in (*chains, *alone):
        tasks = {}
        for index in range(before.stage(chain[0]).parallelism):
            state = (StateFile("state/0/1/4.zip", "sha of state", 1),) if chain[0] in ("p", "sums") else ()
            parts = {
                name: StageInstanceSnapshot(
                    transactions=("rows",) if name in ("shown", "old") else (),
                    state_plan=("count",) if name in ("r", "sums") else (),
                )
                for name in chain
            }
            tasks[index] = TaskSnapshot(parts, QuerySnapshot(3, state, sources=(f"source of {chain[0]}",)))
        recorded.append(ChainMetadata(chain[0], chain, tasks))
    inputs = recorded_inputs(before)
    stages = tuple(
        StageMetadata(
            stage.name,
            stage.parallelism,
            stage.instances,
            inputs=inputs[stage.name],
            enumerator=EnumeratorState(("1",)) if stage.name == "files" else None,
        )
        for stage in before.stages
    )
    return decode(encode(with_uids(CheckpointMetadata("p", 3, stages, tuple(recorded)), before)), "x")


def lines(changed: Sequence[str]) -> Iterator[str]:
    feed = "flights" if "renamed" in changed else "feed"
    found = [(CHANGES[each][0], CHANGES[each][1].format(feed=feed)) for each in CHANGES if each in changed]
    # Two rules leave something behind: each has a line of its own.
    for (name, _), parts in itertools.groupby(found, key=lambda each: (each[0], each[1] if each[0] == "left behind" else "")):
        yield f"{name}: {'; '.join(text for _, text in parts)}."
    new = [repr(NEW[each]) for each in NEW if each in changed]
    if new:
        yield f"new: {', '.join(new)} {'begins' if len(new) == 1 else 'begin'} without state."


def test_each_rule_that_changes_something_says_so_in_one_line() -> None:
    """All 512 combinations of nine changes: what is said of one does not depend on the others."""
    before = checkpoint()
    assert before.chains[0].name == "p" and before.stages[0].name == "feed"
    for number in range(len(CHANGES) + 1):
        for changed in itertools.combinations(CHANGES, number):
            now, left = pipeline(changed), {"removed", "no_sink"}.intersection(changed)
            plan = validate_restore(now, before, allow_non_restored_state=bool(left))
            assert plan.changes == tuple(lines(changed)), changed
            if left:
                with pytest.raises(
                    RestoreError, match=r"allow_non_restored_state.* rows .* committed|rows .* committed .*allow_non"
                ):
                    validate_restore(now, before)
            if not changed:
                assert plan.metadata == before


def test_a_quarantine_comes_too_late_for_a_source_that_has_ended() -> None:
    """The advice is not that for a stage of the user: there is no stage of refused rows that could read another one."""
    sink = ParquetSink("/never/b")

    def pipeline(quarantine: Quarantine | None = None) -> Pipeline:
        return Pipeline(
            "p", [AnyStage("old", kind=StageKind.BOUNDED_SOURCE, sink=ParquetSink("/never/a"), quarantine=quarantine)]
        )

    ended = TaskSnapshot({"old": StageInstanceSnapshot(rows_out=3)}, end_of_data="drain")
    stages, chains = (StageMetadata("old", 1, ("0",)),), (ChainMetadata("old", ("old",), {0: ended}),)
    metadata = CheckpointMetadata("p", 3, stages, chains)
    assert not validate_restore(pipeline(), metadata).new_stages
    with pytest.raises(
        InputRowsGone,
        match=r"Stage 'old' has a quarantine, and had none in checkpoint 3 of pipeline 'p'\. It has "
        r"emitted its last row there: .* Take the quarantine away from 'old', or",
    ):
        validate_restore(pipeline(Quarantine({"good": "v > 0"}, sink=sink)), metadata)


@pytest.mark.parametrize("in_flight", [(), (WatermarkAt(5),), (WatermarkAt(5), Segment((), 3))])
@pytest.mark.parametrize("instances", [["0"], ["0", "1"]], ids=["as before", "rescaled"])
def test_a_quarantine_in_place_of_a_stage_that_read_all_rows(in_flight: tuple[Any, ...], instances: list[str]) -> None:
    """What was on its way to that stage is no refused row: it would be committed as one."""

    def pipeline(refused: Any, instances: list[str], quarantine: Quarantine | None = None) -> Pipeline:
        feed = AnyStage("feed", kind=StageKind.UNBOUNDED_SOURCE)
        orders = AnyStage(
            "orders",
            inputs={"feed": StageInput(edge="all_to_all")},
            instances=instances,
            sink=ParquetSink("/never/a"),
            quarantine=quarantine,
        )
        return Pipeline("p", [feed, orders, *refused])

    sink = ParquetSink("/never/b")
    old = pipeline([AnyStage("orders_refused", inputs={"orders": POINTWISE}, sink=sink)], ["0"])
    saved = ChannelSnapshot("orders[0]->orders_refused[0]", 4, in_flight=in_flight)
    tasks = {"orders_refused": TaskSnapshot({"orders_refused": StageInstanceSnapshot()}, channels=(saved,))}
    chains = tuple(ChainMetadata(each.name, (each.name,), {0: tasks.get(each.name, TaskSnapshot())}) for each in old.stages)
    inputs = recorded_inputs(old)
    stages = tuple(StageMetadata(each.name, 1, ("0",), inputs=inputs[each.name]) for each in old.stages)
    metadata = CheckpointMetadata("p", 3, stages, chains)
    new = pipeline([], instances, Quarantine({"good": "v > 0"}, sink=sink))
    if Segment((), 3) in in_flight:
        with pytest.raises(InputsChanged, match=r"'orders_refused' commits the rows that a quarantine refuses.* checkpoint 3 of"):
            validate_restore(new, metadata)
    else:
        assert not validate_restore(new, metadata).new_stages
