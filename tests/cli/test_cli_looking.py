"""`list`, `show`, `graph`, `watch`: the content of storage, as text and as JSON."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from dagster_checkpoints.cli import listing, status_view
from dagster_checkpoints.cli import watch as watching
from dagster_checkpoints.cli.app import app
from dagster_checkpoints.cli.output import json_line, watermark_in_words, write_json
from dagster_checkpoints.cli.state import parsed
from dagster_checkpoints.control import last_sign
from dagster_checkpoints.control.status import InstanceStatus, SilenceStatus, SplitsStatus, StageStatus, write_status
from dagster_checkpoints.coordination.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from dagster_checkpoints.state.metadata import (
    ChainMetadata,
    CheckpointMetadata,
    QuerySnapshot,
    StageInstanceSnapshot,
    StageMetadata,
    TaskSnapshot,
)
from dagster_checkpoints.state.metadata_file import decode, encode
from resources.embedded_s3 import Fault

CODE = """
from dagster_checkpoints import ParquetSink, Pipeline, StageInput, bounded_source, stage, unbounded_source

@bounded_source
def history(context): ...

@unbounded_source(instances=["EWR", "JFK", "LGA"])
def live(context): ...

@bounded_source
def airlines(context): ...

@stage(inputs={"airlines": StageInput(mode="static")})
def departures(history, live, airlines): ...

@stage(sink=ParquetSink("/nowhere"))
def delays(departures): ...

flights = Pipeline("flights", [history, live, airlines, departures, delays])
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "flights_code.py"
    file.write_text(CODE)
    return str(file)


# list


def test_list_shows_checkpoints_and_savepoints_and_where_the_next_run_begins(world: Any) -> None:
    world.run()
    first = world.checkpoint(41)
    second = world.checkpoint(42)
    savepoint = world.savepoint(43)
    listed = world.json("list")
    assert listed["storage"] == world.storage.store.url
    [pipeline] = listed["pipelines"]
    assert (pipeline["pipeline"], pipeline["owner"]["run_id"], pipeline["job"]["status"]) == ("flights", "2f0c9a17", "RUNNING")
    entries = pipeline["entries"]
    assert [(e["id"], e["kind"], e["location"], e["next_start"]) for e in entries] == [
        (43, "savepoint", savepoint, False),
        (42, "checkpoint", second, True),
        (41, "checkpoint", first, False),
    ]
    assert entries[0]["url"] == f"{world.storage.url}/{savepoint}"
    text = world.cli("list").output
    assert "*  42 " in text and savepoint in text and "run 2f0c9a17 on host worker-1" in text


def test_list_is_in_the_order_of_time_and_names_the_job(world: Any) -> None:
    """A new job counts its ids from 1: sorted by id, its newest would be below those of an earlier job."""
    world.run()
    old = world.savepoint(57, "before-upgrade", job_id="1")
    world.end("FINISHED", ended_by="drain", keep_checkpoints=False)
    world.run(resume=False)
    checkpoint = world.checkpoint(2)
    newest = world.savepoint(3, "today", job_id="2")
    entries = world.json("list")["pipelines"][0]["entries"]
    assert [(e["id"], e["job_id"], e["location"]) for e in entries] == [(3, 2, newest), (2, 2, checkpoint), (57, 1, old)]
    lines = world.cli("list").output.splitlines()
    assert lines[2].split()[:2] == ["id", "job"]
    assert [line.removeprefix("*").split()[:2] for line in lines[3:6]] == [["3", "2"], ["2", "2"], ["57", "1"]]


def test_a_lost_state_is_named_with_what_is_left_and_the_ways_on(world: Any) -> None:
    world.run()
    checkpoint = world.checkpoint(42)
    savepoint = world.savepoint(43)
    world.end("FAILED", ended_by="", keep_checkpoints=True)
    world.store.delete(["flights/state.json"])
    expected = f"newest first: {savepoint}, {checkpoint}."
    for command in (("show",), ("show", "latest"), ("verify", "latest"), ("watch",), ("health",)):
        message = world.json(*command, code=6)["message"]
        assert expected in message and f"restore_from: '{savepoint}'" in message and "'none'" in message
    [pipeline] = world.json("list")["pipelines"]
    assert expected in pipeline["problem"] and [entry["location"] for entry in pipeline["entries"]] == [savepoint]
    assert "which says where pipeline 'flights' continues" in " ".join(world.cli("list").output.split())
    assert world.json("show", checkpoint)["location"] == checkpoint


