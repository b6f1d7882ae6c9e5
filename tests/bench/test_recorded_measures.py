"""The measures that the repository keeps, and the page that shows them."""

from __future__ import annotations

from bench import recorded
from bench.measures import at_least
from bench.recorded import Run


def run(day: str, **parts: float) -> Run:
    measures = tuple(at_least(part, "rows", value, "", 0.5) for part, value in parts.items())
    return Run(day, "abc", "a machine", "Spark", 10, 3, measures)


def test_a_part_that_is_measured_again_replaces_the_earlier_measures() -> None:
    runs = recorded.added([run("1", a=1, b=1), run("2", c=1)], run("3", b=2, c=2))
    assert runs == [run("1", a=1), run("3", b=2, c=2)]


def test_parts_of_one_day_commit_and_machine_are_one_run() -> None:
    assert recorded.added([run("1", a=1), run("2", b=1)], run("1", c=0.25)) == [run("2", b=1), run("1", a=1, c=0.25)]


def test_a_missed_goal_is_shown() -> None:
    assert "| rows | 0.25 | >= 0.50, **missed** |" in recorded.section([run("1", a=0.25)])


def test_the_page_shows_what_is_kept() -> None:
    text = recorded.PAGE.read_text(encoding="utf-8")
    kept = recorded.read()
    assert kept
    assert f"{recorded.HEADING}\n{recorded.section(kept)}\n## " in text
