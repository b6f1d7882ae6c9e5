"""Which sources give a stage its event time, and which hold it back because they have none.

The watermark of a stage is the minimum over its streams. A source without a watermark never sends one: as long as it runs, event
time behind it does not begin.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dagster_checkpoints.pipeline.graph import Pipeline


@dataclass(frozen=True)
class WatermarkReach:
    """The sources that a stage reads over streaming inputs, directly or through other stages.

    Attributes:
        declaring: Those whose watermark reaches the stage.
        without: Those without a watermark.
    """

    declaring: tuple[str, ...]
    without: tuple[str, ...]

    @property
    def is_held_back(self) -> bool:
        """Whether a watermark would reach the stage, and some other source holds it back."""
        return bool(self.declaring and self.without)


def watermark_reach(pipeline: Pipeline, name: str, own: Collection[str] = ()) -> WatermarkReach:
    """The sources that give a stage its event time, and those that hold it back.

    Args:
        pipeline: The pipeline.
        name: The stage.
        own: Stages that set a watermark themselves, on an input without one.
    """
    known: dict[str, WatermarkReach] = {}

    def reach(name: str) -> WatermarkReach:
        if name not in known:  # a source may reach a stage in many ways
            known[name] = look(name)
        return known[name]

    def look(name: str) -> WatermarkReach:
        stage = pipeline.stage(name)
        if name in own or stage.watermark is not None:
            return WatermarkReach((name,), ())
        if stage.kind.is_source:
            return WatermarkReach((), (name,))
        found = [reach(source) for source, how in stage.inputs.items() if how.mode == "stream"]
        return WatermarkReach(
            tuple(dict.fromkeys(source for each in found for source in each.declaring)),
            tuple(dict.fromkeys(source for each in found for source in each.without)),
        )

    return reach(name)
