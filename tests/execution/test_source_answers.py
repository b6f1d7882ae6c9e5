"""When a source counts as silent: a table of looks at a query, with the time as an argument."""

from __future__ import annotations

import pytest

from dagster_checkpoints.execution.source_answers import (
    LOCAL_FIRST_BATCH_SECONDS,
    REPEAT_SECONDS,
    SILENT_SECONDS,
    Doing,
    Silence,
    SourceAnswers,
    SourceLook,
    silence_text,
)

HOLD = SILENT_SECONDS
Looked = tuple[float, str | None, Doing]


def looks(rows: list[Looked], *, local: bool = False) -> list[tuple[float, str]]:
    """What is reported: the moment, and the kind of silence, or "answered"."""
    watch, reported = SourceAnswers(0.0, local=local), []
    for now, answers, doing in rows:
        if watch.look(None if answers is None else SourceLook(answers, doing, f"{doing} something"), now):
            reported.append((now, watch.silence.doing if watch.silence is not None else "answered"))
    return reported


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([(t, "", "asking") for t in range(0, 19)], [], id="not yet"),
        pytest.param([(t, "", "asking") for t in range(0, 31, 2)], [(HOLD, "asking")], id="never answered: reported once"),
        pytest.param([(t, "", "starting") for t in range(0, 31, 2)], [(HOLD, "starting")], id="its objects are not created"),
        pytest.param([(0, "", "starting"), (2, "", "asking"), (30, "", "asking")], [(30, "asking")], id="both count together"),
        pytest.param([(t, "0 0s", "other") for t in range(0, 200, 2)], [], id="quiet: waits for data"),
        pytest.param(
            [(t, f"0 {t // 10}", "asking") for t in range(0, 200, 2)], [], id="quiet, seen only while it is asked"
        ),
        pytest.param([(t, f"{t}", "asking") for t in range(0, 90, 18)], [], id="slow, but it answers"),
        pytest.param(
            [(0, "", "asking"), (22, "", "asking"), (24, "1 a", "asking"), (30, "1 a", "asking")],
            [(22, "asking"), (24, "answered")],
            id="answered in the end",
        ),
        pytest.param(
            [(0, "", "asking"), (5, "3 a", "other"), (10, "3 a", "asking"), (24, "3 a", "asking"), (26, "3 a", "asking")],
            [(26, "asking")],
            id="gone after it had answered",
        ),
        pytest.param([(t, "", "reading") for t in range(0, 40, 4)], [(HOLD, "reading")], id="its first batch does not end"),
        pytest.param([(0, "", "asking"), (18, "", "reading"), (22, "", "reading")], [(22, "reading")], id="first batch, late"),
        pytest.param([(t, "7 a", "other") for t in range(0, 90, 9)], [], id="a later batch that takes long"),
        pytest.param(
            [(0, "", "asking"), (22, "", "asking"), (30, None, "other")], [(22, "asking"), (30, "answered")], id="stopped"
        ),
        pytest.param([(5, "7 a", "asking"), (21, "7 a", "asking")], [(21, "asking")], id="the first look is no answer"),
        pytest.param([(30, "", "asking")], [(30, "asking")], id="looked at late"),
        pytest.param([(0, None, "other"), (60, None, "other"), (61, "", "asking")], [], id="waits for its turn to start"),
        pytest.param(
            [(t, "", "asking") for t in (0, 20, 300, 20 + REPEAT_SECONDS - 1, 20 + REPEAT_SECONDS)],
            [(20, "asking"), (20 + REPEAT_SECONDS, "asking")],
            id="reported again while it lasts",
        ),
    ],
)  # fmt: skip
def test_what_is_reported_of_a_source(rows: list[Looked], expected: list[tuple[float, str]]) -> None:
    assert looks(rows) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([(t, "", "reading") for t in range(0, 60, 4)], [], id="a slow first batch"),
        pytest.param([(t, "", "reading") for t in range(0, 71, 2)], [(LOCAL_FIRST_BATCH_SECONDS, "reading")], id="a slower one"),
        pytest.param([(t, "", "asking") for t in range(0, 31, 2)], [(HOLD, "asking")], id="an answer is expected as early"),
        pytest.param([(t, "", "starting") for t in range(0, 31, 2)], [(HOLD, "starting")], id="and so are the sources' objects"),
        pytest.param(
            [(0, "", "asking"), (22, "", "asking"), (24, "", "reading"), (70, "", "reading")],
            [(22, "asking"), (24, "answered"), (70, "reading")],
            id="it has answered late, and its first batch does not end",
        ),
    ],
)  # fmt: skip
def test_with_a_local_master_a_first_batch_may_take_longer(rows: list[Looked], expected: list[tuple[float, str]]) -> None:
    assert looks(rows, local=True) == expected


def test_a_silence_says_how_long_it_lasts_and_what_spark_does() -> None:
    for local in (False, True):
        watch = SourceAnswers(0.0, local=local)
        watch.look(SourceLook("", "asking", "Getting offsets"), 21.5)
        assert watch.silence == Silence(21.5, "asking", "Getting offsets", local)


def test_a_silence_in_words_says_which_source_since_when_what_spark_does_and_what_to_check() -> None:
    assert silence_text(("live",), Silence(24.2, "asking", "Getting offsets from KafkaV2[Subscribe[clicks]]")) == (
        "Source 'live' has not answered for 24 s; Spark says: Getting offsets from KafkaV2[Subscribe[clicks]]. No rows are read "
        "meanwhile, and checkpoints complete without them. Check its address, port, credentials and network from Spark's driver, "
        "and that what it names (topic, table, path) exists. Spark goes on asking."
    )
    assert "One of the sources 'a', 'b' has not" in silence_text(("a", "b"), Silence(30, "starting", "Initializing sources"))
    begins = "Source 'table' has given no rows yet: its first batch has been running for 31 s (evaluating its DataFrame). "
    executors = "If there are few rows, check that the machines of Spark's executors reach the source. "
    ends = "If there are many rows, limit those of a micro-batch: none of them is committed while it runs."
    for local, text in ((False, begins + executors + ends), (True, begins + ends)):
        assert silence_text(("table",), Silence(31, "reading", "evaluating its DataFrame", local)) == text
