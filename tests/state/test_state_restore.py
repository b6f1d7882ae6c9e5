"""Which checkpoints fit which pipelines: rows of stages and edges, and what a restore then starts."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from dagster_checkpoints.pipeline import (
    EdgePattern,
    Pipeline,
    StageInput,
    TaskId,
    bounded_source,
    build_chains,
    stage,
    unbounded_source,
)
from dagster_checkpoints.state.errors import (
    ChainLayoutChanged,
    InputRowsGone,
    InputsChanged,
    InstancesChanged,
    InvalidMaxParallelism,
    MaxParallelismChanged,
    NonRestoredState,
    ParallelismTooHigh,
    PartlyFinishedUnionState,
    SinkRemoved,
    SourcesChanged,
    StatePartitionsChanged,
    UnfinishedPredecessor,
)
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    EnumeratorState,
    FusedSourceSnapshot,
    InputMetadata,
    OperatorState,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.restore import RestorePlan, check_union_states, validate_restore


@dataclass(frozen=True)
class StageOf:
    name: str
    instances: tuple[str, ...]
    split_interval: float | None = None
    state_partitions: int | None = None

    @property
    def uid(self) -> str:
        return self.name


@dataclass(frozen=True)
class EdgeOf:
    source: str
    target: str
    pattern: EdgePattern
    input: StageInput = field(default_factory=StageInput)


@dataclass(frozen=True)
class PipelineOf:
    name: str
    stages: tuple[StageOf, ...]
    edges: tuple[EdgeOf, ...]


EDGE = {"ALL": EdgePattern.ALL_TO_ALL, "PW": EdgePattern.POINTWISE}


def described(row: str) -> tuple[PipelineOf, CheckpointMetadata]:
    """Reads ``V0 p3 fin{0,1} -ALL-> V1 p4 new; V2 p1 gone``: a pipeline and a checkpoint of it.

    `new` stages are not in the checkpoint, `gone` ones not in the pipeline. Every stage is a chain of its
    own.
    """
    stages: dict[str, StageOf] = {}
    recorded: dict[str, StageMetadata] = {}
    edges = []
    for statement in row.split(";"):
        parts = re.split(r"-(ALL|PW)->", statement)
        names = []
        for part in parts[::2]:
            match = re.match(r"^(\w+)(?: p(\d+))?(?: fin\{([\d,]+)\})?(?: (new|gone))?$", part.strip())
            assert match, part
            name, parallelism, finished, fate = match.groups()
            names.append(name)
            if parallelism is None:
                continue
            instances = tuple(str(i) for i in range(int(parallelism)))
            indices = tuple(int(i) for i in finished.split(",")) if finished else ()
            if fate != "gone":
                stages[name] = StageOf(name, instances)
            if fate != "new":
                fully = len(indices) == len(instances)
                recorded[name] = StageMetadata(name, len(instances), instances, indices, fully)
        edges += [EdgeOf(s, t, EDGE[p]) for s, t, p in zip(names, names[1:], parts[1::2], strict=False)]
    chains = tuple(
        ChainMetadata(s.name, (s.name,), {i: TaskSnapshot() for i in range(s.parallelism) if i not in s.finished})
        for s in recorded.values()
    )
    pipeline = PipelineOf("p", tuple(stages.values()), tuple(edges))
    return pipeline, CheckpointMetadata("p", 7, stages=tuple(recorded.values()), chains=chains)


def restore(row: str, allow_non_restored_state: bool = False) -> RestorePlan:
    pipeline, metadata = described(row)
    return validate_restore(pipeline, metadata, allow_non_restored_state)


@pytest.mark.parametrize(
    "row",
    [
        "V0 p2 -ALL-> V1 p2",
        "V0 p2 fin{0,1} -ALL-> V1 p2",
        "V0 p2 fin{0,1} -ALL-> V1 p2 fin{0,1}",
        "V0 p2 fin{0,1} -ALL-> V1 p2 fin{1}",
        "V0 p2 fin{1} -PW-> V1 p2 fin{1}",
        "V0 p2 fin{0,1} -PW-> V1 p2 fin{0,1}",
        "V0 p2 fin{1} -ALL-> V1 p2",
        "V0 p2 new -ALL-> V1 p2",
        "V0 p2 -ALL-> V1 p2 new",
        "V0 p2 fin{0,1} -ALL-> V1 p2; V2 p1 new",
        "V0 p2 fin{0,1} -ALL-> V2 p1 fin{0}; V1 p1 fin{0} -ALL-> V2",
    ],
)
def test_fits(row: str) -> None:
    assert restore(row).next_checkpoint_id == 8


@pytest.mark.parametrize(
    ("row", "stage_name", "predecessor", "words"),
    [
        ("V0 p2 -ALL-> V1 p2 fin{0,1}", "V1", "V0", "must be fully finished; but 'V0' is still running"),
        ("V0 p2 fin{1} -PW-> V1 p2 fin{0,1}", "V1", "V0", "only partly finished (instances 1)"),
        ("V0 p2 fin{1} -ALL-> V1 p2 fin{1}", "V1", "V0", "partly finished (instances 1)"),
        ("V0 p2 -PW-> V1 p2 fin{1}", "V1", "V0", "at least partly finished"),
        # ALL wins where both join a pair, whichever is named first.
        ("V0 p2 fin{1} -PW-> V1 p2 fin{1}; V0 -ALL-> V1", "V1", "V0", "over ALL_TO_ALL"),
        ("V0 p2 fin{1} -ALL-> V1 p2 fin{1}; V0 -PW-> V1", "V1", "V0", "over ALL_TO_ALL"),
        # A stage that the checkpoint does not know counts as running.
        ("V0 p1 new -ALL-> V1 p1 fin{0}", "V1", "V0", "not in the checkpoint"),
        ("V0 p1 new -PW-> V1 p2 fin{0}", "V1", "V0", "not in the checkpoint"),
        # One bad predecessor among good ones.
        ("V0 p1 fin{0} -ALL-> V2 p1 fin{0}; V1 p1 -ALL-> V2", "V2", "V1", "still running"),
    ],
)
def test_a_finished_stage_behind_one_that_is_not(row: str, stage_name: str, predecessor: str, words: str) -> None:
    with pytest.raises(UnfinishedPredecessor) as error:
        restore(row)
    text = str(error.value)
    assert text.startswith(f"Stage '{stage_name}' is ")
    assert f"predecessor '{predecessor}'" in text
    assert words in text
    assert f"ake '{predecessor}' out of the inputs" in text


def waiting(row: str, stage: str, ended: tuple[int, ...]) -> tuple[PipelineOf, CheckpointMetadata]:
    """As described; these instances of a stage wait behind their end of data."""
    pipeline, metadata = described(row)
    tasks = {index: TaskSnapshot(end_of_data="drain" if index in ended else "none") for index in range(2)}
    chains = tuple(msgspec.structs.replace(c, tasks=tasks) if c.name == stage else c for c in metadata.chains)
    return pipeline, msgspec.structs.replace(metadata, chains=chains)


@pytest.mark.parametrize("pattern", ["ALL", "PW"])
def test_a_predecessor_that_emits_nothing_more(pattern: str) -> None:
    plan = validate_restore(*waiting(f"up p2 -{pattern}-> down p2 fin{{0,1}}", "up", (0, 1)))
    assert {str(task) for task in plan.finished} == {"down[0]", "down[1]"}
    assert {str(task) for task in plan.after_finish} == {"up[0]", "up[1]"}


@pytest.mark.parametrize("ended", [(), (0,)])
def test_a_predecessor_that_may_still_emit(ended: tuple[int, ...]) -> None:
    with pytest.raises(UnfinishedPredecessor, match="'down' is fully finished"):
        validate_restore(*waiting("up p2 -PW-> down p2 fin{0,1}", "up", ended))


def test_state_that_no_stage_claims() -> None:
    row = "V0 p1 -PW-> V1 p1; V2 p1 gone"
    with pytest.raises(NonRestoredState, match=r"'V2'.*allow_non_restored_state"):
        restore(row)
    plan = restore(row, allow_non_restored_state=True)
    assert plan.dropped == ("V2",)
    assert plan.chains == (("V0",), ("V1",))
    assert TaskId("V2", 0) not in plan.tasks


def test_a_fully_finished_stage_may_be_removed() -> None:
    plan = restore("V0 p1; V2 p2 fin{0,1} gone")
    assert plan.dropped == ("V2",)
    assert plan.finished == frozenset() == plan.fully_finished


def test_an_instance_that_has_not_finished_must_not_be_left_out() -> None:
    pipeline, metadata = described("V0 p2 fin{1} -ALL-> V1 p2")
    for instances in (("1", "2"), ("1",)):
        changed = PipelineOf("p", (StageOf("V0", instances), pipeline.stages[1]), pipeline.edges)
        with pytest.raises(InstancesChanged, match="Stage 'V0' has no instance '0' any more"):
            validate_restore(changed, metadata)
    changed = PipelineOf("p", (StageOf("V0", ("9", "0")), pipeline.stages[1]), pipeline.edges)
    plan = validate_restore(changed, metadata)
    assert plan.tasks.keys() == {TaskId("V0", 0), TaskId("V0", 1), TaskId("V1", 0), TaskId("V1", 1)} and not plan.finished


def test_a_fully_finished_stage_may_have_other_instances() -> None:
    pipeline, metadata = described("V0 p2 fin{0,1} -ALL-> V1 p1")
    for instances in [("x",), ("x", "y", "z")]:
        changed = PipelineOf("p", (StageOf("V0", instances), pipeline.stages[1]), pipeline.edges)
        plan = validate_restore(changed, metadata)
        assert plan.fully_finished == {"V0"}
        assert plan.finished == {TaskId("V0", i) for i in range(len(instances))}, "none of them runs again"


def with_key_groups(row: str, groups: int) -> tuple[PipelineOf, CheckpointMetadata]:
    """The checkpoint records a number of key groups for every stage."""
    pipeline, metadata = described(row)
    stages = tuple(msgspec.structs.replace(stage, max_parallelism=groups) for stage in metadata.stages)
    return pipeline, msgspec.structs.replace(metadata, stages=stages)


@pytest.mark.parametrize(
    ("row", "recorded", "chosen", "found"),
    [
        # The number in the checkpoint; for a new stage the default or the set number.
        ("V0 p2; V1 p200 new", 6, {}, {"V0": 6, "V1": 512}),
        ("V0 p2; V1 p200 new", 6, {"V0": 6, "V1": 200}, {"V0": 6, "V1": 200}),
        # A checkpoint without a number.
        ("V0 p2", 0, {}, {"V0": 128}),
        ("V0 p2", 0, {"V0": 7}, {"V0": 7}),
        # A fully finished stage holds no keys.
        ("V0 p2 fin{0,1} -ALL-> V1 p1", 6, {"V0": 7}, {"V1": 6}),
        ("V0 p2 fin{0}", 6, {}, {"V0": 6}),
    ],
)
def test_the_number_of_key_groups_is_fixed(row: str, recorded: int, chosen: dict[str, int], found: dict[str, int]) -> None:
    assert validate_restore(*with_key_groups(row, recorded), max_parallelism=chosen).max_parallelism == found


@pytest.mark.parametrize(
    ("row", "recorded", "chosen", "error", "words"),
    [
        ("V0 p2", 6, 7, MaxParallelismChanged, "'V0' sets max_parallelism=7, and the checkpoint was taken with 6"),
        ("V0 p2 fin{1}", 6, 128, MaxParallelismChanged, "'V0' sets max_parallelism=128"),
        ("V0 p2", 0, 0, InvalidMaxParallelism, "'V0' sets max_parallelism=0"),
        ("V0 p2", 6, 32769, InvalidMaxParallelism, "'V0' sets max_parallelism=32769"),
        ("V0 p2", 0, 1, ParallelismTooHigh, "'V0' has 2 instances and a maximum parallelism of 1"),
        ("V0 p2 new", 0, 1, ParallelismTooHigh, "'V0' has 2 instances and a maximum parallelism of 1"),
    ],
)
def test_key_groups_that_do_not_fit(row: str, recorded: int, chosen: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        validate_restore(*with_key_groups(row, recorded), max_parallelism={"V0": chosen})


@pytest.mark.parametrize(
    ("recorded", "now", "words"),
    [
        (8, 4, r"state_partitions=4, and state_partitions=8 in checkpoint 7 .* Set state_partitions=8; or end"),
        (8, None, r"no state_partitions, and state_partitions=8 in checkpoint 7 .* Set state_partitions=8; or end"),
        (0, 8, r"state_partitions=8, and no state_partitions in checkpoint 7 .* Leave out state_partitions; or end"),
    ],
)
def test_another_number_of_state_partitions(recorded: int, now: int | None, words: str) -> None:
    pipeline, metadata = described("V0 p2; V1 p2 fin{0,1}")
    stages = [dataclasses.replace(stage, state_partitions=now) for stage in pipeline.stages]
    partitions = {"state_partitions": recorded, "max_parallelism": recorded}
    taken = msgspec.structs.replace(
        metadata, stages=tuple(msgspec.structs.replace(stage, **partitions) for stage in metadata.stages)
    )
    with pytest.raises(StatePartitionsChanged, match=f"Stage 'V0' has {words}"):
        validate_restore(PipelineOf("p", tuple(stages), pipeline.edges), taken)
    stages[0] = dataclasses.replace(stages[0], state_partitions=recorded or None)
    plan = validate_restore(PipelineOf("p", tuple(stages), pipeline.edges), taken)
    assert plan.max_parallelism == {"V0": recorded or 128}, "a stage that has fully finished may have any number"


def test_a_source_does_not_become_a_split_source_nor_the_other_way_round() -> None:
    pipeline, metadata = described("V0 p1; V1 p1 fin{0}")
    splits = tuple(msgspec.structs.replace(stage, enumerator=EnumeratorState(("a",))) for stage in metadata.stages)
    was_one = msgspec.structs.replace(metadata, stages=splits)
    with pytest.raises(SourcesChanged, match="'V0' is not a split source, and was one in checkpoint 7"):
        validate_restore(pipeline, was_one)
    is_one = PipelineOf("p", tuple(dataclasses.replace(stage, split_interval=1.0) for stage in pipeline.stages), ())
    with pytest.raises(SourcesChanged, match="'V0' is a split source, and was not one in checkpoint 7"):
        validate_restore(is_one, metadata)
    assert validate_restore(is_one, was_one).enumerators["V0"] == EnumeratorState(("a",))


def test_an_enumerator_is_state_even_of_a_stage_that_has_fully_finished() -> None:
    pipeline, metadata = described("V0 p1; V1 p1 fin{0} gone")
    enumerator = EnumeratorState(finished=("x",))
    stages = (metadata.stages[0], msgspec.structs.replace(metadata.stages[1], enumerator=enumerator))
    holding = msgspec.structs.replace(metadata, stages=stages)
    with pytest.raises(NonRestoredState, match="'V1'"):
        validate_restore(pipeline, holding)
    assert validate_restore(pipeline, holding, allow_non_restored_state=True).enumerators == {}
    both = PipelineOf("p", (*pipeline.stages, StageOf("V1", ("0",))), ())
    assert validate_restore(both, holding).enumerators == {"V1": enumerator}


def test_which_state_each_task_starts_from() -> None:
    pipeline, metadata = described("V0 p2 fin{0,1} -ALL-> V1 p3 fin{2}; V1 -ALL-> V2 p1; V3 p1 new")
    waiting = TaskSnapshot(end_of_data="drain")
    chains = (*metadata.chains[:2], ChainMetadata("V2", ("V2",), {0: waiting}))
    plan = validate_restore(pipeline, CheckpointMetadata("p", 7, stages=metadata.stages, chains=chains))
    assert plan.fully_finished == {"V0"}
    assert plan.finished == {TaskId("V0", 0), TaskId("V0", 1), TaskId("V1", 2)}
    assert plan.chains == (("V1",), ("V2",))
    assert plan.finished_chains == (("V0",),)
    assert plan.new_stages == ("V3",)
    assert set(plan.tasks) == {TaskId("V1", 0), TaskId("V1", 1), TaskId("V2", 0)}
    # It had finished its operators: not finished, but waiting for the final checkpoint.
    assert plan.after_finish == {TaskId("V2", 0)}


# New stages


def recorded(name: str, *, emitted: int = 0, ended: bool = False, finished: bool = False) -> CheckpointMetadata:
    """A checkpoint of one stage of one instance."""
    task = TaskSnapshot({name: StageInstanceSnapshot(rows_out=emitted)}, end_of_data="drain" if ended else "none")
    stages = (StageMetadata(name, 1, ("0",), (0,) if finished else (), finished),)
    return CheckpointMetadata("p", 5, stages=stages, chains=(ChainMetadata(name, (name,), {} if finished else {0: task}),))


def read_by_a_new_stage(mode: str) -> PipelineOf:
    edge = EdgeOf("old", "new", EDGE["ALL"], StageInput(mode=mode))  # type: ignore[arg-type]
    return PipelineOf("p", (StageOf("old", ("0",)), StageOf("new", ("0",))), (edge,))


@pytest.mark.parametrize("mode", ["stream", "static"])
@pytest.mark.parametrize("fate", [{"finished": True}, {"ended": True, "emitted": 3}])
def test_a_new_stage_does_not_read_one_that_has_ended(mode: str, fate: dict[str, int]) -> None:
    with pytest.raises(InputRowsGone) as error:
        validate_restore(read_by_a_new_stage(mode), recorded("old", **fate))
    how = " as a static input" if mode == "static" else ""
    assert str(error.value) == (
        f"Stage 'new' is not in checkpoint 5 of pipeline 'p', and reads 'old'{how}, which has emitted its last row there. These "
        "rows are not in the checkpoint, and 'old' does not emit them again: 'new' would start without them. Add a copy of 'old' "
        "under another name, which runs from its beginning, and let 'new' read that one; or let it read what the sink of 'old' "
        "has written, as a bounded source; or start the pipeline without this checkpoint (restore_from: none)."
    )


def test_every_new_stage_is_checked() -> None:
    pipeline = PipelineOf(
        "p",
        tuple(StageOf(name, ("0",)) for name in ("old", "known", "new")),
        (EdgeOf("old", "known", EDGE["PW"]), EdgeOf("old", "new", EDGE["PW"])),
    )
    metadata = recorded("old", finished=True)
    known = StageMetadata("known", 1, ("0",))
    chains = (*metadata.chains, ChainMetadata("known", ("known",), {0: TaskSnapshot()}))
    with pytest.raises(InputRowsGone, match=r"Stage 'new' .* reads 'old'"):
        validate_restore(pipeline, CheckpointMetadata("p", 5, stages=(*metadata.stages, known), chains=chains))


def test_a_new_stage_does_not_read_one_that_has_ended_in_part() -> None:
    with pytest.raises(InputRowsGone, match=r"'V1' .* reads 'V0', which has in part emitted its last row"):
        restore("V0 p2 fin{0} -PW-> V1 p2 new")


@pytest.mark.parametrize("instances", [1, 2, 3])
def test_other_instances_of_a_stage_that_has_ended_in_part_do_not_hide_that(instances: int) -> None:
    pipeline, metadata = described("V0 p2 fin{0,1} -ALL-> V1 p2 fin{0} -ALL-> V2 p1 new")
    changed = tuple(replace(s, instances=tuple(map(str, range(instances)))) if s.name == "V1" else s for s in pipeline.stages)
    with pytest.raises(InputRowsGone, match=r"'V2' .* reads 'V1', which has in part emitted its last row"):
        validate_restore(replace(pipeline, stages=changed), metadata)


def test_a_new_stage_reads_a_running_one_from_now_on_but_not_as_half_a_table() -> None:
    for mode, emitted in (("stream", 3), ("stream", 0), ("static", 0)):
        assert validate_restore(read_by_a_new_stage(mode), recorded("old", emitted=emitted)).new_stages == ("new",)
    with pytest.raises(InputRowsGone, match="reads 'old' as a static input, which has emitted 3 rows before it"):
        validate_restore(read_by_a_new_stage("static"), recorded("old", emitted=3))


# Inputs


BY_K = StageInput(key="k")


def reading(*edges: EdgeOf, inputs: tuple[InputMetadata, ...] | None = None, finished: bool = False) -> RestorePlan:
    """Restores a pipeline in which `to` reads as `edges` say, from a checkpoint in which it read `inputs`."""
    stages = tuple(StageOf(name, ("0", "1")) for name in ("a", "b", "to"))
    over = frozenset(("a", "b", "to") if finished else ())
    known = tuple(
        StageMetadata(s.name, 2, s.instances, (0, 1) if s.name in over else (), s.name in over, inputs=()) for s in stages
    )
    chains = tuple(
        ChainMetadata(s.name, (s.name,), {} if s.name in over else {0: TaskSnapshot(), 1: TaskSnapshot()}) for s in stages
    )
    known = (*known[:2], msgspec.structs.replace(known[2], inputs=inputs))
    return validate_restore(PipelineOf("p", stages, edges), CheckpointMetadata("p", 5, stages=known, chains=chains))


FROM_A = EdgeOf("a", "to", EDGE["ALL"], BY_K)
FROM_B = EdgeOf("b", "to", EDGE["PW"])
RECORDED = (InputMetadata("a", "stream", "all_to_all", "k"), InputMetadata("b"))


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        (
            (EdgeOf("a", "to", EDGE["ALL"], StageInput(key="v")), FROM_B),
            "input 'a' was a stream over ALL_TO_ALL by key 'k', is now a stream over ALL_TO_ALL by key 'v'",
        ),
        ((EdgeOf("a", "to", EDGE["PW"]), FROM_B), "by key 'k', is now a stream over POINTWISE"),
        ((EdgeOf("a", "to", EDGE["ALL"], StageInput(mode="static")), FROM_B), "by key 'k', is now a static input"),
        ((FROM_A, EdgeOf("b", "to", EDGE["ALL"])), "input 'b' was a stream over POINTWISE, is now a stream over ALL_TO_ALL"),
        ((FROM_A,), "input 'b' was a stream over POINTWISE, is now none"),
        ((FROM_B,), "input 'a' was a stream over ALL_TO_ALL by key 'k', is now none"),
    ],
)
def test_a_stage_that_reads_otherwise(edges: tuple[EdgeOf, ...], words: str) -> None:
    with pytest.raises(InputsChanged, match="Stage 'to' does not read its inputs as in checkpoint 5 of pipeline 'p': ") as error:
        reading(*edges, inputs=RECORDED)
    assert words in str(error.value)
    reading(*edges, inputs=None)  # of a release that did not record it
    reading(*edges, inputs=RECORDED, finished=True)


def test_a_further_input_of_a_stage_with_inputs_on_record() -> None:
    with pytest.raises(InputsChanged, match="input 'b' was none, is now a stream over POINTWISE"):
        reading(FROM_A, FROM_B, inputs=RECORDED[:1])
    with pytest.raises(InputsChanged, match="input 'b' was none"):
        reading(FROM_B, inputs=())


def test_all_changes_of_a_stage_are_reported_together() -> None:
    twice = (InputMetadata("b"), InputMetadata("b", "static"))
    with pytest.raises(InputsChanged) as error:
        reading(FROM_A, FROM_A, EdgeOf("a", "to", EDGE["PW"]), inputs=twice)
    assert str(error.value) == (
        "Stage 'to' does not read its inputs as in checkpoint 5 of pipeline 'p': input 'b' was a static input and a stream over "
        "POINTWISE, is now none; input 'a' was none, is now a stream over ALL_TO_ALL by key 'k' and a stream over ALL_TO_ALL by "
        "key 'k' and a stream over POINTWISE. Its state, and the records on their way to it, belong to the inputs of the "
        "checkpoint: with others, rows that belong together would meet in different instances, or not at all. Restore the inputs "
        "as they were; or end the old pipeline with a drain, which emits and commits all that it holds, and begin with the new "
        "inputs as a new start (restore_from: none)."
    )


def test_inputs_are_compared_behind_a_stage_without_any_on_record() -> None:
    stages = (StageOf("a", ("0",)), StageOf("to", ("0",)))
    known = (StageMetadata("a", 1, ("0",)), StageMetadata("to", 1, ("0",), inputs=()))
    chains = tuple(ChainMetadata(name, (name,), {0: TaskSnapshot()}) for name in ("a", "to"))
    with pytest.raises(InputsChanged, match="Stage 'to' does not read"):
        validate_restore(PipelineOf("p", stages, (FROM_A,)), CheckpointMetadata("p", 5, stages=known, chains=chains))


def test_the_order_of_inputs_does_not_matter() -> None:
    assert reading(FROM_B, FROM_A, inputs=RECORDED).chains == (("a",), ("b",), ("to",))


# The layout of chains


def chained(*edges: tuple[str, str]) -> tuple[PipelineOf, CheckpointMetadata]:
    """A checkpoint of the chain a -> b -> c, and a pipeline of these stages with the edges given."""
    names = ("a", "b", "c")
    pipeline = PipelineOf(
        "p",
        tuple(StageOf(name, ("0",)) for name in dict.fromkeys((*names, *(target for _, target in edges)))),
        tuple(EdgeOf(s, t, EdgePattern.POINTWISE) for s, t in edges),
    )
    recorded = tuple(StageMetadata(name, 1, ("0",)) for name in names)
    return pipeline, CheckpointMetadata("p", 3, stages=recorded, chains=(ChainMetadata("a", names, {0: TaskSnapshot()}),))


def fused(*edges: tuple[str, str], ended: bool = True) -> tuple[PipelineOf, CheckpointMetadata]:
    """A checkpoint of the chain of the fused sources a and b, of c, which reads both, and of d; a has ended."""
    names, read = ("a", "b", "c", "d"), edges or (("a", "c"), ("b", "c"), ("c", "d"))
    stages = dict.fromkeys((*names, *(name for edge in edges for name in edge)))
    pipeline = PipelineOf(
        "p", tuple(StageOf(name, ("0",)) for name in stages), tuple(EdgeOf(s, t, EdgePattern.POINTWISE) for s, t in read)
    )
    inputs = {"c": (InputMetadata("a"), InputMetadata("b")), "d": (InputMetadata("c"),)}
    recorded = [StageMetadata(name, 1, ("0",), inputs=inputs.get(name, ())) for name in names]
    if ended:
        recorded[0] = msgspec.structs.replace(recorded[0], finished=(0,), fully_finished=True)
    sources = (FusedSourceSnapshot("a", 0, ended=ended), FusedSourceSnapshot("b", 1))
    chain = ChainMetadata("a", names, {0: TaskSnapshot(fused=sources)})
    return pipeline, CheckpointMetadata("p", 3, stages=tuple(recorded), chains=(chain,))


def test_a_task_runs_on_after_one_of_its_fused_sources_has_finished() -> None:
    plan = validate_restore(*fused())
    assert (plan.chains, plan.finished_chains) == ((("a", "b", "c", "d"),), ())
    assert (plan.fully_finished, plan.finished) == ({"a"}, frozenset())
    assert plan.tasks[TaskId("a", 0)].ended_sources == {"a"}
    assert validate_restore(*fused(ended=False)).fully_finished == frozenset()


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ((("a", "c"), ("c", "d")), "now 'c' reads 'a'"),  # b is no source of it any more
        ((("a", "c"), ("b", "c"), ("x", "c"), ("c", "d")), "now 'c' reads 'a', 'b', 'x'"),
        ((("a", "c"), ("a", "b"), ("b", "c"), ("c", "d")), "now 'b' reads 'a', whose rows do not leave that query"),
    ],
)
def test_a_chain_with_fused_sources_that_reads_others_is_not_divided(edges: tuple[tuple[str, str], ...], words: str) -> None:
    with pytest.raises(ChainLayoutChanged, match=re.escape(words)):
        validate_restore(*fused(*edges))


def test_the_recorded_layout_is_used_again() -> None:
    assert validate_restore(*chained(("a", "b"), ("b", "c"))).chains == (("a", "b", "c"),)


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ((("a", "c"), ("c", "b")), "'b' reads 'a' and nothing else; now 'b' reads 'c'"),
        ((("a", "b"), ("b", "c"), ("a", "c")), "now 'c' reads 'b', 'a'"),
        ((("a", "b"),), "now 'c' reads nothing"),
    ],
)
def test_a_chain_that_cannot_be_built_again(edges: tuple[tuple[str, str], ...], words: str) -> None:
    with pytest.raises(ChainLayoutChanged, match="a -> b -> c") as error:
        validate_restore(*chained(*edges))
    assert words in str(error.value)


def test_a_stage_that_read_others_does_not_divide_a_chain() -> None:
    """The release that took the checkpoint did not record the inputs of `d`."""
    pipeline, metadata = chained(("a", "b"), ("b", "c"), ("b", "d"))
    stages = (*metadata.stages, StageMetadata("d", 1, ("0",)))
    chains = (*metadata.chains, ChainMetadata("d", ("d",), {0: TaskSnapshot()}))
    with pytest.raises(ChainLayoutChanged) as error:
        validate_restore(pipeline, CheckpointMetadata("p", 3, stages=stages, chains=chains))
    assert str(error.value) == (
        "In checkpoint 3 of pipeline 'p' the stages a -> b -> c run as one Spark query; now 'd' reads 'b', whose rows do not "
        "leave that query. The query's state cannot be divided for that: a stage would read other rows. Take the change back, or "
        "start the pipeline without this checkpoint (restore_from: none). With Pipeline(..., chaining=False) from that start on, "
        "each stage has a query of its own."
    )


def test_a_stage_is_added_behind_the_last_one_of_a_chain() -> None:
    plan = validate_restore(*chained(("a", "b"), ("b", "c"), ("c", "d")))
    assert (plan.chains, plan.new_stages) == ((("a", "b", "c"),), ("d",))


def test_a_sink_inside_a_chain_divides_it() -> None:
    @unbounded_source(sink=object())
    def a(context: object) -> None: ...

    @stage
    def b(a: object) -> None: ...

    @stage(sink=object())
    def c(b: object) -> None: ...

    plan = validate_restore(Pipeline("p", [a, b, c]), chained()[1])
    assert (plan.chains, plan.divided) == ((("a",), ("b", "c")), dict.fromkeys("ab", ("a", "b", "c")))


def test_stages_that_could_share_a_query_keep_theirs() -> None:
    @unbounded_source
    def a(context: object) -> None: ...

    @stage(sink=object())
    def b(a: object) -> None: ...

    stages = tuple(StageMetadata(name, 1, ("0",)) for name in "ab")
    chains = tuple(ChainMetadata(name, (name,), {0: TaskSnapshot()}) for name in "ab")
    pipeline = Pipeline("p", [a, b])
    assert build_chains(pipeline)[0].stages == ("a", "b")
    assert validate_restore(pipeline, CheckpointMetadata("p", 3, stages=stages, chains=chains)).chains == (("a",), ("b",))


def test_a_finished_chain_with_a_sink_inside_does_not_run_as_one() -> None:
    @bounded_source(sink=object())
    def a(context: object) -> None: ...

    @stage
    def b(a: object) -> None: ...

    @stage(sink=object())
    def c(b: object) -> None: ...

    plan = validate_restore(Pipeline("p", [a, b, c]), finished_chain(("a", "b"), ("b", "c"))[1])
    assert (plan.finished_chains, plan.changes) == ((("a",), ("b", "c")), ()), "it has no state"


@pytest.mark.parametrize("waiting", [(), ("rows of checkpoint 3",)])
def test_a_sink_that_is_removed(waiting: tuple[str, ...]) -> None:
    @unbounded_source
    def a(context: object) -> None: ...

    @stage(sink=object())
    def b(a: object) -> None: ...

    held = TaskSnapshot({"a": StageInstanceSnapshot(transactions=waiting)})
    chains = (ChainMetadata("a", ("a",), {0: held}), ChainMetadata("b", ("b",), {0: TaskSnapshot()}))
    stages = tuple(StageMetadata(name, 1, ("0",)) for name in "ab")
    metadata, pipeline = CheckpointMetadata("p", 3, stages=stages, chains=chains), Pipeline("p", [a, b])
    if waiting:
        with pytest.raises(SinkRemoved, match=r"Stage 'a' has no sink\. In checkpoint 3 of pipeline 'p' it has one"):
            validate_restore(pipeline, metadata)
    else:
        assert validate_restore(pipeline, metadata).chains == (("a",), ("b",))
    assert validate_restore(pipeline, metadata, allow_non_restored_state=True).chains == (("a",), ("b",))


def finished_chain(*edges: tuple[str, str]) -> tuple[PipelineOf, CheckpointMetadata]:
    pipeline, metadata = chained(*edges)
    stages = tuple(StageMetadata(s.name, 1, ("0",), (0,), True) for s in metadata.stages)
    return pipeline, CheckpointMetadata("p", 3, stages=stages, chains=(ChainMetadata("a", ("a", "b", "c")),))


def test_a_finished_chain_stays_as_it_was() -> None:
    plan = validate_restore(*finished_chain(("a", "b"), ("b", "c")))
    assert (plan.chains, plan.finished_chains, plan.finished) == ((), (("a", "b", "c"),), {TaskId("a", 0)})


def test_a_changed_finished_chain_does_not_run_and_needs_no_layout() -> None:
    alone = (("a",), ("b",), ("c",))
    everyone = {TaskId(name, 0) for name in "abc"}
    other_input = validate_restore(*finished_chain(("a", "b"), ("a", "c")))
    assert (other_input.finished_chains, other_input.finished) == (alone, everyone)

    pipeline, metadata = finished_chain(("a", "b"), ("b", "c"))
    wider = PipelineOf("p", (*pipeline.stages[:2], StageOf("c", ("0", "1"))), pipeline.edges)
    plan = validate_restore(wider, metadata)
    assert (plan.finished_chains, plan.finished) == (alone, everyone | {TaskId("c", 1)})

    shorter = PipelineOf("p", pipeline.stages[1:], pipeline.edges[1:])
    plan = validate_restore(shorter, metadata)
    assert (plan.finished_chains, plan.finished, plan.dropped) == ((("b",), ("c",)), {TaskId("b", 0), TaskId("c", 0)}, ("a",))


def test_a_real_pipeline_is_a_view() -> None:
    @bounded_source
    def history(context: object) -> None: ...

    @unbounded_source(instances=["x", "y"])
    def live(context: object) -> None: ...

    @stage(sink=object())
    def both(history: object, live: object) -> None: ...

    pipeline = Pipeline("p", [history, live, both])
    recorded = tuple(
        StageMetadata(
            s.name,
            len(s.instances),
            tuple(s.instances),
            (0,) if s.name == "history" else (),
            s.name == "history",
        )
        for s in pipeline.stages
    )
    chains = tuple(ChainMetadata(s.name, (s.name,)) for s in recorded)
    plan = validate_restore(pipeline, CheckpointMetadata("p", 1, stages=recorded, chains=chains))
    assert plan.finished == {TaskId("history", 0)}
    assert set(plan.chains) == {("live",), ("both",)}


# Union list state


@pytest.mark.parametrize(
    ("kind", "finished", "refused"),
    [("union", (1,), True), ("union", (), False), ("list", (1,), False), ("broadcast", (1,), False)],
)
def test_union_state_of_a_partly_finished_stage(kind: str, finished: tuple[int, ...], refused: bool) -> None:
    state = OperatorState("offsets", kind)  # type: ignore[arg-type]
    task = TaskSnapshot(stages={"V0": StageInstanceSnapshot(operator_states=(state,))})
    metadata = CheckpointMetadata(
        "p",
        4,
        stages=(StageMetadata("V0", 2, ("0", "1"), finished),),
        chains=(ChainMetadata("V0", ("V0",), {0: task}),),
    )
    if refused:
        with pytest.raises(PartlyFinishedUnionState, match=r"'V0'.*'offsets'.*instances '1'"):
            check_union_states(metadata)
    else:
        check_union_states(metadata)