def test_imported_savepoints_wait_for_the_first_run(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = TaskSnapshot(stages={"live": StageInstanceSnapshot()}, query=QuerySnapshot(4, imported_from="file:///chk"))
    stages, chains = (StageMetadata("live", 1, ("0",)),), (ChainMetadata("live", ("live",), {0: task}),)
    made = CheckpointMetadata("flights", 1, stages, chains, kind="savepoint", job_id="0")
    location = "savepoints/savepoint-1-imported-0a1b2c"
    local.store.put(f"flights/{location}/_metadata", encode(made))
    monkeypatch.setattr(watching, "sleep", lambda _: pytest.fail("watch says it once, and ends"))
    for command in (("list",), ("watch",), ("show",), ("show", "latest")):
        text = " ".join(local.cli(*command, code=0 if command == ("list",) else 6).output.split())
        assert text.count("ipeline 'flights' is imported, not started yet") == text.count(f"restore_from: '{location}'") == 1
        assert "lost" not in text


def test_latest_is_the_savepoint_of_a_drain(world: Any) -> None:
    world.run()
    world.checkpoint(42)
    location = world.savepoint(43, stops=True)
    world.end("FINISHED", ended_by="drain", keep_checkpoints=False)
    assert world.json("show", "latest")["location"] == location
    assert world.json("verify", "latest")["ok"]
    drawn = world.json("graph")
    assert drawn["seen"] == "savepoint 43" and drawn == world.json("graph", "latest")
    world.run()
    world.savepoint(50)
    world.end("FINISHED", ended_by="end_of_data", keep_checkpoints=False)
    message = world.json("show", "latest", code=6)["message"]
    assert "its latest job has none" in message and location in message  # the error names the existing savepoints
    assert "found neither" in world.json("graph", code=6)["message"]


def test_list_long_reads_the_metadata_of_each(world: Any) -> None:
    world.run()
    world.checkpoint(42)
    location = world.savepoint(43)
    [savepoint, checkpoint] = world.json("list", "-l")["pipelines"][0]["entries"]
    assert (savepoint["files"], savepoint["bytes"], savepoint["finished_stages"]) == (9, world.bytes, ["history", "airlines"])
    assert checkpoint["files"] == 8 and checkpoint["run_id"] == "2f0c9a17"
    key = f"flights/{location}/_metadata"
    world.store.put(key, world.store.get(key)[:-10])
    # If a savepoint cannot be read, only the time of its object is known, which S3 gives in whole seconds.
    [damaged] = [entry for entry in world.json("list", "-l")["pipelines"][0]["entries"] if entry["kind"] == "savepoint"]
    assert "damaged" in damaged["problem"]
    assert "unreadable" in world.cli("list", "-l").output


def test_graph_says_that_the_newest_checkpoint_cannot_be_read(world: Any) -> None:
    world.run()
    location = world.checkpoint(42)
    world.end("FAILED")
    key = f"flights/{location}/_metadata"
    world.store.put(key, world.store.get(key)[:-10])
    assert "is damaged" in world.json("graph", code=1)["message"]


@pytest.mark.parametrize("target", ["", "archive"])
def test_the_next_start_is_listed_before_the_run_that_restored_it_has_a_checkpoint(
    local: Any, tmp_path: Path, target: str
) -> None:
    local.run()
    older = local.checkpoint(42)
    location = local.savepoint(43, target=str(tmp_path / target) if target else "")
    pointer = msgspec.structs.replace(local.storage.list_checkpoints()[0], checkpoint_id=43, location=location, kind="savepoint")
    local.ownership.begin_job(resume=False, restored=pointer)
    for more in ((), ("--long",)):
        entries = local.json("list", *more)["pipelines"][0]["entries"]
        assert {e["location"]: e["next_start"] for e in entries} == {location: True, older: False}


@pytest.mark.parametrize(
    ("how", "starts"),
    [({"ended_by": "suspend"}, True), ({"ended_by": "drain"}, False), ({"ended_by": "end_of_data"}, False)],
)
def test_a_suspended_job_is_followed_from_its_savepoint_and_an_ended_one_by_a_new_start(
    local: Any, how: dict[str, str], starts: bool
) -> None:
    local.run()
    location = local.savepoint(42, stops=True)
    local.end("FINISHED", **how)
    entries = local.json("list")["pipelines"][0]["entries"]
    assert [(e["location"], e["next_start"]) for e in entries] == [(location, starts)]
    shown = local.json("show")
    assert (shown["running"], shown["next_start"]) == (False, location if starts else None)
    assert ("is a new start" in local.cli("show").output) is not starts
    assert f"by {how['ended_by'].replace('_', ' ')}" in local.cli("list").output


def test_all_pipelines_of_a_storage_are_listed_and_one_must_be_named_elsewhere(local: Any) -> None:
    local.run()
    state = local.store.get("flights/state.json")
    local.store.put("trains/state.json", state.replace(b'"flights"', b'"trains"'))
    local.store.put("notes/README", b"of somebody else")
    assert [p["pipeline"] for p in local.json("list")["pipelines"]] == ["flights", "trains"]
    error = local.json("show", code=2)
    assert "several pipelines: flights, trains. Name one with --pipeline" in error["message"]
    assert local.json("show", "--pipeline", "trains")["pipeline"] == "trains"
    missing = local.json("list", "--pipeline", "ships", code=6)
    assert "Its pipelines: flights, trains" in missing["message"] and missing["exit_code"] == 6


@pytest.mark.parametrize(("state", "text"), [(b"{", "expected the state of a pipeline"), (b'{"version": 99}', "newer release")])
def test_a_pipeline_whose_state_cannot_be_read_does_not_hide_the_others(local: Any, state: bytes, text: str) -> None:
    local.run()
    local.store.put("trains/state.json", state)
    flights, trains = local.json("list", code=1)["pipelines"]
    assert flights["problem"] is None and text in trains["problem"] and trains["entries"] == []
    lines = local.cli("list", code=1).output
    assert "flights  file:" in lines and "trains  file:" in lines
    assert text in local.json("list", "--pipeline", "trains", code=1)["message"]


def test_an_empty_storage_is_reported(local: Any) -> None:
    assert "Is it the right --storage?" in local.cli("list", code=6).stderr
    assert local.json("list")["pipelines"] == []
    assert local.json("show", code=6)["error"] == "NothingThere"


def test_a_file_and_the_directory_of_one_pipeline_are_named_as_what_they_are(local: Any, tmp_path: Path) -> None:
    local.run()
    (tmp_path / "a file").touch()
    for command in ("list", "show"):
        assert "Not a directory" in local.cli(command, "--storage", str(tmp_path / "a file"), code=5).stderr
        below = local.cli(command, "--storage", f"{local.url}/flights", code=6).stderr
        assert "found the directory of one pipeline. Its --storage is the directory above" in below


def test_storage_out_of_reach(on_s3: Any, s3_server: Any) -> None:
    on_s3.run()
    with s3_server.outage():
        error = on_s3.json("list", code=5)
    assert error["error"] == "StorageUnavailable" and on_s3.url in error["message"]
    gone = on_s3.cli("list", "--storage", "s3://no-such-bucket/x", code=5)
    assert "no-such-bucket" in gone.stderr


@pytest.mark.parametrize("url", ["ftp://host/x", "s3://", "file://host/x"])
def test_an_invalid_storage_url_is_wrong_usage(local: Any, url: str) -> None:
    assert url in local.cli("list", "--storage", url, code=2).stderr


# show


def test_show_lists_the_state_of_each_instance_in_a_checkpoint(world: Any) -> None:
    world.run()
    location = world.checkpoint(42)
    shown = world.json("show", "42")
    assert (shown["id"], shown["kind"], shown["location"], shown["next_start"]) == (42, "checkpoint", location, True)
    assert shown["chains"] == [["history"], ["live"], ["airlines"], ["departures", "delays"]]
    stages = {stage["name"]: stage for stage in shown["stages"]}
    assert stages["history"]["finished"] and stages["history"]["rows"] == 300_000
    live = stages["live"]["instances"]
    assert [(i["name"], i["state"], i["rows"]) for i in live] == [
        ("EWR", "running", 1000),
        ("JFK", "finished", None),
        ("LGA", "running", 1002),
    ]
    assert [i["offsets"] for i in live] == ['{"logOffset":7}', "", '{"logOffset":9}']
    assert live[0]["query"] == {"bytes": live[0]["total"]["bytes"], "files": 2}
    [departures] = stages["departures"]["instances"]
    assert departures["offsets"] == "history[0]: 31, live[0]: 9, live[1]: 9, live[2]: 9"
    assert departures["in_flight"]["files"] == 3 and departures["tables"]["files"] == 1
    [delays] = stages["delays"]["instances"]
    assert (delays["shared_with"], delays["transactions_pending"], delays["watermark_ms"]) == ("departures", 1, 1_385_852_400_000)
    text = world.cli("show", "latest").output
    assert "LGA" in text and '{"logOffset":9}' in text and "2013-11-30" in text
    assert "to commit   delays[0]: 1 transaction\n" in text and "in the query of departures" in text and "read so far" in text
    without = world.cli("show", "latest", "--no-offsets").output
    assert "to commit   delays[0]: 1 transaction\n" in without and "2013-11-30 23:00:00" in without and "finished" in without
    assert not any(part in without for part in ("read so far", "logOffset", "history[0]: 31", "in the query of"))


def test_show_names_the_stages_that_dropped_rows_as_late(local: Any) -> None:
    local.run()
    stages = decode(local.storage.read_metadata(local.checkpoint(42)), "").stages
    late = tuple(msgspec.structs.replace(stage, late_rows=1234) if stage.name == "delays" else stage for stage in stages)
    assert "late rows" not in local.cli("show", "42").stdout
    local.checkpoint(43, stages=late)
    assert "late rows   delays 1,234" in " ".join(local.cli("show", "43").stdout.split("\n"))
    document = {stage["name"]: stage["late_rows"] for stage in local.json("show", "43")["stages"]}
    assert (document["delays"], document["live"]) == (1234, 0)


def test_show_of_a_drains_savepoint_says_that_its_event_time_has_ended(local: Any) -> None:
    local.run()
    chains = decode(local.storage.read_metadata(local.checkpoint(42)), "").chains
    drained = tuple(
        msgspec.structs.replace(
            chain,
            tasks={
                index: msgspec.structs.replace(task, watermark=MAX_WATERMARK_MS, end_of_data="drain")
                for index, task in chain.tasks.items()
            },
        )
        for chain in chains
    )
    local.savepoint(43, stops=True, chains=drained)
    local.end("FINISHED", ended_by="drain", keep_checkpoints=False)
    text = local.cli("show", "latest").output
    assert text.count("at end of data") == text.count("end of time") + 1 == 4  # `departures` has none: `delays` ends its query
    assert {i["watermark_ms"] for s in local.json("show", "latest")["stages"] for i in s["instances"]} == {None, MAX_WATERMARK_MS}


@pytest.mark.parametrize(
    ("watermark_ms", "words"),
    [
        (None, "-"),
        (0, "1970-01-01 00:00:00"),
        (253_402_300_799_000, "9999-12-31 23:59:59"),
        (253_402_300_800_000, "end of time"),
        (MAX_WATERMARK_MS, "end of time"),
        (MIN_WATERMARK_MS, "-"),
    ],
)
def test_every_watermark_has_words(watermark_ms: int | None, words: str) -> None:
    assert watermark_in_words(watermark_ms) == words


def test_numbers_of_state_have_all_their_digits(capsys: pytest.CaptureFixture[str]) -> None:
    row = parsed('{"sum": 12345678901234567.89, "price": 1.10, "number": 12345678901234567890123}')
    assert json_line(row) == '{"sum": 12345678901234567.89, "price": 1.10, "number": 12345678901234567890123}'
    write_json([row])
    assert '"sum": 12345678901234567.89,' in capsys.readouterr().out


def test_show_accepts_every_way_to_name_a_checkpoint(local: Any) -> None:
    local.run()
    checkpoint, savepoint = local.checkpoint(42), local.savepoint(43)
    for name in (
        "42",
        "chk-42",
        "chk-42-1",
        "latest",
        " ",
        checkpoint,
        f"{local.storage.url}/{checkpoint}",
        f"{local.url}/flights/{checkpoint}/",
    ):
        assert local.json("show", "--no-offsets", name)["location"] == checkpoint
    folder = savepoint.removeprefix("savepoints/")
    for name in (
        "43",
        "savepoint-43",
        "nightly",
        folder,
        savepoint,
        f"{savepoint}/_metadata",
        f"{local.storage.url}/{savepoint}",
    ):
        assert local.json("show", "--no-offsets", name)["location"] == savepoint
    years = local.savepoint(44, "2026"), local.savepoint(2027, "42")
    assert tuple(local.json("show", name)["location"] for name in ("2026", "2027", "42")) == (*years, checkpoint)
    local.store.delete([f"flights/{location}/_metadata" for location in years])
    missing = local.json("show", "44", code=6)
    assert f"Its checkpoints, newest first: {checkpoint}. Its savepoints, newest first: {savepoint}." in missing["message"]
    assert savepoint in local.json("show", "savepoints/savepoint-7-x-abcdef", code=6)["message"]
    assert checkpoint in local.json("show", "checkpoints/chk-7-1", code=6)["message"]


def test_the_kind_in_a_name_decides_between_a_checkpoint_and_a_savepoint_of_one_number(local: Any) -> None:
    local.run()
    savepoint, checkpoint = local.savepoint(5), local.checkpoint(7)
    assert local.json("dispose", "chk-5", "--yes", code=6)["error"] == "NothingThere"
    assert local.json("show", "savepoint-7", code=6)["error"] == "NothingThere"
    assert [local.json("show", name)["location"] for name in ("savepoint-5", "5", "chk-7")] == [savepoint, savepoint, checkpoint]


def test_show_accepts_a_url_on_s3(on_s3: Any) -> None:
    on_s3.run()
    checkpoint, savepoint = on_s3.checkpoint(42), on_s3.savepoint(43)
    for location in (checkpoint, savepoint):
        shown = on_s3.json("show", f"{on_s3.url}/flights/{location}", "--storage", "")
        assert (shown["location"], shown["url"]) == (location, f"{on_s3.url}/flights/{location}")


def test_a_url_needs_no_storage_to_be_named(local: Any, tmp_path: Path) -> None:
    local.run()
    checkpoint, savepoint = local.checkpoint(42), local.savepoint(43)
    elsewhere = tmp_path / "moved" / "my-savepoint"
    shutil.copytree(Path(local.url) / "flights" / savepoint, elsewhere)
    nowhere = ("--storage", "")
    for named, location in (
        (f"{local.url}/flights/{checkpoint}", checkpoint),
        (f"{local.storage.url}/{savepoint}", savepoint),
        (str(elsewhere), elsewhere.as_uri()),
    ):
        shown = local.json("show", named, *nowhere)
        assert shown["location"] == location and shown["stages"][1]["instances"][0]["offsets"] == '{"logOffset":7}'
    assert "or CHECKPOINT_STORAGE or DAGSTER_HOME" in local.cli("show", "43", *nowhere, code=2).stderr


def test_a_savepoint_in_another_directory_called_savepoints_is_shown(local: Any, tmp_path: Path) -> None:
    local.run()
    location = local.savepoint(43, target=str(tmp_path / "my archive" / "savepoints"))
    [folder] = (tmp_path / "my archive" / "savepoints").iterdir()
    for named in (str(folder), location):
        assert local.json("show", named, "--storage", "")["location"] == location


def test_a_number_or_name_that_fits_two_savepoints_is_not_guessed(local: Any) -> None:
    local.run()
    local.checkpoint(42)
    first, second, third = local.savepoint(43, "a"), local.savepoint(43, "b"), local.savepoint(44, "b")
    for named, several, other in (("43", (first, second), third), ("b", (second, third), first)):
        message = local.json("show", named, code=2)["message"]
        assert all(location in message for location in several) and other not in message
    assert local.json("show", "a")["location"] == first


def test_show_prints_the_status_of_the_running_pipeline(world: Any) -> None:
    world.run()
    world.checkpoint(42)
    assert "has not written its status yet" in world.cli("show").output
    world.status(stop=world.stopping(drain=True), phase="stopping")
    shown = world.json("show")
    assert shown["running"] and shown["status"]["phase"] == "stopping" and shown["newest"]["checkpoint_id"] == 42
    text = world.cli("show").output
    for part in ("stopping", "2f0c9a17 on worker-1", "roots           live", "checkpoint 42", "48.0 MB", "2 of 3 tasks",
                 "(drain): waiting for savepoint", "caught up", "3,003", "2013-12-01 00:00:00"):  # fmt: skip
        assert part in text


def later(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> Callable[[float], None]:
    """Sets the clock of modules forward, by seconds."""
    ahead = [0.0]
    clock = SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(seconds=ahead[0]))
    for module in modules:
        monkeypatch.setattr(module, "datetime", clock)
    return lambda seconds: ahead.__setitem__(0, seconds)


def test_show_dates_the_last_sign_of_a_run_whose_status_is_overdue(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    after = later(monkeypatch, status_view, listing, watching)
    local.run()
    local.status(updated_at=datetime.now(UTC))
    assert "last sign" not in local.cli("show").output and local.json("show")["last_sign"]["overdue"] is False
    local.status(updated_at=datetime.now(UTC) - timedelta(seconds=41))
    # At least 41 s: real time passes as well.
    busy = " ".join(local.cli("show").output.split())
    assert re.search(r"running, last status (4[1-9]|[5-9]\d) s ago: the run is busy, or its main thread has stopped", busy)
    assert "last sign" not in busy, "the lease is younger than what is overdue"
    local.status(updated_at=datetime.now(UTC) - timedelta(seconds=145), phase="starting")
    assert "last status" not in local.cli("show").output and local.json("show")["last_sign"]["overdue"] is False
    local.status(updated_at=datetime.now(UTC) - timedelta(seconds=41))
    after(41)
    ended = (
        r"ease ended (1[1-9]|[2-6]\d) s ago, last sign (4[1-9]|[5-9]\d) s ago: the run has died, or does not reach the storage"
    )
    for command, code in ((("show",), 0), (("watch", "--once"), 3), (("list",), 0)):
        dead = " ".join(local.cli(*command, code=code).output.split())
        assert re.search(ended, dead) and "running" not in dead.partition("2f0c9a17")[0]
    document = local.json("show")
    assert document["last_sign"]["overdue"] is True and document["running"] is False
    local.end("FAILED")
    assert local.json("show")["last_sign"] is None


def test_watch_writes_once_more_when_the_run_gives_no_sign(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    after = later(monkeypatch, status_view, watching)
    local.run()
    local.status()
    happens = iter([lambda: None, lambda: after(300), lambda: None, lambda: local.end("FAILED")])
    monkeypatch.setattr(watching, "sleep", lambda _: next(happens)())
    lines = [msgspec.json.decode(line) for line in local.cli("watch", "--json").stdout.splitlines()]
    assert [line["last_sign"] and line["last_sign"]["overdue"] for line in lines] == [False, True, None]


@pytest.mark.parametrize("process", ["here", "elsewhere"])
def test_watch_ends_when_the_run_has_died(local: Any, monkeypatch: pytest.MonkeyPatch, process: str) -> None:
    """Its process has ended; of another machine's: by this process's clock its lease was not renewed for its whole length."""
    clock, gone = [1000.0], []
    monkeypatch.setattr(watching, "monotonic", lambda: clock[0])
    monkeypatch.setattr(last_sign, "is_gone", lambda owner, observer: bool(gone))
    local.run()
    local.checkpoint(42)
    local.status()

    def passes(renew: bool = False, dies: bool = False) -> None:
        clock[0] += 20
        gone.extend([True] * dies)
        if renew:
            local.ownership.renew()

    here = process == "here"
    happens = [passes, lambda: passes(renew=True), passes, lambda: passes(dies=here)]
    steps = iter(happens)
    monkeypatch.setattr(watching, "sleep", lambda _: next(steps)())
    ended = local.cli("watch", "--json", code=3)
    assert next(steps, None) is None
    documents = [msgspec.json.decode(line) for line in ended.stdout.splitlines()]
    assert [document["last_sign"]["gone"] for document in documents] == [False, False, here]
    why = "its process has ended" if here else "it has not renewed its lease for a whole 30 s"
    assert "flights: it is owned by run 2f0c9a17" in ended.stderr and why in ended.stderr
    assert "newest checkpoint: checkpoints/chk-42-1" in ended.stderr
    gone.append(True)
    assert documents[-1]["running"] is not here and local.json("show")["running"] is False
    for command, code in ((("show",), 0), (("watch",), 3), (("watch", "--once"), 3), (("list",), 0)):
        shown = " ".join(local.cli(*command, code=code).output.split())
        assert re.search(
            "[Dd]ied, last sign .* ago: the run's process has ended, so another run may take the pipeline over", shown
        )
    report = local.json("report")
    assert (report["state"], report["running"]) == ("died", False)


def test_show_and_watch_say_which_source_does_not_answer_and_what_to_check(local: Any) -> None:
    local.run()
    stages = local.status().stages
    silence = SilenceStatus(seconds=24.0, doing="asking", words="Getting offsets from KafkaV2[Subscribe[clicks]]")
    silent = tuple(msgspec.structs.replace(instance, caught_up=None, silence=silence) for instance in stages[1].instances)
    local.status(stages=(stages[0], msgspec.structs.replace(stages[1], instances=silent), *stages[2:]))
    for command in (["show"], ["watch", "--once"]):
        text = " ".join(local.cli(*command).output.split())
        assert (
            text.count("Source 'live' has not answered for 24 s; Spark says: Getting offsets from KafkaV2[Subscribe[clicks]]")
            == 1
        )
        assert "Check its address, port, credentials" in text and "no answer" in text
    assert local.json("show")["status"]["stages"][1]["instances"][0]["silence"]["doing"] == "asking"


def test_show_leaves_out_a_number_of_rows_that_is_not_known(local: Any) -> None:
    local.run()
    stages = local.status().stages
    local.status(stages=tuple(msgspec.structs.replace(stage, rows=None) for stage in stages))
    assert "3,003" not in local.cli("show").output and local.json("show")["status"]["stages"][1]["rows"] is None


def test_show_prints_the_progress_of_split_sources(local: Any) -> None:
    local.run()
    stages = local.status().stages
    assert "splits" not in local.cli("show").output
    live = SplitsStatus(discovered=1200, assigned=3, finished=1100)
    history = SplitsStatus(discovered=40, assigned=0, finished=40, complete=True)
    split = (msgspec.structs.replace(stages[0], splits=history), msgspec.structs.replace(stages[1], splits=live), *stages[2:])
    local.status(stages=split)
    text = local.cli("show").output
    assert "splits" in text and "1,100 of 1,200 so far" in text and "40 of 40" in text and "40 of 40 so far" not in text
    assert local.json("show")["status"]["stages"][1]["splits"] == msgspec.to_builtins(live)


def test_a_status_that_an_earlier_run_left_behind_is_not_shown(local: Any) -> None:
    local.run()
    old = local.status()
    local.end()
    assert local.json("show")["status"] is None
    local.run()
    assert local.json("show")["status"] is None
    write_status(local.storage, msgspec.structs.replace(old, epoch=2))
    assert local.json("show")["status"]["epoch"] == 2


# graph


def test_graph_of_the_code_alone(local: Any, code: str) -> None:
    drawn = local.json("graph", "-f", code, "--code")
    assert {s["name"]: (s["kind"], s["instances"], s["root"], s["sink"]) for s in drawn["stages"]} == {
        "history": ("bounded source", 1, True, ""),
        "live": ("unbounded source", 3, True, ""),
        "airlines": ("bounded source", 1, True, ""),
        "departures": ("stage", 1, False, ""),
        "delays": ("stage", 1, False, "ParquetSink"),
    }
    assert ["departures", "delays"] in drawn["chains"]
    assert {(e["source"], e["target"], e["table"]) for e in drawn["edges"]} == {
        ("history", "departures", False),
        ("live", "departures", False),
        ("airlines", "departures", True),
        ("departures", "delays", False),
    }
    assert local.json("graph", "-f", code)["seen"] == "as the code says"  # storage adds nothing


def test_graph_of_a_checkpoint_knows_edges_roots_and_what_has_finished(world: Any) -> None:
    world.run()
    world.checkpoint(42)
    drawn = world.json("graph")
    assert drawn["seen"] == "checkpoint 42"
    states = {s["name"]: (s["state"], s["root"]) for s in drawn["stages"]}
    assert states == {
        "history": ("finished", False),
        "live": ("partly finished", True),
        "airlines": ("finished", False),
        "departures": ("running", False),
        "delays": ("running", False),
    }
    assert {(e["source"], e["target"]) for e in drawn["edges"]} == {
        ("history", "departures"),
        ("live", "departures"),
        ("airlines", "departures"),
        ("departures", "delays"),
    }
    text = world.cli("graph").output
    assert "live x3" in text and "root, partly finished" in text and "reads history, live, airlines (table)" in text


def test_rows_dropped_as_late_are_shown_once_there_are_any(local: Any) -> None:
    local.run()
    status = local.status()
    assert "late rows" not in local.cli("watch", "--once").stdout
    stages = tuple(msgspec.structs.replace(s, late_rows=1234) if s.name == "delays" else s for s in status.stages)
    local.status(stages=stages, sequence=2)
    shown = local.cli("watch", "--once").stdout
    assert "late rows" in shown and "1,234" in shown
    document = local.json("watch", "--once")["status"]["stages"]
    assert {s["name"]: s.get("late_rows", 0) for s in document if s.get("late_rows")} == {"delays": 1234}


def test_graph_of_the_running_pipeline_moves_its_roots(local: Any, code: str) -> None:
    local.run()
    local.checkpoint(42)
    ended = tuple(InstanceStatus(name=n, state="FINISHED", end_of_data=True) for n in ("EWR", "JFK", "LGA"))
    status = local.status(roots=("departures",))
    stages = tuple(
        StageStatus(name="live", finished=True, rows=9, instances=ended) if s.name == "live" else s for s in status.stages
    )
    local.status(roots=("departures",), stages=stages, sequence=2)
    for options in ((), ("-f", code)):
        drawn = local.json("graph", *options)
        assert drawn["seen"] == "running"
        assert [s["name"] for s in drawn["stages"] if s["root"]] == ["departures"]
        assert [s["name"] for s in drawn["stages"] if s["state"] == "finished"] == ["history", "live", "airlines"]
        assert len(drawn["edges"]) == 4
    assert local.json("graph", "42")["seen"] == "checkpoint 42"


def test_graph_of_a_checkpoint_has_the_names_of_the_code_and_of_the_last_run(local: Any, code: str, tmp_path: Path) -> None:
    local.run()
    local.checkpoint(42)
    renamed = tmp_path / "renamed.py"
    renamed.write_text(
        CODE.replace('/nowhere"))\ndef delays(', '/nowhere"), uid="delays")\ndef lateness(').replace(", delays]", ", lateness]")
    )
    for where in ((), ("42",)):
        drawn = local.json("graph", *where, "-f", str(renamed))
        assert [s["name"] for s in drawn["stages"]] == ["history", "live", "airlines", "departures", "lateness"]
        assert {s["state"] for s in drawn["stages"] if s["name"] == "lateness"} == {"running"}
        assert ["departures", "lateness"] in drawn["chains"] and len(drawn["edges"]) == 4
    stages = tuple(
        msgspec.structs.replace(s, name="lateness", uid="delays") if s.name == "delays" else s for s in local.status().stages
    )
    local.status(stages=stages, sequence=2)
    local.end("FAILED", keep_checkpoints=True, ended_by="")
    assert "lateness" in {s["name"] for s in local.json("graph")["stages"]}


def test_graph_as_mermaid(local: Any, code: str, tmp_path: Path) -> None:
    local.run()
    local.checkpoint(42)
    mermaid = local.cli("graph", "-f", code, "--format", "mermaid").stdout
    assert mermaid.startswith("flowchart LR\n")
    for line in (
        's1["live<br/>unbounded source, 3 instances, partly finished, root"]',
        's4["delays<br/>running, to ParquetSink"]',
        'subgraph c3["one query"]',
        "s2 -. table .-> s3",
        "class s0,s2 finished",
        "class s1 root",
    ):
        assert f"  {line}\n" in mermaid
    assert local.cli("graph", "-o", str(tmp_path / "graph.mmd")).exit_code == 0
    assert (tmp_path / "graph.mmd").read_text().startswith("flowchart LR\n")
    assert local.json("graph", "-o", str(tmp_path / "both.mmd"))["name"] == "flights"
    assert (tmp_path / "both.mmd").read_text() == (tmp_path / "graph.mmd").read_text()
    assert "cannot be written" in local.cli("graph", "-o", str(tmp_path / "no" / "graph.mmd"), code=2).stderr
    picture = tmp_path / "graph.png"
    assert "ends in .mmd (Mermaid) or .txt (text)" in local.cli("graph", "-o", str(picture), code=2).stderr
    assert not picture.exists() and local.cli("graph", "-o", str(picture), "--format", "text").exit_code == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("-m", "no_such_module"), "no_such_module cannot be imported\nModuleNotFoundError"),
        (("-f", "no_such_file.py"), "expected a Python file at"),
        (("-a", "flights"), "name that with -m or -f"),
        (("-m", "a", "-f", "b"), "found both"),
        (("--code",), "name it with -m or -f"),
    ],
)
def test_code_that_cannot_be_found_is_wrong_usage(local: Any, options: tuple[str, ...], part: str) -> None:
    assert part in local.cli("graph", *options, code=2).stderr


