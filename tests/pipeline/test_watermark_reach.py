"""Which sources give a stage its event time, and which hold it back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source, watermark_reach


class _Sink:
    supported_output_modes = frozenset({"append"})


@bounded_source(watermark=("ts", "1 hour"))
def history(context): ...


@unbounded_source(watermark=("ts", "1 hour"))
def live(context): ...


@unbounded_source
def plain(context): ...


@bounded_source
def names(context): ...


@stage
def copied(plain): ...


@stage(sink=_Sink())
def both(history, live): ...


@stage(sink=_Sink())
def mixed(live, plain): ...


@stage(sink=_Sink())
def far(live, copied): ...


@stage(sink=_Sink(), inputs={"names": StageInput(mode="static")})
def looked_up(live, names): ...


@stage
def union(live, names): ...


@stage(sink=_Sink())
def behind(union): ...


@stage(sink=_Sink())
def none(plain, names): ...


SHOP = Pipeline("p", [history, live, plain, names, copied, both, mixed, far, looked_up, union, behind, none])


@pytest.mark.parametrize(
    ("name", "own", "declaring", "without"),
    [
        ("both", (), ("history", "live"), ()),
        ("mixed", (), ("live",), ("plain",)),
        ("far", (), ("live",), ("plain",)),
        ("far", {"copied"}, ("live", "copied"), ()),
        ("looked_up", (), ("live",), ()),
        ("behind", (), ("live",), ("names",)),
        ("none", (), (), ("plain", "names")),
        ("live", (), ("live",), ()),
    ],
)
def test_the_sources_of_event_time(name: str, own: Collection[str], declaring: tuple[str, ...], without: tuple[str, ...]) -> None:
    reach = watermark_reach(SHOP, name, own)
    assert (reach.declaring, reach.without) == (declaring, without)
    assert reach.is_held_back == (bool(declaring) and bool(without))


def test_each_source_is_looked_at_once_although_it_reaches_a_stage_in_many_ways() -> None:
    """40 layers of two stages that both read the two before them: 2 ** 40 ways from the last to the sources."""
    layers = 40
    code = "".join(
        f"@stage\ndef left{n}({of}): ...\n@stage\ndef right{n}({of}): ...\n"
        for n in range(layers)
        for of in [f"left{n - 1}, right{n - 1}" if n else "live, plain"]
    )
    made: dict[str, Any] = {"stage": stage}
    exec(code + f"@stage(sink=sink)\ndef last(left{layers - 1}, right{layers - 1}): ...", made | {"sink": _Sink()}, made)
    stages = [made[f"{side}{n}"] for n in range(layers) for side in ("left", "right")]
    found = watermark_reach(Pipeline("deep", [live, plain, *stages, made["last"]]), "last")
    assert (found.declaring, found.without) == (("live",), ("plain",))
