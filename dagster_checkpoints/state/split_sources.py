"""What a restore refuses of split sources: whether a source is read in splits must not change while it runs."""

from __future__ import annotations

from collections.abc import Mapping

from dagster_checkpoints.state.errors import SourcesChanged
from dagster_checkpoints.state.metadata import StageMetadata
from dagster_checkpoints.state.views import PipelineView


def check_split_sources(pipeline: PipelineView, recorded: Mapping[str, StageMetadata], where: str) -> None:
    """Check that each source is read in splits if, and only if, it was in the checkpoint.

    A fully finished source is not read any more.

    Args:
        pipeline: the pipeline that is to run.
        recorded: the stages of the checkpoint, by name.
        where: the checkpoint, for the error.

    Raises:
        SourcesChanged: names the source.
    """
    for stage in pipeline.stages:
        known = recorded.get(stage.name)
        if known is None or known.fully_finished or (known.enumerator is not None) == (stage.split_interval is not None):
            continue
        now, then = ("is", "was not") if known.enumerator is None else ("is not", "was")
        raise SourcesChanged(
            f"Stage {stage.name!r} {now} a split source, and {then} one in {where}. The checkpoint says what was read of it: as "
            f"{'offsets' if known.enumerator is None else 'splits'}, which do not fit. Give the new source another name, or take "
            "the change back; or start the pipeline without this checkpoint (restore_from: none)."
        )
