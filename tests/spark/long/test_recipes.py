"""The recipes of the documentation: their code runs, their tests pass, and their tables hold what the pages say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame

from dagster_checkpoints.pipeline import Pipeline, StageContext, bounded_source

FOLDER = Path(__file__).resolve().parents[3] / "docs/recipes"


@pytest.fixture
def run_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the code of a recipe in an empty folder, and its tests; returns its names, and the text blocks that the page shows."""
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> tuple[dict[str, Any], list[str]]:
        shown = re.findall(
            r"^```(\w+)\n(.*?)^```$", (FOLDER / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        names: dict[str, Any] = {"__name__": name}
        for number, (language, text) in enumerate(shown):
            if language == "python":
                exec(compile(text, f"{name}.md, block {number + 1}", "exec"), names)
        for test in [value for each, value in names.items() if each.startswith("test_")]:
            test()
        return names, [text for language, text in shown if language == "text"]

    return run


def test_every_recipe_is_run_here() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} == {
        "change-data-capture",
        "daily-files",
        "quarantine",
        "sizing",
        "slowly-changing-table",
    }


@pytest.mark.parametrize("name", ["quarantine", "sizing", "slowly-changing-table"])
def test_the_code_and_the_tests_of_the_page(run_page: Any, name: str) -> None:
    run_page(name)


def test_daily_files(run_page: Any, lab: Any) -> None:
    names, (expected,) = run_page("daily-files")
    for night in names["nights"]:
        lab.put("sales", names["SALES"], night)

    @bounded_source(watermark=("at", "3 days"))
    def sales(context: StageContext) -> DataFrame:
        return lab.stream("sales", names["SALES"])  # type: ignore[no-any-return]

    lab.start(Pipeline("daily", [sales, names["final"], names["so_far"]])).finished()
    for table in ("so_far", "final"):
        rows = DeltaTable(f"tables/{table}").to_pyarrow_table().sort_by("day").to_pylist()
        assert "".join(f"{row['day'].date()} {row['amount']:.0f}\n" for row in rows) == expected


def test_change_data_capture(run_page: Any, lab: Any) -> None:
    names, (expected,) = run_page("change-data-capture")
    for batch in names["received"]:
        lab.put("changes", names["CHANGES"], batch)

    @bounded_source
    def changes(context: StageContext) -> DataFrame:
        return lab.stream("changes", names["CHANGES"])  # type: ignore[no-any-return]

    lab.start(Pipeline("capture", [changes, names["customers"]])).finished()
    rows = DeltaTable("tables/customers").to_pyarrow_table().sort_by("id").to_pylist()
    assert "".join(f"{row['id']} {row['name']} {row['city']} deleted={row['deleted']}\n" for row in rows) == expected
