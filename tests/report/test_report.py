"""What the report says of a history: runs, time line, summary, curves, and the file that holds it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report import history_of, report_of, status_of
from dagster_checkpoints.control.history import (
    CheckpointEntry,
    Entries,
    EventEntry,
    HistorySample,
    Measured,
    StageSample,
    VertexParts,
)
from dagster_checkpoints.control.status import InstanceStatus, PipelineStatus, StageStatus
from dagster_checkpoints.report.building import DETAILED, as_json, build_report, page
from dagster_checkpoints.report.stages import series
from dagster_checkpoints.report.values import PipelineReport

AT = datetime(2026, 1, 31, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def event(seconds: float, kind: Any, epoch: int = 1, **fields: Any) -> EventEntry:
    return EventEntry(at=at(seconds), epoch=epoch, kind=kind, **fields)


def checkpoint(number: int, seconds: float = 1.0, **fields: Any) -> CheckpointEntry:
    values: dict[str, Any] = {
        "epoch": 1,
        "kind": "checkpoint",
        "status": "completed",
        "triggered_at": at(number * 60),
        "ended_at": at(number * 60 + seconds),
        "acknowledged": 1,
        "expected": 1,
        "measured": Measured(seconds, seconds / 2, 0, 0, seconds / 2, number, 100 * number, 0),
    }
    return CheckpointEntry(checkpoint_id=number, **{**values, **fields})


def report(*events: EventEntry, checkpoints: Any = (), samples: Any = (), **fields: Any) -> PipelineReport:
    values: dict[str, Any] = {"status": None, "state": "running", "running_epoch": None, "now": at(10_000)}
    entries = Entries(tuple(checkpoints), tuple(events), tuple(samples))
    return build_report(pipeline="flights", url="file:///checkpoints/flights", entries=entries, **{**values, **fields})


RUN = event(0, "run_started", run_id="a", instances={"live": 1, "sums": 2})
START = event(5, "job_started", job_id=3, attempt=1)


@pytest.mark.parametrize(
    ("events", "running", "expected"),
    [
        ((RUN, START), 1, ("", False, None, 1, 5.0)),
        ((RUN, START), None, ("no end recorded", True, None, 1, 5.0)),
        ((RUN, START, event(9, "run_ended", status="FINISHED", ended_by="suspend")), None, ("suspended", False, 9.0, 1, 9.0)),
        ((RUN, START, event(9, "run_ended", status="FINISHED", ended_by="drain")), None, ("drained", False, 9.0, 1, 9.0)),
        ((RUN, START, event(9, "run_ended", status="FAILED", text="no")), None, ("failed", True, 9.0, 1, 9.0)),
        ((RUN, event(9, "run_ended")), None, ("stopped before its job ended", True, 9.0, 0, 9.0)),
        (
            (RUN, START, event(6, "restarting", attempt=2, text="lost"), event(8, "job_started", job_id=3, attempt=2)),
            1,
            ("", False, None, 2, 8.0),
        ),
    ],
)
def test_how_a_run_ended(events: tuple[EventEntry, ...], running: int | None, expected: tuple[Any, ...]) -> None:
    (run,) = report(*events, running_epoch=running).runs
    ended = run.ended_at - AT.timestamp() if run.ended_at is not None else None
    assert (run.end, run.failed, ended, run.attempts, run.last_sign_at - AT.timestamp()) == expected


@pytest.mark.parametrize(
    ("events", "checkpoints", "expected"),
    [
        ((RUN,), (), [("run", "run a began", False)]),
        ((START,), (), [("start", "job 3: new start", False)]),
        (
            (event(5, "job_started", job_id=3, attempt=2, checkpoint_id=7, location="chk-7", stages=("live", "sums")),),
            (),
            [("start", "job 3, attempt 2: restored from 7, stages live, sums", False)],
        ),
        ((event(5, "restarting", text="lost"),), (), [("restart", "restart of all unfinished stages", True)]),
        ((event(5, "stage_finished", stages=("live",)),), (), [("finish", "stage live finished", False)]),
        ((event(5, "stopping", text="drain"),), (), [("stop", "stop requested: drain", False)]),
        ((event(5, "run_ended", status="CANCELED"),), (), [("end", "run ended: canceled", False)]),
        ((RUN,), (checkpoint(1),), [("run", "run a began", False)]),
        ((RUN,), (checkpoint(1, kind="savepoint"),), [("savepoint", "savepoint 1", False), ("run", "run a began", False)]),
        (
            (RUN,),
            (checkpoint(1, kind="savepoint", status="failed", message="full"),),
            [("savepoint", "savepoint 1 failed", True), ("run", "run a began", False)],
        ),
        (
            (RUN,),
            (checkpoint(1, kind="savepoint", stops_job=True),),
            [("savepoint", "savepoint 1 of a stop", False), ("run", "run a began", False)],
        ),
    ],
)
def test_the_time_line(
    events: tuple[EventEntry, ...], checkpoints: tuple[CheckpointEntry, ...], expected: list[tuple[str, str, bool]]
) -> None:
    found = report(*events, checkpoints=checkpoints, running_epoch=1).timeline
    assert [(row.kind, row.title, row.failed) for row in found] == expected


@pytest.mark.parametrize(
    ("instances", "job", "restored", "expected"),
    [
        ({"live": 1, "sums": 2}, 3, 7, []),
        ({"live": 1, "sums": 4}, 3, 7, ["rescaled: sums 2 to 4"]),
        ({"live": 2, "sums": 1}, 3, 7, ["rescaled: live 1 to 2, sums 2 to 1"]),
        ({"live": 1, "sums": 2, "new": 9}, 3, 7, []),
        ({"live": 1, "sums": 4}, 4, None, []),
    ],
)
def test_a_rescale_is_a_run_that_continues_with_other_instances(
    instances: dict[str, int], job: int, restored: int | None, expected: list[str]
) -> None:
    second = event(100, "run_started", 2, run_id="b", instances=instances)
    start = event(105, "job_started", 2, job_id=job, attempt=1, checkpoint_id=restored)
    found = report(RUN, START, second, start, running_epoch=2).timeline
    assert [row.title for row in found if row.kind == "rescale"] == expected


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=200))
def test_the_summary_of_any_durations(durations: list[float]) -> None:
    made = report(checkpoints=[checkpoint(number, seconds) for number, seconds in enumerate(durations)])
    row = made.summary[0]
    values = sorted(each.duration for each in [checkpoint(0, seconds) for seconds in durations])
    assert (row.quantity, row.unit, row.count) == ("duration", "s", len(values))
    assert (row.minimum, row.maximum) == (values[0], values[-1])
    assert {row.p50, row.p90, row.p99} <= set(values)
    assert row.minimum <= row.p50 <= row.p90 <= row.p99 <= row.maximum
    assert row.average == pytest.approx(sum(values) / len(values))


def test_failed_checkpoints_do_not_count_in_the_summary() -> None:
    made = report(checkpoints=[checkpoint(1), checkpoint(2, 600.0, status="failed", reason="CHECKPOINT_EXPIRED")])
    assert made.summary[0].maximum == 1.0
    assert (made.counts.completed, made.counts.failed) == (1, 1)
    assert [row.checkpoint_id for row in made.checkpoints] == [2, 1]


def test_the_summary_of_each_vertex() -> None:
    parts = (VertexParts(("live",), Measured(1.0, 0.25), ()), VertexParts(("sums", "out"), None, ()))
    made = report(checkpoints=[checkpoint(1, vertices=parts)])
    assert {(row.stages, row.quantity): row.p99 for row in made.summary if row.stages} == {
        (("live",), "acknowledged after"): 1.0,
        (("live",), "start delay"): 0.25,
        **{
            (("live",), name): 0.0
            for name in ("alignment", "sync", "async", "new bytes", "total bytes", "in-flight bytes")
        },
    }  # fmt: skip


def test_curves_are_interrupted_between_runs_and_where_rows_are_taken_back() -> None:
    rows = [(0, 1, 0), (10, 1, 50), (20, 1, 20), (30, 1, 40), (60, 2, 100), (70, 2, 110)]
    (curve,) = series(
        [HistorySample(at(seconds), epoch, {"live": StageSample(count, None, 0)}) for seconds, epoch, count in rows]
    )
    assert curve.rows_per_second == (None, 5.0, None, 2.0, None, None, 1.0)
    assert [delay is None for delay in curve.watermark_delay] == [False] * 4 + [True] + [False] * 2


def test_a_long_curve_has_as_many_points_as_a_screen_shows() -> None:
    samples = [HistorySample(at(60 * number), 1, {"live": StageSample(600 * number)}) for number in range(10_000)]
    (curve,) = series(samples)
    assert len(curve.times) <= 240 and curve.times[-1] == samples[-1].at.timestamp()
    assert set(curve.rows_per_second[1:]) == {10.0}


def status(*stages: StageStatus, **fields: Any) -> PipelineStatus:
    values: dict[str, Any] = {"phase": "running", "sequence": 1, "updated_at": at(100), "started_at": AT}
    return PipelineStatus(pipeline="flights", run_id="a", epoch=1, stages=stages, **{**values, **fields})


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        ([{"state": "RUNNING"}], ("running", None, None)),
        ([{"state": "RUNNING", "caught_up": True}], ("caught up", None, None)),
        ([{"state": "RUNNING", "caught_up": True, "rows_behind": 0}, {"state": "RUNNING", "caught_up": False, "rows_behind": 7}],
         ("behind", 7, None)),
        ([{"state": "FINISHED", "end_of_data": True}, {"state": "RUNNING", "watermark_ms": 0}], ("partly finished", None, 0.0)),
        ([{"state": "RUNNING", "watermark_ms": 5000}, {"state": "RUNNING"}], ("running", None, None)),
        ([{"state": "RUNNING", "end_of_data": True}], ("at end of data", None, None)),
    ],
)  # fmt: skip
def test_a_stage_in_the_graph(instances: list[dict[str, Any]], expected: tuple[Any, ...]) -> None:
    live = StageStatus(name="live", finished=False, instances=tuple(InstanceStatus(name="a", **each) for each in instances))
    (row,) = report(status=status(live), running_epoch=1).stages
    assert (row.state, row.rows_behind, row.watermark) == expected
    (row,) = report(status=status(live)).stages
    assert (row.state, row.rows_per_second, row.watermark_delay) == ("not running", None, None)


def test_places_of_stages_go_from_left_to_right() -> None:
    inputs: dict[str, dict[str, str]] = {"a": {}, "b": {}, "c": {"a": "pointwise", "b": "table"}, "d": {"c": ""}, "e": {"b": ""}}
    stages = (StageStatus(name=name, finished=False, inputs=reads) for name, reads in inputs.items())
    found = {row.name: (row.column, row.line) for row in report(status=status(*stages)).stages}
    assert found == {"a": (0, 0), "b": (0, 1), "c": (1, 0), "d": (2, 0), "e": (1, 1)}


# The file


class Texts(HTMLParser):
    """The elements of a page, and the data in it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.data = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self._inside = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""


