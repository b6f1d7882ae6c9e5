"""`verify` and `dispose`, which need no running pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.execution.pipeline_state import CheckpointPointer, Owner
from dagster_checkpoints.storage import CheckpointStorage

CODE = """
from dagster_checkpoints import ParquetSink, Pipeline, StageInput, bounded_source, stage, unbounded_source

@bounded_source
def history(context): ...

@unbounded_source(instances=INSTANCES)
def live(context): ...

@bounded_source
def airlines(context): ...

@stage(inputs={"airlines": StageInput(mode="static")})
def departures(history, live, airlines): ...

@stage(sink=ParquetSink("/nowhere"))
def delays(departures): ...

flights = Pipeline("flights", [history, live, airlines, departures, delays])
"""


def code(folder: Path, instances: list[str]) -> str:
    file = folder / f"flights_{len(instances)}.py"
    file.write_text(CODE.replace("INSTANCES", repr(instances)))
    return str(file)


def test_verify_finds_nothing(world: Any, tmp_path: Path) -> None:
    world.run()
    savepoint = world.savepoint(43)
    world.checkpoint(42)
    fitting = code(tmp_path, ["EWR", "JFK", "LGA"])
    document = world.json("verify", savepoint, "-f", fitting)
    assert (document["ok"], document["problems"], document["files"], document["checked_against"]) == (True, [], 9, "flights")
    assert "9 files, 180 B: all files are present and unchanged." in world.cli("verify", "43").output
    assert "pipeline flights can be restored from it" in world.cli("verify", "latest", "-f", fitting).output
    assert document["changes"] == []
    more = Path(fitting).with_name("more.py")
    more.write_text(
        Path(fitting)
        .read_text()
        .replace("flights = ", '@unbounded_source(sink=ParquetSink("/also"))\ndef extra(context): ...\n\nflights = ')
        .replace("delays])", "delays, extra])")
    )
    new = "new: 'extra' begins without state."
    assert world.json("verify", savepoint, "-f", str(more), "--no-plans")["changes"] == [new]
    assert new in world.cli("verify", savepoint, "-f", str(more), "--no-plans").output


def test_verify_reports_damage_with_its_exit_code(world: Any, tmp_path: Path) -> None:
    world.run()
    savepoint = world.savepoint(43)
    folder = f"flights/{savepoint}/state"
    flipped, missing = world.files["the airlines"].sha256, world.files["segment 0"].sha256
    world.store.put(f"{folder}/{flipped}", b"the aIrlines")
    world.store.delete([f"{folder}/{missing}"])
    other = code(tmp_path, ["EWR"])
    document = world.json("verify", "43", "-f", other, code=1)
    assert [problem["kind"] for problem in document["problems"]].count("missing_file") == 1
    assert {problem["kind"] for problem in document["problems"]} == {"wrong_content", "missing_file", "instances_changed"}
    text = world.cli("verify", "43", "-f", other, code=1).output
    for part in (
        "3 problems",
        "wrong content: state file",
        flipped,
        missing,
        "expected 9 bytes, found no object",
        "Stage 'live' has no instance 'LGA' any more",
    ):
        assert part in text.replace("\n  ", " ").replace("\n", "")
    world.store.put(f"flights/{savepoint}/_metadata", world.store.get(f"flights/{savepoint}/_metadata")[:-1])
    assert "corrupt metadata" in world.cli("verify", "43", code=1).output


def test_the_name_of_a_savepoint_is_a_location(local: Any, tmp_path: Path) -> None:
    """As upgrades.md prints it for a changed pipeline; the savepoint of a stop may be elsewhere."""
    fitting = code(tmp_path, ["EWR", "JFK", "LGA"])
    local.run()
    checkpoint, savepoint = local.checkpoint(42), local.savepoint(43, "before-change")
    assert local.json("verify", "before-change", "-f", fitting, "--no-plans")["location"] == savepoint
    message = local.json("verify", "before-chnage", "-f", fitting, "--no-plans", code=6)["message"]
    assert "'before-chnage'" in message and checkpoint in message and savepoint in message
    elsewhere = local.savepoint(44, "last", target=str(tmp_path / "elsewhere"), stops=True)
    assert local.json("verify", "last")["location"] == elsewhere
    local.json("dispose", "before-change", "--yes")
    assert local.json("verify", "before-change", code=6)["error"] == "NothingThere"


def test_verify_of_nothing(local: Any) -> None:
    local.run()
    assert local.json("verify", "7", code=6)["error"] == "NothingThere"
    assert local.json("verify", "savepoints/savepoint-7-x-abcdef", code=6)["exit_code"] == 6


def test_dispose_deletes_a_savepoint_that_no_restart_needs(world: Any) -> None:
    world.run()
    world.checkpoint(42)
    kept, gone = world.savepoint(43, "kept"), world.savepoint(44, "gone")
    refused = world.cli("dispose", "44", code=2)
    assert "needs --yes" in refused.stderr and "Savepoint 44 of flights" in refused.stderr
    document = world.json("dispose", gone, "--yes")
    assert document["disposed"] == gone
    assert [entry["location"] for entry in world.json("list")["pipelines"][0]["entries"]] == [kept, "checkpoints/chk-42-1"]
    assert not list(world.store.list(f"flights/{gone}"))
    assert world.json("dispose", gone, "--yes", code=6)["exit_code"] == 6
    assert world.json("verify", kept)["ok"]


def test_dispose_asks_on_a_terminal(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()
    location = local.savepoint(43)
    monkeypatch.setattr("dagster_checkpoints.cli.dispose.is_terminal", lambda: True)
    assert "Aborted" in local.cli("dispose", "43", input="n\n", code=1).stderr
    assert list(local.store.list(f"flights/{location}"))
    assert "Delete it for good?" in local.cli("dispose", "43", input="y\n").stderr
    assert not list(local.store.list(f"flights/{location}"))


def test_dispose_refuses_the_savepoint_that_the_next_run_starts_from(world: Any) -> None:
    world.run()
    location = world.savepoint(43, stops=True)
    world.end("FINISHED", ended_by="suspend")
    refused = world.json("dispose", "43", "--yes", code=1)
    assert refused["error"] == "StillNeeded" and "the next run of flights would be restored from" in refused["message"]
    assert world.json("verify", location)["ok"]
    world.cli("dispose", "43", "--yes", "--force")
    assert not list(world.store.list(f"flights/{location}"))


def _claimed(pointer: CheckpointPointer) -> CheckpointPointer:
    return msgspec.structs.replace(pointer, claimed=True)


@pytest.mark.parametrize("folder", ["archive", "archive/savepoints"])
@pytest.mark.parametrize("claimed", [False, True])
def test_dispose_refuses_a_savepoint_elsewhere_that_the_next_run_starts_from(
    local: Any, tmp_path: Path, folder: str, claimed: bool
) -> None:
    local.run()
    location = local.savepoint(43, target=str(tmp_path / folder), stops=True)
    if claimed:
        local.ownership.begin_job(resume=True, restored=_claimed(local.storage.list_checkpoints()[0]))
    local.end("FINISHED", ended_by="suspend")
    [path] = (tmp_path / folder).iterdir()
    (tmp_path / "link").symlink_to(tmp_path / folder)
    for named in ("43", location, str(path), f"{tmp_path}/link/{path.name}"):
        refused = local.json("dispose", named, "--yes", code=1)["message"]
        assert ("a run has claimed" if claimed else "the next run of flights would be restored") in refused
    assert local.json("verify", location)["ok"]
    if not claimed:
        local.cli("dispose", str(path), "--yes", "--force")
        assert not path.exists()


def test_dispose_refuses_checkpoints_and_claimed_savepoints(local: Any) -> None:
    local.run()
    local.checkpoint(42)
    assert "retention" in local.cli("dispose", "42", "--yes", code=2).stderr
    local.savepoint(43)
    pointer = local.storage.list_checkpoints()[0]
    [savepoint] = local.storage.list_savepoints()
    at = msgspec.structs.replace(pointer, checkpoint_id=43, location=savepoint.location, kind="savepoint")
    local.ownership.begin_job(resume=False, restored=_claimed(at))
    assert "a run has claimed" in local.cli("dispose", "43", "--yes", "--force", code=1).stderr


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("by_url", [False, True])
def test_dispose_refuses_a_savepoint_that_another_pipeline_has_begun_from(local: Any, claimed: bool, by_url: bool) -> None:
    local.run()
    location = local.savepoint(43)
    local.end()
    [savepoint] = local.storage.list_savepoints()
    with CheckpointStorage(local.store, "renamed") as other:
        run = other.acquire(Owner(run_id="r", host="h", pid=1), 30.0)
        pointer = CheckpointPointer(
            checkpoint_id=43, location=savepoint.url, kind="savepoint", epoch=1, job_id=1, completed_at=savepoint.modified
        )
        run.begin_job(resume=False, restored=_claimed(pointer) if claimed else pointer, named=True)
    arguments = (savepoint.url, "--storage", "") if by_url else ("43", "--pipeline", "flights")
    refused = local.json("dispose", *arguments, "--yes", code=1)["message"]
    assert ("the pipeline renamed deletes it" if claimed else "the next run of renamed would be restored from") in refused
    assert local.json("verify", location, "--pipeline", "flights")["ok"]


def test_dispose_looks_again_after_the_question(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()
    location = local.savepoint(43)
    monkeypatch.setattr("dagster_checkpoints.cli.dispose.is_terminal", lambda: True)

    def answered(*_: Any, **__: Any) -> bool:
        [savepoint] = local.storage.list_savepoints()
        local.ownership.complete(43, savepoint.location, kind="savepoint")  # the question was open while a stop came to its end
        return True

    monkeypatch.setattr("click.confirm", answered)
    assert "would be restored from" in local.cli("dispose", location, code=1).stderr
    assert local.json("verify", location)["ok"]


@pytest.mark.parametrize("empty", ["", " "])
def test_dispose_of_an_empty_location_deletes_nothing(local: Any, empty: str) -> None:
    local.run()
    location = local.savepoint(43, stops=True)
    local.end("FINISHED", ended_by="drain")
    assert "found an empty text" in local.json("dispose", empty, "--yes", code=2)["message"]
    assert local.json("verify", location)["ok"]


def test_dispose_deletes_a_savepoint_that_cannot_be_read(local: Any, tmp_path: Path) -> None:
    local.run()
    elsewhere = local.savepoint(43, target=str(tmp_path / "elsewhere"))
    folder = next((tmp_path / "elsewhere").iterdir())
    (folder / "_metadata").write_bytes(b"broken")
    assert "cannot be read" in local.cli("dispose", str(folder), code=2).stderr
    assert local.json("dispose", str(folder), "--yes")["disposed"] == elsewhere
    assert not folder.exists()