def test_code_without_the_pipeline_says_what_it_has(local: Any, code: str, tmp_path: Path) -> None:
    assert "found nothing of that name. Its pipelines: flights" in local.cli("graph", "-f", code, "-a", "ships", code=2).stderr
    assert "found a FunctionStage" in local.cli("graph", "-f", code, "-a", "live", code=2).stderr
    assert "'ships' in" in local.cli("graph", "-f", code, "--pipeline", "ships", code=2).stderr
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    assert "neither a Pipeline among its variables" in local.cli("graph", "-f", str(empty), code=2).stderr
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\nraise RuntimeError('of the user')\n")
    error = local.cli("graph", "-f", str(broken), code=2).stderr
    assert f"cannot be imported at {broken}:2: " in error and "\nRuntimeError: of the user" in error


def test_what_the_code_prints_is_no_part_of_the_document(local: Any, code: str) -> None:
    text = Path(code).read_text()
    Path(code).write_text(f"print('words of the user')\n{text}")
    shown = local.cli("graph", "--code", "--json", "-f", code)
    assert msgspec.json.decode(shown.stdout)["name"] == "flights" and "words of the user" in shown.stderr


@pytest.mark.parametrize(
    "ending", ["sys.exit()", "sys.exit(0)", "sys.exit('the end')", "defs = definitions(lambda: sys.exit(0))"]
)
def test_code_that_ends_its_process_does_not_end_the_command_with_success(local: Any, tmp_path: Path, ending: str) -> None:
    code = tmp_path / "script.py"
    code.write_text(f"import sys\nfrom dagster import definitions\n{ending}\n")
    assert "SystemExit: " in local.cli("graph", "--code", "-f", str(code), code=2).stderr
    checked = CliRunner().invoke(app, ["check", "-f", str(code), "--json"])
    assert checked.exit_code in (1, 2) and "SystemExit: " in checked.stdout