def parsed(content: bytes) -> Texts:
    texts = Texts()
    texts.feed(content.decode())
    texts.close()
    return texts


@given(st.text() | st.sampled_from(["</script>", "<!--<script>", "]]>", "&lt;b&gt;", "\u2028", "<img src=x onerror=alert(1)>"]))
def test_any_text_stays_text(text: str) -> None:
    text = text.encode(errors="ignore").decode()
    made = report(event(5, "restarting", text=text), checkpoints=[checkpoint(1, status="failed", message=text[:200])])
    found = parsed(page(made))
    assert found.elements == parsed(page(report())).elements
    data = json.loads(found.data)
    assert text in [row["text"] for row in data["timeline"]]
    assert data["checkpoints"][0][data["columns"].index("message")] == text[:200]


def test_the_page_loads_nothing() -> None:
    content = page(report_of(history_of(50))).decode()
    assert "default-src 'none'" in content
    shell = content.replace(parsed(content.encode()).data, "")
    assert set(re.findall(r"https?://[^\"'\s]+", shell)) == {"http://www.w3.org/2000/svg"}, "the name of SVG's elements only"
    assert not re.search(r"\b(src|href)=\"(?!data:,)|@import|url\((?!#)", shell)


def test_the_page_of_ten_thousand_checkpoints_is_small() -> None:
    made = report_of(history_of(10_000))
    content = page(made)
    assert len(made.checkpoints) == 10_000 and len(made.details) == DETAILED
    assert len(content) < 5_000_000


