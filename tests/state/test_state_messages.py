"""The full error texts when a checkpoint cannot be restored: what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dagster_checkpoints.pipeline import Pipeline, Stage, stage, unbounded_source
from dagster_checkpoints.state.errors import StateError
from dagster_checkpoints.state.key_groups import chosen_max_parallelism
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    OperatorState,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.restore import check_union_states, validate_restore

TWO = ("0", "1")


def pipeline(**parts: object) -> Pipeline:
    """live -> counts -> totals; `totals` may read something else."""

    @unbounded_source(instances=TWO)
    def live(context: object) -> None: ...

    @stage(instances=TWO)
    def counts(live: object) -> None: ...

    @stage(instances=TWO, sink=object())
    def totals(counts: object) -> None: ...

    stages: list[Stage] = [live, counts, totals]
    if parts.get("totals_read_live"):

        @stage(instances=TWO, sink=object(), name="totals")
        def other(live: object) -> None: ...

        stages = [live, stage(instances=TWO, sink=object(), name="counts")(lambda live: None), other]
    if parts.get("without_live"):
        feed = unbounded_source(instances=TWO, name="feed")(lambda context: None)
        stages = [feed, stage(instances=TWO, name="counts")(lambda feed: None), totals]
    return Pipeline("flights", stages)


def checkpoint(
    finished: dict[str, tuple[int, ...]] | None = None, *, chained: bool = False, without: str = "", extra: str = ""
) -> CheckpointMetadata:
    names = [name for name in ("live", "counts", "totals", extra) if name not in ("", without)]
    ended = finished or {}
    stages = tuple(StageMetadata(n, 2, TWO, ended.get(n, ()), len(ended.get(n, ())) == 2) for n in names)
    heads = [tuple(names)] if chained else [(name,) for name in names]
    chains = tuple(ChainMetadata(c[0], c, {i: TaskSnapshot() for i in range(2) if i not in ended.get(c[0], ())}) for c in heads)
    return CheckpointMetadata("flights", 7, stages=stages, chains=chains)


def foreign(*names: str) -> CheckpointMetadata:
    """A checkpoint of a pipeline of the same name that has other stages."""
    tasks = {name: {0: TaskSnapshot(stages={name: StageInstanceSnapshot()})} for name in names}
    stages = tuple(StageMetadata(name, 1, ("0",)) for name in names)
    return CheckpointMetadata("flights", 7, stages=stages, chains=tuple(ChainMetadata(n, (n,), tasks[n]) for n in names))


def union(finished: tuple[int, ...]) -> CheckpointMetadata:
    """`live` has union list state; the instances that have not finished wait at their end of data."""
    state = StageInstanceSnapshot(operator_states=(OperatorState("offsets", "union"),))
    tasks = {i: TaskSnapshot(stages={"live": state}, end_of_data="drain") for i in range(2) if i not in finished}
    stages = (StageMetadata("live", 2, TWO, finished),)
    return CheckpointMetadata("flights", 7, stages=stages, chains=(ChainMetadata("live", ("live",), tasks),))


CASES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: validate_restore(pipeline(), checkpoint({"totals": (0, 1)})),
        "Stage 'totals' is fully finished in checkpoint 7 of pipeline 'flights', so its predecessor 'counts' over POINTWISE "
        "must be fully finished; but 'counts' is still running. Its records would not be read. Take 'counts' out of the "
        "inputs of 'totals', give 'totals' another name so that it starts without state, or start the pipeline without this "
        "checkpoint.",
    ),
    (
        lambda: validate_restore(pipeline(), checkpoint({"totals": (1,)})),
        "Stage 'totals' is partly finished (instances 1) in checkpoint 7 of pipeline 'flights', so its predecessor 'counts' "
        "over POINTWISE must be at least partly finished; but 'counts' is still running. Its records would not be read. Take"
        " 'counts' out of the inputs of 'totals', give 'totals' another name so that it starts without state, or start the "
        "pipeline without this checkpoint.",
    ),
    (
        lambda: validate_restore(pipeline(), checkpoint({"counts": (0,), "totals": (0, 1), "live": (0, 1)})),
        "Stage 'totals' is fully finished in checkpoint 7 of pipeline 'flights', so its predecessor 'counts' over POINTWISE "
        "must be fully finished; but 'counts' is only partly finished (instances 0). Its records would not be read. Take "
        "'counts' out of the inputs of 'totals', give 'totals' another name so that it starts without state, or start the "
        "pipeline without this checkpoint.",
    ),
    (
        lambda: validate_restore(pipeline(), checkpoint({"totals": (0, 1)}, without="counts")),
        "Stage 'totals' is fully finished in checkpoint 7 of pipeline 'flights', so its predecessor 'counts' over POINTWISE "
        "must be fully finished; but 'counts' is not in the checkpoint, so it would run from its beginning. Its records would"
        " not be read. If 'counts' was renamed, write its former name as its uid. Otherwise take "
        "'counts' out of the inputs of 'totals', give 'totals' another name so that it starts without state, "
        "or start the pipeline without this checkpoint.",
    ),
    (
        lambda: validate_restore(pipeline(), checkpoint(extra="gone")),
        "Checkpoint 7 of pipeline 'flights' holds state of 'gone', which the pipeline 'flights' does not have (it has "
        "'counts', 'live', 'totals'). Put the stage back under that name; or, if it was removed on purpose, set "
        "allow_non_restored_state, which loses its state for ever.",
    ),
    (
        lambda: validate_restore(pipeline(), checkpoint(without="totals", extra="sums")),
        "Checkpoint 7 of pipeline 'flights' holds state of 'sums', which the pipeline 'flights' does not have (it has 'counts', "
        "'live', 'totals'). If a stage was renamed, write uid='sums' at 'totals': it then keeps its state. Otherwise put it "
        "back under that name; or, if it was removed on purpose, set allow_non_restored_state, which loses its state for ever.",
    ),
    (
        lambda: validate_restore(pipeline(), foreign("clicks", "visits")),
        "Checkpoint 7 of pipeline 'flights' holds state of 'clicks', 'visits', which the pipeline 'flights' does not have (it "
        "has 'counts', 'live', 'totals'). It has no stage of this pipeline: it is probably of another pipeline of the same "
        "name, whose state must not be given up. Give this pipeline another name or another storage. If it is the same "
        "pipeline, and all of its stages were renamed, keep their state: write the former name of each renamed stage as its uid "
        "(uid='clicks' or uid='visits'; new here: 'counts', 'live', 'totals').",
    ),
    (
        lambda: validate_restore(pipeline(without_live=True), checkpoint(chained=True), allow_non_restored_state=True),
        "In checkpoint 7 of pipeline 'flights' the stages live -> counts -> totals run as one Spark query, whose state "
        "belongs to all of them; 'live' is no longer in the pipeline. Put it back, or start without this checkpoint. "
        "(allow_non_restored_state can only leave whole chains behind, and the last stages of a chain.)",
    ),
    (
        lambda: validate_restore(pipeline(totals_read_live=True), checkpoint(chained=True)),
        "In checkpoint 7 of pipeline 'flights' the stages live -> counts -> totals run as one Spark query, in which 'totals' "
        "reads 'counts' and nothing else; now 'totals' reads 'live'. Spark's state belongs to the plan of that query. Restore"
        " the stages' order, or start without this checkpoint.",
    ),
    (
        lambda: check_union_states(union((0,))),
        "Stage 'live' has the union list state 'offsets', and its instances '0', '1' have finished while others run. What they "
        "held is part of the union, so checkpoint 7 is declined; the next one after all instances have finished can complete."
        " Use list or broadcast state if a part suffices.",
    ),
    (
        lambda: chosen_max_parallelism("counts", 2, 0, 0),
        "Stage 'counts' sets max_parallelism=0; expected 1 to 32768. Choose a number that its instances will never exceed: it"
        " cannot be changed later without losing the state.",
    ),
    (
        lambda: chosen_max_parallelism("counts", 2, 7, 6),
        "Stage 'counts' sets max_parallelism=7, and the checkpoint was taken with 6, by which its keys were grouped. Set "
        "max_parallelism=6, leave it out, or start the pipeline without this checkpoint.",
    ),
    (
        lambda: chosen_max_parallelism("counts", 9, None, 6),
        "Stage 'counts' has 9 instances and a maximum parallelism of 6: some would own no keys. Start without this "
        "checkpoint, or give the stage at most 6 instances.",
    ),
    (
        lambda: chosen_max_parallelism("counts", 9, 6, 0),
        "Stage 'counts' has 9 instances and a maximum parallelism of 6: some would own no keys. Set a higher one, or give the"
        " stage at most 6 instances.",
    ),
]


@pytest.mark.parametrize(("act", "text"), CASES)
def test_the_whole_text(act: Callable[[], object], text: str) -> None:
    with pytest.raises(StateError) as error:
        act()
    assert str(error.value) == text


def test_other_instances_than_in_the_checkpoint() -> None:
    @unbounded_source(instances=["EWR"], sink=object())
    def live(context: object) -> None: ...

    stages = (StageMetadata("live", 2, TWO),)
    metadata = CheckpointMetadata(
        "flights", 7, stages=stages, chains=(ChainMetadata("live", ("live",), {0: TaskSnapshot(), 1: TaskSnapshot()}),)
    )
    with pytest.raises(StateError) as error:
        validate_restore(Pipeline("flights", [live]), metadata)
    assert str(error.value) == (
        "Stage 'live' has no instance '0', '1' any more; in checkpoint 7 of pipeline 'flights' it runs: the position up to which "
        "it has read would be lost. Put it back; or end it first (dagster-checkpoints end-source live --instance 0), and restore "
        "a checkpoint after its end."
    )