# watch


def test_watch_once_and_when_nothing_runs(world: Any) -> None:
    world.run()
    world.status()
    text = world.cli("watch", "--once").output
    assert "1.5 s: 2 of 3 tasks, waits for departures + delays" in text
    assert "departures + delays, acknowledged after 0.7 s (alignment 0.5 s, sync 0.2 s, async 0.1 s)" in text
    assert "39 completed (2 of them savepoints), 1 failed; 0.3 s p50, 0.9 s p99, 4.0 s at most" in text
    assert "ago: not complete within 600 s (CHECKPOINT_EXPIRED)" in text
    assert world.json("watch", "--once")["status"]["sequence"] == 1
    world.end()
    assert "not running" in world.cli("watch", code=3).output


def test_the_newest_checkpoint_is_named_before_the_next_status(local: Any) -> None:
    local.run()
    local.checkpoint(42)
    local.status()
    for command in (["show"], ["watch", "--once"]):
        assert "checkpoint 42, " in local.cli(*command).output and "took " in local.cli(*command).output
    local.checkpoint(43)
    for command in (["show"], ["watch", "--once"]):
        shown = local.cli(*command).output
        assert "checkpoint 43, " in shown and "checkpoint 42, " not in shown


def test_watch_follows_until_the_run_has_ended(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()
    local.status(sequence=1)
    happens = iter([lambda: None, lambda: local.status(sequence=2, phase="stopping"), lambda: local.end("FINISHED")])
    monkeypatch.setattr(watching, "sleep", lambda _: next(happens)())
    lines = [msgspec.json.decode(line) for line in local.cli("watch", "--json").stdout.splitlines()]
    assert [line["status"] and line["status"]["sequence"] for line in lines] == [1, 2, None]
    assert [line["running"] for line in lines] == [True, True, False]


def test_watch_measures_rows_per_second_and_reports_an_outdated_status(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()
    first = local.status(sequence=1, interval=5.0)
    stages = tuple(msgspec.structs.replace(stage, rows=stage.rows + 500) for stage in first.stages)
    later = first.updated_at + timedelta(seconds=10)
    clock = [1000.0]

    def silence() -> None:
        clock[0] += 21

    happens = iter([lambda: local.status(sequence=2, stages=stages, updated_at=later), silence, lambda: local.end("FAILED")])
    monkeypatch.setattr(watching, "sleep", lambda _: next(happens)())
    monkeypatch.setattr(watching, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watching, "console", lambda: SimpleNamespace(is_terminal=True))
    frames: list[str] = []

    class Recorded:
        def __init__(self, frame: Any, **_: Any) -> None:
            self.update(frame, refresh=True)

        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, frame: Any, *, refresh: bool) -> None:
            out = Console(width=100, record=True, file=io.StringIO())
            out.print(frame)
            frames.append(out.export_text())

    monkeypatch.setattr("rich.live.Live", Recorded)
    local.cli("watch")
    assert [" 50 " in frame for frame in frames] == [False, True, True, False]
    assert ["No new status for 21 s" in frame for frame in frames] == [False, False, True, False]
    assert "ended FAILED" in frames[-1]


def test_watch_continues_while_storage_is_unavailable(on_s3: Any, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_s3.run()
    on_s3.status()
    faults: list[Any] = []

    def away() -> None:
        faults.append(s3_server.inject(Fault("drop", times=None)))

    def back() -> None:
        s3_server.heal()
        on_s3.end("FAILED")

    happens = iter([away, back])
    monkeypatch.setattr(watching, "sleep", lambda _: next(happens)())
    lines = on_s3.cli("watch", "--json").stdout.splitlines()
    assert len(lines) == 2 and faults[0].hits
