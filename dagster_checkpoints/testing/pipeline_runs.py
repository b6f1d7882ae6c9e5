"""A pipeline's stages over a few rows, for the tests of whoever wrote them: no storage, no Dagster, no source to reach.

The rows of each source are given in steps. A step is a run of its own (a burst): it reads the step's rows, emits what is due, and
suspends; the next one restores that. So a test also shows that the stages survive a restore. At the end the pipeline is drained.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_checkpoints.pipeline import Pipeline, StageKind
from dagster_checkpoints.pipeline.names import suggestion
from dagster_checkpoints.spark.job.events import JobEvent
from dagster_checkpoints.testing.replaced_pipeline import ReplacedPipeline, kept_stages, newest_by_key, session_for_tests
from dagster_checkpoints.testing.source_rows import InvalidTestRowsError, SourceRows, rows_by_instance

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


@dataclass(frozen=True)
class PipelineOutput:
    """What the stages have committed.

    Attributes:
        steps: By stage, the rows of each step, those of the drain last.
        keys: By stage, the columns by which its rows replace earlier ones: stages with output_mode="update" or "complete".
    """

    steps: Mapping[str, Sequence[Sequence[Row]]] = field(default_factory=dict)
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def rows(self, stage: str, step: int | None = None) -> list[Row]:
        """The rows of a stage, sorted by their text.

        Args:
            stage: Name of the stage.
            step: Number of the step, from 0; -1 for what the drain has added. None for all: where rows replace earlier ones, the
                newest of each key, as the table has them.

        Raises:
            InvalidTestRowsError: The rows of this stage are not kept.
        """
        if stage not in self.steps:
            raise InvalidTestRowsError(f"expected a stage whose rows are kept, found {stage!r}. {suggestion(stage, self.steps)}")
        found = self.steps[stage]
        rows = [row for each in found for row in each] if step is None else found[step]
        return sorted(newest_by_key(rows, self.keys.get(stage, ())), key=repr)


def run_pipeline(
    pipeline: Pipeline,
    inputs: Mapping[str, SourceRows],
    *,
    stages: Sequence[str] | None = None,
    spark: SparkSession | None = None,
    on_event: Callable[[JobEvent], None] = lambda event: None,
) -> PipelineOutput:
    """Run a pipeline over a few rows, to its end.

    The sources are replaced: their functions are not called, their watermark and instances count. Sinks are replaced, too, and
    nothing is written outside of a temporary directory. All other stages run as they are.

    Args:
        pipeline: The pipeline.
        inputs: The rows of each source, by its name; or by ``name[instance]``, for one of its instances. Rows of a source with
            several instances are dealt out to them in turn.
        stages: The stages whose rows are kept; default: those with a sink.
        spark: The session; default: one with two local cores, which stays for the next test.
        on_event: Receives the events of the runs.

    Raises:
        InvalidTestRowsError: A source has no rows, a name is unknown, a bounded source has more than one step, or it is not known
            which rows replace which.
        DagsterCheckpointsError: A run has failed, as it would in production.

    Examples:
        >>> output = run_pipeline(shop, {"orders": SourceRows("id long, at timestamp", [(1, noon)], [(2, noon + day)])})
        >>> assert [row.n for row in output.rows("daily")] == [1, 1]
    """
    kept = kept_stages(pipeline, stages)
    rows = rows_by_instance(pipeline, inputs)
    _check_steps(pipeline, inputs)
    session = spark if spark is not None else session_for_tests()
    tables = {name: given.tables(session, name) for name, given in rows.items()}
    with tempfile.TemporaryDirectory(prefix="dagster-checkpoints-test-") as folder:
        schemas = {name: given.schema for name, given in rows.items()}
        replaced = ReplacedPipeline(pipeline, schemas, kept, Path(folder), session, on_event)
        found: dict[str, list[list[Row]]] = {stage: [] for stage in kept}

        def keep() -> None:
            for stage, committed in replaced.committed().items():
                found[stage].append(committed)

        for step in range(max(map(len, tables.values()))):
            for name, steps in tables.items():
                if step < len(steps):
                    replaced.add(name, steps[step])
            outcome = replaced.run("suspend")
            keep()
        if outcome != "ended":
            replaced.run("drain")
        keep()
        return PipelineOutput(found, replaced.keys)


def _check_steps(pipeline: Pipeline, inputs: Mapping[str, SourceRows]) -> None:
    for name, given in inputs.items():
        if pipeline.stage(name.partition("[")[0]).kind is StageKind.BOUNDED_SOURCE and len(given.steps) > 1:
            raise InvalidTestRowsError(
                f"Expected one step for the bounded source {name!r}, which ends when it has been read, found "
                f"{len(given.steps)} steps. Give all rows in one step, or make the stage unbounded"
            )
