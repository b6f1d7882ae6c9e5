"""`report`: the page, the same numbers as JSON, and what is said of files that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report import history_of
from dagster_checkpoints.control.history import HistorySegments


def recorded(world: Any, checkpoints: int = 30) -> None:
    HistorySegments(world.storage, 1).append(history_of(checkpoints))


def test_the_page_is_written_where_the_user_wants_it(world: Any, tmp_path: Path) -> None:
    world.run()
    world.status()
    recorded(world)
    file = tmp_path / "page.html"
    assert "30 checkpoints" in world.cli("report", "--output", str(file)).stdout
    content = file.read_text(encoding="utf-8")
    assert content.startswith("<!doctype html>") and "<title>flights · checkpoints</title>" in content
    written = world.json("report", "-o", str(file))
    assert written == {"file": str(file), "bytes": file.stat().st_size, "checkpoints": 30}


def test_the_numbers_as_json(world: Any) -> None:
    world.run()
    world.status()
    recorded(world)
    found = world.json("report")
    assert [row["checkpoint_id"] for row in found["checkpoints"]][:2] == [30, 29]
    assert found["running"] and found["state"] == "running" and found["storage"] == f"{world.storage.store.url}/flights"
    assert {stage["name"] for stage in found["stages"]} == {"history", "live", "airlines", "departures", "delays"}
    assert found["pending"][0]["checkpoint_id"] == 44
    assert found["refresh_seconds"] is None


def test_a_pipeline_that_does_not_run(local: Any) -> None:
    assert "found none. Is it the right --storage?" in local.cli("report", code=6).output
    local.run()
    local.status()
    recorded(local)
    local.end("FINISHED", ended_by="drain")
    found = local.json("report")
    assert not found["running"] and "drain" in found["state"] and found["pending"] == []


def test_a_pipeline_without_a_history(local: Any) -> None:
    local.run()
    found = local.json("report")
    assert (found["state"], found["checkpoints"], found["stages"]) == ("starting", [], [])


def test_files_that_cannot_be_read_are_named(local: Any, tmp_path: Path) -> None:
    local.run()
    recorded(local)
    local.storage.store.put("flights/history/7-1.json", b'{"version": 99}')
    local.storage.store.put("flights/status.json", b"not JSON")
    problems = local.json("report")["problems"]
    assert [("history/7-1.json" in text, "status.json" in text) for text in problems] == [(True, False), (False, True)]
    result = local.cli("report", "-o", str(tmp_path / "page.html"))
    assert "newer release" in result.stderr and "30 checkpoints" in result.stdout


def test_a_file_that_cannot_be_written(local: Any, tmp_path: Path) -> None:
    local.run()
    assert "expected a file that can be written as --output" in local.cli("report", "-o", str(tmp_path), code=2).output


def test_the_file_is_named_after_the_pipeline(local: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    local.run()
    local.cli("report")
    assert (tmp_path / "flights-checkpoints.html").exists()