def test_details_of_many_instances_are_kept_for_fewer_checkpoints() -> None:
    entries = history_of(60)
    many = tuple(
        msgspec.structs.replace(entry, vertices=tuple(
            msgspec.structs.replace(vertex, instances=vertex.instances * 100) for vertex in entry.vertices
        ))
        for entry in entries.checkpoints
    )  # fmt: skip
    made = report_of(Entries(many, entries.events, entries.samples))
    assert len(made.details) == 10
    assert [detail.checkpoint_id for detail in made.details] == [row.checkpoint_id for row in made.checkpoints[:10]]


def test_json_has_the_numbers_of_the_page() -> None:
    made = report_of(history_of(30))
    document = json.loads(msgspec.json.encode(as_json(made)))
    data = json.loads(parsed(page(made)).data)
    assert [list(row.values()) for row in document["checkpoints"]] == data["checkpoints"]
    assert list(document["checkpoints"][0]) == data["columns"]
    same = set(document) - {"checkpoints", "details"}
    assert {name: document[name] for name in same} == {name: data[name] for name in same}
    instance = document["details"][0]["vertices"][1]["instances"][0]
    assert instance["name"] == "EWR" and instance["measured"]["acknowledged_after"] > 0


def test_the_made_up_history_is_one_that_a_run_writes() -> None:
    entries = history_of(300)
    assert entries.distinct() == entries
    made = report_of(entries)
    assert {row.kind for row in made.timeline} == {"run", "start", "restart", "rescale", "savepoint", "stop", "finish", "end"}
    assert [run.end for run in made.runs] == ["", "no end recorded", "suspended"]
    assert status_of(entries, 3).stages
