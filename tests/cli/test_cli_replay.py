"""`replay`: a trace as a history, and whether the machines of this version decide the same."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from dagster_checkpoints.cli.app import app
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.coordinator import CheckpointCoordinator
from dagster_checkpoints.coordination.events import Acknowledged, CheckpointRequested, MetadataWritten, TaskStateChanged, Tick
from dagster_checkpoints.coordination.plan import TaskState
from dagster_checkpoints.execution.trace import Recorder, made
from dagster_checkpoints.pipeline import ExecutionGraph, TaskId, Vertex

A = TaskId("history", 0)
GRAPH = ExecutionGraph((Vertex("history", ("history",), 1),), ())


def trace_at(path: Path) -> Path:
    lines: list[str] = []
    recorder = Recorder(lines.append)
    recorder.begin({"pipeline": "flights", "run": "r-1"})
    job = made(CheckpointCoordinator, "job", recorder, 100.0, graph=GRAPH, config=CheckpointConfig(interval=None))
    job.handle(Tick(), 100.1)
    job.handle(TaskStateChanged(A, TaskState.RUNNING), 100.2)
    job.handle(CheckpointRequested("nightly"), 101.0)
    job.handle(Acknowledged(A, 1), 101.5)
    job.handle(MetadataWritten(1, "checkpoints/chk-1"), 102.0)
    path.write_text("\n".join(lines) + "\n")
    return path


def replayed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_a_trace_is_shown_as_a_history_with_time_machine_decision_and_cause(tmp_path: Path) -> None:
    result = replayed(trace_at(tmp_path / "run.trace"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:2] == ["pipeline: flights", "run: r-1"]
    (asked,) = (line for line in lines if "<- checkpoint requested" in line)
    assert "1.000 s" in asked and "job" in asked and "checkpoint triggered (checkpoint_id 1" in asked and "nightly" in asked
    assert any("trigger task (task history[0], checkpoint barrier (checkpoint_id 1" in line for line in lines)
    assert not any("tick" in line for line in lines)  # it had no consequence
    assert lines[-1] == "replayed: 5 events of 1 machine; this version's machines decide the same"


def test_all_shows_the_events_without_consequences(tmp_path: Path) -> None:
    result = replayed(trace_at(tmp_path / "run.trace"), "--all")
    assert any(line.endswith("-  <- tick") for line in result.stdout.splitlines())


def test_a_trace_that_the_machines_do_not_repeat_fails_the_command(tmp_path: Path) -> None:
    path = trace_at(tmp_path / "run.trace")
    path.write_text(path.read_text().replace('"request_id":"nightly"', '"request_id":"hourly"', 1))
    result = replayed(path)
    assert result.exit_code == 1
    assert "this version's machines differ from the trace; the first: entry 4: job at 101.000 s took" in result.stderr
    shown = replayed(path, "--json")
    assert shown.exit_code == 1
    document, _ = json.JSONDecoder().raw_decode(shown.stdout)
    assert document["about"] == {"pipeline": "flights", "run": "r-1"} and len(document["differences"]) == 3


def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    assert replayed(tmp_path / "nothing").exit_code == 6
    assert "found a directory" in replayed(tmp_path).stderr
    result = replayed(tmp_path / ("x" * 5000))
    assert result.exit_code == 6 and "expected a trace that can be read" in result.stderr and "too long" in result.stderr
    (tmp_path / "x").write_text("hello\n")
    result = replayed(tmp_path / "x")
    assert result.exit_code == 1 and "expected a trace of version 3, found 'hello" in result.stderr


def test_a_trace_that_was_cut_inside_a_letter_is_shown_up_to_there(tmp_path: Path) -> None:
    path = trace_at(tmp_path / "run.trace")
    whole = replayed(path).stdout
    with path.open("ab") as file:
        file.write('{"at": 103.0, "machine": "n\u00e4chtlich'.encode()[:-8])
    assert path.read_bytes()[-1] == 0xC3, "half of a letter"
    assert replayed(path).stdout == whole


def test_a_file_that_is_no_text_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    path.write_bytes(bytes(range(256)))
    result = replayed(path)
    assert result.exit_code == 1 and "expected a trace" in result.stderr
