"""`verify_savepoint`: it finds and names all damage of a checkpoint or savepoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.errors import InvalidKey, MissingCheckpoint, StorageUnavailable
from dagster_checkpoints.pipeline import Pipeline, StageInput, bounded_source, stage, unbounded_source
from dagster_checkpoints.sinks import ParquetSink
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.storage import state_files
from dagster_checkpoints.storage import verification as verified_by
from dagster_checkpoints.storage.verification import file_sizes, verify_savepoint

AIRPORTS = ["EWR", "JFK", "LGA"]


@bounded_source
def history(context: Any) -> Any: ...


@unbounded_source(instances=AIRPORTS)
def live(context: Any) -> Any: ...


@bounded_source
def airlines(context: Any) -> Any: ...


@bounded_source
def planes(context: Any) -> Any: ...


@stage(inputs={"airlines": StageInput(mode="static")})
def departures(history: Any, live: Any, airlines: Any) -> Any: ...


@stage(sink=ParquetSink("/nowhere"))
def delays(departures: Any) -> Any: ...


FLIGHTS = Pipeline("flights", [history, live, airlines, departures, delays])


@pytest.fixture(params=["checkpoint", "savepoint"])
def taken(request: pytest.FixtureRequest, world: Any) -> Any:
    """A storage with one checkpoint or savepoint, and access to its files."""
    world.run()
    world.location = world.checkpoint(42) if request.param == "checkpoint" else world.savepoint(42)
    world.folder_of_files = "shared" if request.param == "checkpoint" else f"{world.location}/state"
    return world


def _key(world: Any, text: str) -> str:
    """The key of the file with that content."""
    return f"flights/{world.folder_of_files}/{world.files[text].name}"


def test_a_sound_savepoint_has_no_findings(taken: Any) -> None:
    report = verify_savepoint(taken.storage, taken.location, FLIGHTS)
    assert (report.ok, report.problems) == (True, ())
    assert report.metadata is not None and report.metadata.checkpoint_id == 42
    assert (report.files, report.bytes) == (len(taken.files), taken.bytes)
    assert report.url == f"{taken.storage.url}/{taken.location}"


def test_a_flipped_byte_is_found_in_every_file(taken: Any) -> None:
    for text in taken.files:
        data = bytearray(text.encode())
        data[len(data) // 2] ^= 1
        taken.store.put(_key(taken, text), bytes(data))
    problems = verify_savepoint(taken.storage, taken.location).problems
    assert {problem.kind for problem in problems} == {"wrong_content"}
    assert {problem.where for problem in problems} == {f"{taken.store.url}/{_key(taken, text)}" for text in taken.files}
    assert all(sum(file.sha256 in problem.what for problem in problems) == 1 for file in taken.files.values())
    assert all(problem.remedy for problem in problems)


def test_missing_and_cut_files_are_found_and_their_users_named(taken: Any) -> None:
    taken.store.delete([_key(taken, "the state of windows at 42")])
    taken.store.put(_key(taken, "the airlines"), b"the air")
    problems = {problem.kind: problem for problem in verify_savepoint(taken.storage, taken.location).problems}
    assert set(problems) == {"missing_file", "wrong_size"}
    assert "state/0/0/9.zip of departures[0]: expected 26 bytes, found no object" in problems["missing_file"].what
    assert "segments/airlines.parquet of departures[0]: expected 12 bytes" in problems["wrong_size"].what
    assert "found 7 bytes" in problems["wrong_size"].what


def test_a_damaged_file_that_several_stages_need_is_one_problem(taken: Any) -> None:
    taken.store.delete([_key(taken, "v1\n{}")])
    [problem] = verify_savepoint(taken.storage, taken.location).problems
    assert "commits/4 of live[EWR] and 1 more" in problem.what


@pytest.mark.parametrize("cut", [0, 1, 40, -1, -40])
def test_truncated_metadata_is_found(taken: Any, cut: int) -> None:
    key = f"flights/{taken.location}/_metadata"
    taken.store.put(key, taken.store.get(key)[:cut] if cut else b"")
    report = verify_savepoint(taken.storage, taken.location, FLIGHTS)
    assert [problem.kind for problem in report.problems] == ["corrupt_metadata"]
    assert report.metadata is None and report.problems[0].where.endswith("/_metadata")


def test_flipped_bytes_in_metadata_are_found(taken: Any) -> None:
    key = f"flights/{taken.location}/_metadata"
    whole = taken.store.get(key)
    for position in range(0, len(whole), max(len(whole) // 7, 1)):
        data = bytearray(whole)
        data[position] ^= 1
        taken.store.put(key, bytes(data))
        assert verify_savepoint(taken.storage, taken.location).problems


def test_metadata_of_another_release_is_found(taken: Any) -> None:
    body = b'{"checkpoint_id":42}'
    covered = b"dagster-checkpoints 99 %d\n%s" % (len(body), body)
    header = {"format": "dagster-checkpoints", "version": 99, "length": len(body), "sha256": hashlib.sha256(covered).hexdigest()}
    data = json.dumps(header, separators=(",", ":")).encode() + b"\n" + body + b"\n"
    taken.store.put(f"flights/{taken.location}/_metadata", data)
    [problem] = verify_savepoint(taken.storage, taken.location).problems
    assert problem.kind == "unknown_version" and "version 99" in problem.what


def test_missing_metadata_is_found_and_the_existing_savepoints_are_named(taken: Any) -> None:
    taken.store.delete([f"flights/{taken.location}/_metadata"])
    [problem] = verify_savepoint(taken.storage, taken.location).problems
    assert problem.kind == "missing_metadata" and problem.where == f"{taken.storage.url}/{taken.location}/_metadata"


def test_a_checkpoint_that_its_pipeline_deletes_meanwhile_is_not_damaged(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local.run()
    location, read = local.checkpoint(42), state_files.read_through

    def read_late(store: Any, key: str) -> tuple[int, str]:
        if local.storage.list_checkpoints():
            local.storage.delete_checkpoint(location)
        return read(store, key)

    monkeypatch.setattr(state_files, "read_through", read_late)
    monkeypatch.setattr(verified_by, "_PARALLEL_READS", 1)
    with pytest.raises(MissingCheckpoint, match=r"chk-42-1 to stay while it was verified.*a newer one has replaced it"):
        verify_savepoint(local.storage, location)


def test_a_savepoint_elsewhere_is_verified_there(local: Any, tmp_path: Path) -> None:
    local.run()
    location = local.savepoint(42, target=str(tmp_path / "elsewhere"))
    assert verify_savepoint(local.storage, location, FLIGHTS).ok
    state = next((tmp_path / "elsewhere").glob("*/state"))
    next(iter(sorted(state.iterdir()))).write_bytes(b"x")
    for named in (location, str(state.parent), f"{state.parent}/_metadata"):
        report = verify_savepoint(local.storage, named)
        assert [problem.kind for problem in report.problems] == ["wrong_size"] and report.url == state.parent.as_uri()


def _pipeline(*stages: Any, **options: Any) -> Pipeline:
    return Pipeline("flights", list(stages), **options)


@unbounded_source(name="live", instances=["EWR", "JFK"])  # LGA runs
def fewer(context: Any) -> Any: ...


@stage(name="delays", sink=ParquetSink("/nowhere"))
def delays_of_history(history: Any, departures: Any) -> Any: ...


@stage(sink=ParquetSink("/nowhere"))
def arrivals(planes: Any) -> Any: ...


@stage(inputs={"airlines": StageInput(mode="static")}, sink=ParquetSink("/elsewhere"))
def report(airlines: Any) -> Any: ...


@stage(name="history")
def derived_history(planes: Any) -> Any: ...


@pytest.mark.parametrize(
    ("pipeline", "kind", "part"),
    [
        (_pipeline(history, fewer, airlines, departures, delays), "instances_changed", "'live'"),
        (_pipeline(planes, arrivals), "non_restored_state", "another pipeline of the same name"),
        (_pipeline(history, live, airlines, departures, delays_of_history), "chain_layout_changed", "'delays'"),
        (_pipeline(history, live, airlines, departures, delays, report), "input_rows_gone", "'report'"),
        (_pipeline(planes, derived_history, live, airlines, departures, delays), "unfinished_predecessor", "'planes'"),
    ],
)
def test_a_pipeline_that_does_not_fit_is_found(taken: Any, pipeline: Pipeline, kind: str, part: str) -> None:
    report = verify_savepoint(taken.storage, taken.location, pipeline)
    assert [problem.kind for problem in report.problems] == [kind]
    assert part in report.problems[0].what and report.metadata is not None
    allowed = verify_savepoint(taken.storage, taken.location, pipeline, allow_non_restored_state=True)
    assert allowed.ok is (kind == "non_restored_state")


def test_state_that_the_installed_spark_does_not_read_is_found(taken: Any) -> None:
    assert verify_savepoint(taken.storage, taken.location, FLIGHTS, spark_version="4.2.1").ok
    written = taken.savepoint(43, spark_version="4.9.0")
    [problem] = verify_savepoint(taken.storage, written, FLIGHTS, spark_version="4.3.0").problems
    assert problem.kind == "spark_version_changed"
    assert "Spark 4.9.0 has written" in problem.what and "Restore it with Spark 4.9.0" in problem.what
    assert verify_savepoint(taken.storage, written, FLIGHTS).ok, "without a Spark nothing is compared"


def test_all_problems_are_reported(taken: Any) -> None:
    taken.store.delete([_key(taken, "the airlines"), _key(taken, "segment 0")])
    pipeline = _pipeline(history, fewer, airlines, departures, delays)
    kinds = sorted(problem.kind for problem in verify_savepoint(taken.storage, taken.location, pipeline).problems)
    assert kinds == ["instances_changed", "missing_file", "missing_file"]


def test_unavailable_storage_is_not_a_finding(on_s3: Any, s3_server: Any) -> None:
    on_s3.run()
    location = on_s3.savepoint(42)
    with s3_server.outage(), pytest.raises(StorageUnavailable):
        verify_savepoint(on_s3.storage, location)
    with s3_server.outage("state/"), pytest.raises(StorageUnavailable):
        verify_savepoint(on_s3.storage, location)


def test_an_invalid_location_is_an_error(local: Any) -> None:
    local.run()
    with pytest.raises(InvalidKey):
        verify_savepoint(local.storage, "/somewhere/else/checkpoints/chk-1-1")


def test_sizes_are_those_of_distinct_files(local: Any) -> None:
    local.run()
    metadata = decode(local.storage.read_metadata(local.checkpoint(42)), "here")
    sizes = file_sizes(metadata)
    assert sum(sizes.values()) == local.bytes and set(sizes) == {file.sha256 for file in local.files.values()}
