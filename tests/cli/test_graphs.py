"""The drawn graph, where the code, the pipeline that runs and the checkpoint are of different versions."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from dagster_checkpoints import ParquetSink, Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.cli.graph_model import PipelineGraph, combine, graph_of_checkpoint, graph_of_code, graph_of_status
from dagster_checkpoints.cli.graphs import as_mermaid, as_text
from dagster_checkpoints.control.status import InstanceStatus, PipelineStatus, StageStatus
from dagster_checkpoints.pipeline import build_chains
from dagster_checkpoints.spark.job.status_reporter import stage_inputs
from dagster_checkpoints.state.metadata import ChainMetadata, CheckpointMetadata, StageInstanceSnapshot, TaskSnapshot
from dagster_checkpoints.state.recording import recorded_stages
from dagster_checkpoints.state.stage_names import with_uids

TABLE = StageInput(mode="static")
OUT = ParquetSink("/nowhere/out")


@unbounded_source
def live(context): ...


@unbounded_source(uid="live")
def feed(context): ...


@bounded_source
def days(context): ...


@stage(inputs={"days": TABLE})
def matched(live, days): ...


@stage(inputs={"days": TABLE}, uid="matched")
def joined(feed, days): ...


@stage(sink=OUT)
def totals(matched): ...


def before() -> Pipeline:
    return Pipeline("p", [live, days, matched, totals])


def renamed() -> Pipeline:
    @stage(sink=OUT)
    def totals(joined): ...

    return Pipeline("p", [feed, days, joined, totals])


def removed() -> Pipeline:
    @stage(sink=OUT, inputs={"days": TABLE})
    def matched(live, days): ...

    return Pipeline("p", [live, days, matched])


def added() -> Pipeline:
    @stage(sink=ParquetSink("/nowhere/copies"))
    def copies(live): ...

    return Pipeline("p", [live, days, matched, totals, copies])


def rewired() -> Pipeline:
    """`matched` does not read `days` any more; another stage does."""

    @stage
    def matched(live): ...

    @stage(sink=ParquetSink("/nowhere/days"))
    def known(days): ...

    return Pipeline("p", [live, days, matched, totals, known])


def scaled() -> Pipeline:
    """Not in one query any more."""

    @stage(sink=OUT, instances=["a", "b"])
    def totals(matched): ...

    return Pipeline("p", [live, days, matched, totals])


def swapped() -> Pipeline:
    """Each of two stages has the name that the other one had."""

    @stage(uid="totals", sink=OUT)
    def matched(totals): ...

    @stage(uid="matched", inputs={"days": TABLE})
    def totals(live, days): ...

    return Pipeline("p", [live, days, totals, matched])


def taken() -> Pipeline:
    """A new stage has the name of one that was removed."""

    @stage(uid="another", sink=OUT)
    def totals(matched): ...

    return Pipeline("p", [live, days, matched, totals])


EDGES = {
    before: {"live>matched", "days=matched", "matched>totals"},
    renamed: {"feed>joined", "days=joined", "joined>totals"},
    removed: {"live>matched", "days=matched"},
    added: {"live>matched", "days=matched", "matched>totals", "live>copies"},
    rewired: {"live>matched", "days>known", "matched>totals"},
    scaled: {"live>matched", "days=matched", "matched>totals"},
    swapped: {"live>totals", "days=totals", "totals>matched"},
    taken: {"live>matched", "days=matched", "matched>totals"},
}
Version = Callable[[], Pipeline]


def checkpoint(pipeline: Pipeline) -> CheckpointMetadata:
    chains = build_chains(pipeline)
    tasks = {chain.name: TaskSnapshot({name: StageInstanceSnapshot() for name in chain.stages}) for chain in chains}
    layout = tuple(
        ChainMetadata(chain.name, chain.stages, dict.fromkeys(range(pipeline.stage(chain.name).parallelism), tasks[chain.name]))
        for chain in chains
    )
    return with_uids(CheckpointMetadata("p", 42, recorded_stages(pipeline, chains, ()), layout), pipeline)


def status(pipeline: Pipeline) -> PipelineStatus:
    stages = tuple(
        StageStatus(
            name=each.name,
            finished=False,
            instances=tuple(InstanceStatus(name=name, state="RUNNING") for name in each.instances),
            uid=each.uid,
            inputs=stage_inputs(pipeline, each.name),
        )
        for each in pipeline.stages
    )
    chains = tuple(chain.stages for chain in build_chains(pipeline))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    values: dict[str, Any] = {"run_id": "r", "epoch": 1, "job_id": 1, "phase": "running", "sequence": 1}
    return PipelineStatus(
        pipeline="p", updated_at=now, started_at=now, roots=("live[0]",), chains=chains, stages=stages, **values
    )


def check(graph: PipelineGraph, edges: set[str], *more: str) -> None:
    """The stages and edges of a graph, and that all drawings can show it."""
    assert {f"{edge.source}{'=' if edge.table else '>'}{edge.target}" for edge in graph.edges} == edges
    names = {name for edge in edges for name in re.split("[>=]", edge)} | set(more)
    assert sorted(stage.name for stage in graph.stages) == sorted(names)
    assert sorted(name for chain in graph.chains for name in chain) == sorted(names)
    text, mermaid = as_text(graph).plain, as_mermaid(graph)
    assert all(name in text and f'["{name}' in mermaid for name in names)
    assert mermaid.count("-->") + mermaid.count("==>") + mermaid.count(".->") == len(edges)


@pytest.mark.parametrize(
    ("recorded", "code", "edges", "more"),
    [
        *((version, version, EDGES[version], ()) for version in EDGES),
        (before, renamed, EDGES[renamed], ()),
        (renamed, before, EDGES[before], ()),
        (before, removed, {*EDGES[removed], "matched>totals"}, ()),
        (before, added, EDGES[added], ()),
        (before, rewired, EDGES[rewired], ()),
        (before, scaled, EDGES[scaled], ()),
        (scaled, before, EDGES[before], ()),
        (before, swapped, EDGES[swapped], ()),
        (before, taken, {*EDGES[taken], "matched>uid totals"}, ()),
    ],
)
def test_a_checkpoint_with_the_code_of_another_version(
    recorded: Version, code: Version, edges: set[str], more: tuple[str, ...]
) -> None:
    """The edges are those of the code; a stage that only the checkpoint has is shown with its own."""
    pipeline = code()
    stored = graph_of_checkpoint(checkpoint(recorded()), pipeline)
    check(combine(graph_of_code(pipeline), stored), edges, *more)


@pytest.mark.parametrize("version", EDGES)
def test_a_pipeline_that_runs_is_drawn_as_it_runs(version: Version) -> None:
    """Without the code, and whatever the newest checkpoint has recorded."""
    check(graph_of_status(status(version())), EDGES[version])


def test_a_damaged_status_whose_chains_name_no_stage_is_drawn() -> None:
    found = status(before())
    damaged = structs.replace(found, chains=(("nowhere",), *((*chain, "nowhere") for chain in found.chains)))
    check(graph_of_status(damaged), EDGES[before])
    check(combine(graph_of_code(before()), graph_of_status(damaged)), EDGES[before])


@pytest.mark.parametrize(
    ("runs", "code", "edges"),
    [
        (before, renamed, EDGES[renamed]),
        (renamed, before, EDGES[before]),
        (swapped, before, EDGES[before]),
        (before, rewired, EDGES[rewired]),
        (before, taken, {*EDGES[taken], "matched>uid totals"}),
    ],
)
def test_a_pipeline_that_runs_with_the_code_of_another_version(runs: Version, code: Version, edges: set[str]) -> None:
    pipeline = code()
    check(combine(graph_of_code(pipeline), graph_of_status(status(runs()), pipeline)), edges)


@pytest.mark.parametrize("version", [before, renamed, swapped, scaled])
def test_without_the_code_a_checkpoint_has_the_names_of_the_last_run(version: Version) -> None:
    pipeline = version()
    names = {each.uid: each.name for each in pipeline.stages}
    check(graph_of_checkpoint(checkpoint(pipeline), names=names), EDGES[version])


def test_where_nothing_knows_the_names_the_uids_are_drawn() -> None:
    check(graph_of_checkpoint(checkpoint(renamed())), EDGES[before])


def test_the_text_says_why_a_stage_that_reads_sources_has_a_query_of_its_own() -> None:
    @bounded_source(watermark=("ts", "1 hour"))
    def past(context): ...

    @stage(sink=OUT)
    def both(live, past): ...

    text = as_text(graph_of_code(Pipeline("p", [live, past, both]))).plain
    assert text.endswith("reads live, past; in a query of its own, since 'past' declares a watermark, and 'live' does not")
    assert "since" not in as_text(graph_of_code(before())).plain  # it reads a table, and could not share one
