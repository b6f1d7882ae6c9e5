"""Code that no run on Spark reaches says so in its first line; and the runtime does not use code that says so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dagster_checkpoints"
RUNTIME = ("plugin", "cli", "spark", "sinks", "control", "storage")
"""The floors above the pure ones."""
UNREACHED = {
    "coordination/barriers/tracking.py": ("TrackingBarrierHandler",),
    "coordination/barriers/single.py": ("UnalignedBarrierHandler", "AlignedWithTimeoutBarrierHandler"),
    "coordination/barriers/events.py": ("BarrierAnnounced", "AlignmentTick", "StartSnapshot", "ChannelCaptured"),
    "coordination/events.py": ("BacklogChanged",),
    "coordination/schedule.py": ("interval_during_backlog",),
    "coordination/config.py": ("aligned_checkpoint_timeout", "max_queued", "keep_on_finish"),
    "execution/restored_channels.py": ("overtaken",),
    "state/key_groups.py": ("key_groups_of", "chosen_max_parallelism"),
    "state/redistribution.py": ("redistribute_key_groups", "redistribute_lists", "redistribute_unions"),
    "state/rescaling.py": ("check_rescaling", "known_channel", "least_watermark", "rescaled_stages"),
    "state/metadata.py": ("EnumeratorState",),
}
"""By module of the core, names in it, or settings, that no run reaches."""


def text_of_runtime() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for floor in RUNTIME for file in (PACKAGE / floor).rglob("*.py"))


@pytest.mark.parametrize("module", UNREACHED)
def test_a_module_says_what_no_run_reaches(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    said = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
    assert any(re.search(r"no run on Spark\s+reaches|no state moves yet", text, re.IGNORECASE) for text in said)


@pytest.mark.parametrize("module", UNREACHED)
def test_the_runtime_uses_nothing_that_is_said_to_be_unreached(module: str) -> None:
    text = text_of_runtime()
    assert [name for name in UNREACHED[module] if re.search(rf"\b{name}\b", text)] == []
