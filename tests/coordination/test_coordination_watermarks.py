"""The watermark valve, as rows of events and watermarks, and against its definition."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagster_checkpoints.coordination.errors import UnexpectedEvent, UnknownChannel
from dagster_checkpoints.coordination.watermarks import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    ChannelWatermark,
    ValveState,
    WatermarkValve,
)

YEAR_1 = -62_135_596_800_000
YEAR_9999 = 253_402_300_799_999


def step(valve: WatermarkValve, text: str) -> int | None:
    """Reads ``a5`` (watermark 5 on a), ``aM`` (MAX), ``a~`` (idle), ``a!`` (active), ``a$`` (drained), ``a.``
    (suspended)."""
    channel, what = text[0], text[1:]
    if what == "~":
        return valve.idle(channel)
    if what == "!":
        return valve.active(channel)
    if what in ("$", "."):
        return valve.end(channel, drain=what == "$")
    return valve.advance(channel, MAX_WATERMARK_MS if what == "M" else int(what))


@pytest.mark.parametrize(
    ("channels", "row", "outputs"),
    [
        # The minimum; a channel without a watermark holds everything.
        ("a", "a5 a7", "5 7"),
        ("ab", "a5 a9 b3 b4", "- - 3 4"),
        ("ab", "a5 b9 a8 a10", "- 5 8 9"),
        # Never back.
        ("a", "a5 a3 a5 a6", "5 - - 6"),
        ("ab", "a5 b5 a4 b4 a6 b6", "- 5 - - - 6"),
        # The end: drained counts as MAX_WATERMARK, suspended keeps its last.
        ("ab", "a5 b3 b$ a8", "- 3 5 8"),
        ("ab", "a5 b3 b. a8", "- 3 - -"),
        ("ab", "a$ b$", "- M"),
        ("ab", "a$ b7", "- 7"),
        ("ab", "aM b7 bM", "- 7 M"),
        ("ab", "a. b$", "- -"),
        ("a", "a5 a$ a$", "5 M -"),
        # An idle channel does not count until it is active again.
        ("ab", "a5 b~ a6", "- 5 6"),
        ("ab", "a5 b3 b~ b! b4 b7 a6", "- 3 5 - - - 6"),
        ("ab", "a5 b3 b~ b4 b6 a9 b9", "- 3 5 - - 6 9"),
        ("ab", "a5 b7 b~ b! a9", "- 5 - - 7"),
        # Behind the task's watermark it is ignored until it has caught up, and then holds again.
        ("ab", "a10 b3 b~ b4 a12 b9 b12 a20 b15", "- 3 10 - 12 - - - 15"),
        # All idle: no channel holds event time back, whatever the order.
        ("ab", "a5 b3 a~ b~", "- 3 - 5"),
        ("ab", "a5 b3 b~ a~", "- 3 5 -"),
        ("ab", "a~ b~", "- -"),
        # An ended channel does not affect an idle one: the live feed's windows stay open.
        ("ab", "a5 b3 b~ a$", "- 3 5 -"),
        ("ab", "a5 b3 b~ a$ b8 b$", "- 3 5 - 8 M"),
        ("ab", "a5 b3 b~ aM b8", "- 3 5 - 8"),
        ("ab", "a5 a$ b3 b~ b! b4", "- - 3 - - 4"),
        # A suspended channel holds, an idle one beside it does not.
        ("ab", "a5 a. b9 b~", "- - 5 -"),
        # Idleness and watermarks after the end have no effect.
        ("ab", "a5 b3 b$ b~ b! a8", "- 3 5 - - 8"),
        ("ab", "a5 b3 b. b~ b! a8", "- 3 - - - -"),
        # Back from idleness exactly at the task's watermark it holds.
        ("ab", "a5 b5 b~ b! a9 b7", "- 5 - - - 7"),
        ("ab", "a5 b3 b~ b5 a9 b7", "- 3 5 - - 7"),
        # The only active channel lags behind.
        ("ab", "a10 b3 b~ b! a~ b8 b12", "- 3 10 - - - 12"),
        # An idle channel that ends.
        ("ab", "a5 b3 b~ b$ a6", "- 3 5 - 6"),
    ],
)
def test_valve(channels: str, row: str, outputs: str) -> None:
    valve = WatermarkValve(channels)
    seen = [step(valve, text) for text in row.split()]
    shown = " ".join("-" if s is None else "M" if s == MAX_WATERMARK_MS else str(s) for s in seen)
    assert shown == outputs
    assert valve.watermark == max([s for s in seen if s is not None], default=MIN_WATERMARK_MS)


def test_the_bounds_are_outside_of_the_values_that_a_user_can_write() -> None:
    assert MIN_WATERMARK_MS < YEAR_1 and YEAR_9999 < MAX_WATERMARK_MS
    valve = WatermarkValve("a")
    assert valve.advance("a", YEAR_9999) == YEAR_9999
    assert valve.end("a", drain=True) == MAX_WATERMARK_MS


@pytest.mark.parametrize(("row", "idle"), [("", False), ("a~", False), ("a~ b~", True), ("a~ b$", True), ("a$ b$", False)])
def test_a_task_is_idle_when_no_open_channel_is_active(row: str, idle: bool) -> None:
    valve = WatermarkValve("ab")
    for text in row.split():
        step(valve, text)
    assert valve.is_idle == idle
    restored = WatermarkValve("ab")
    restored.restore(valve.snapshot())
    assert restored.is_idle == idle


@pytest.mark.parametrize(("drain", "ended"), [(True, "drain"), (False, "suspend")])
def test_a_snapshot_records_how_a_channel_ended(drain: bool, ended: str) -> None:
    valve = WatermarkValve("ab")
    valve.end("a", drain=drain)
    assert {name: channel.ended for name, channel in valve.snapshot().channels.items()} == {"a": ended, "b": "none"}


def test_a_restore_that_does_not_change_the_watermark_returns_none() -> None:
    assert WatermarkValve("ab").restore(ValveState()) is None
    valve = WatermarkValve("a")
    valve.advance("a", 5)
    assert valve.restore(ValveState(5, {"a": ChannelWatermark(5)})) is None
    assert valve.restore(ValveState(7, {"a": ChannelWatermark(7)})) == 7


def test_nothing_follows_the_end_of_data() -> None:
    valve = WatermarkValve("ab")
    valve.end("a", drain=True)
    with pytest.raises(UnexpectedEvent) as found:
        valve.advance("a", 5)
    assert str(found.value) == (
        "Channel 'a' delivered a watermark after its EndOfData (drain). Nothing may follow EndOfData; the channel's log or the "
        "position it was restored at is wrong."
    )


def test_an_unknown_channel_is_refused() -> None:
    with pytest.raises(UnknownChannel, match=r"'c' .* has a, b\. .*it was made with"):
        WatermarkValve("ab").advance("c", 1)
    with pytest.raises(UnknownChannel, match="has no inputs"):
        WatermarkValve("").end("a", drain=True)


def test_a_task_without_channels_has_no_watermark() -> None:
    valve = WatermarkValve("")
    assert valve.watermark == MIN_WATERMARK_MS
    assert not valve.is_idle
    # It keeps the restored value, because its channels were removed.
    assert valve.restore(ValveState(5, {"a": ChannelWatermark(9)})) == 5
    assert valve.watermark == 5


def test_restored_channels() -> None:
    state = ValveState(5, {"a": ChannelWatermark(5), "b": ChannelWatermark(9), "gone": ChannelWatermark(1)})
    valve = WatermarkValve("ab")
    assert valve.restore(state) == 5
    assert valve.advance("a", 8) == 8
    # A channel that the snapshot does not know holds event time back until its first watermark.
    wider = WatermarkValve("abc")
    assert wider.restore(state) == 5
    assert wider.advance("a", 8) is None
    assert wider.advance("c", 7) == 7


def test_a_finished_input_counts_as_max_watermark_after_recovery_too() -> None:
    valve = WatermarkValve("ab")
    valve.restore(ValveState(3, {"a": ChannelWatermark(3, ended="drain"), "b": ChannelWatermark(3)}))
    assert valve.advance("b", 8) == 8


@st.composite
def histories(draw: st.DrawFn) -> list[str]:
    ended: set[str] = set()
    history = []
    for _ in range(draw(st.integers(0, 30))):
        channel = draw(st.sampled_from("abc"))
        if channel in ended:
            continue
        what = draw(st.sampled_from(["~", "!", "$", *"0123456789" * 3]))
        if what == "$":
            ended.add(channel)
        history.append(channel + what)
    return history


@given(histories())
def test_the_watermark_never_goes_back_and_only_changes_are_returned(history: list[str]) -> None:
    valve = WatermarkValve("abc")
    before = valve.watermark
    for text in history:
        moved = step(valve, text)
        assert (moved is not None) == (valve.watermark > before)
        assert moved in (None, valve.watermark)
        before = valve.watermark


@given(histories())
def test_without_idleness_it_is_the_minimum(history: list[str]) -> None:
    valve = WatermarkValve("abc")
    highest = dict.fromkeys("abc", MIN_WATERMARK_MS)
    for text in history:
        if text[1] in "~!":
            continue
        step(valve, text)
        highest[text[0]] = MAX_WATERMARK_MS if text[1] == "$" else max(highest[text[0]], int(text[1:]))
        assert valve.watermark == min(highest.values())


STEPS = [channel + what for channel in "abc" for what in ("~", "!", "$", ".", *"123456789")]


@given(st.lists(st.sampled_from(STEPS), max_size=30))
@example(["a9", "b7", "c1", "c~", "a~", "b~", "c!", "b8"])  # all active channels are behind
@example(["a9", "b3", "b~", "b.", "a~"])  # behind when it is suspended
def test_a_restore_behind_any_step_changes_nothing(history: list[str]) -> None:
    valve, restored = WatermarkValve("abc"), WatermarkValve("abc")
    for text in history:
        if text[1].isdigit() and valve.ended(text[0]) != "none":
            continue
        assert step(valve, text) == step(restored, text)
        recorded = restored.snapshot()
        assert recorded == valve.snapshot()
        restored = WatermarkValve("abc")
        restored.restore(recorded)
        assert (restored.watermark, restored.is_idle) == (valve.watermark, valve.is_idle)


def test_a_restored_channel_that_lags_behind_is_left_out_until_it_has_caught_up() -> None:
    before = WatermarkValve("ab")
    for text in ("b4", "b~", "a12", "b!"):  # back from idleness
        step(before, text)
    valve = WatermarkValve("ab")
    valve.restore(before.snapshot())
    assert valve.watermark == 12
    assert valve.advance("a", 14) == 14
    assert valve.advance("b", 14) is None
    assert valve.advance("a", 20) is None
    assert valve.advance("b", 16) == 16
