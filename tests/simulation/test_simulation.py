"""The simulator on a fixed number of seeds, on every seed that ever broke an invariant, and on deliberate faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from simulation.__main__ import main
from simulation.faults import FAULTS, WORLDS, find
from simulation.injection import Fault, StaleFault, injected
from simulation.running import run
from simulation.scenario import random_scenario
from simulation.search import trace
from simulation.shapes import DERIVED, SOURCES, random_stages

EARLIER_VIOLATIONS = (
    3, 10, 23, 33, 47, 52, 62, 152, 177, 214, 299, 306, 328, 336, 384, 509, 602, 735, 906, 1455, 1502, 1561, 1579, 2106, 4443,
    5256, 5683, 9058, 13996, 100532, 102504, 102555, 103793, 202081, 303017, 303120, 400521, 400543, 400593, 505543, 508989,
    707498, 1005449, 1011912, 1019321, 1019486, 1019740, 2002810, 2019504, 2024407, 1022584, 1026647, 3017515, 90034755,
    700434900, 50008632, 60087573, 900048132, 1200121871, 1300091038, 1400179138, 882441825,
    40983479, 318216497, 768793762, 510923028,
)  # fmt: skip
"""Seeds that broke an invariant when they were added, by an error in the shipped code or in the simulator. The world of a seed
changes with the scenarios; the errors in the shipped code are also among the deliberate faults."""


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_worlds_break_no_invariant(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)


def test_every_kind_of_fault_happens() -> None:
    counts = Counter[str]()
    for seed in range(1000):
        counts.update(run(random_scenario(seed), record=False).counts)
    wanted = ("crashes", "pauses", "take-overs", "take-overs at once", "task failures", "repeated messages", "lost notices")
    wanted += (
        "rescalings",
        "rescalings of ended instances",
        "divisions",
        "savepoints",
        "held sources",
        "ended sources in checkpoints",
        "overtaken queries",
        "region restarts",
    )
    assert {what: counts[what] for what in wanted if not counts[what]} == {}


@pytest.mark.parametrize(("theme", "seeds"), [("rescaling", (390, 418, 443, 528)), ("fan-in", range(1, 80, 2))])
def test_chains_are_divided_and_joined_again(theme: str, seeds: Iterable[int]) -> None:
    counts = Counter[str]()
    for seed in seeds:
        counts.update(run(random_scenario(seed, theme), record=False).counts)
    assert counts["divisions"]
    assert theme != "fan-in" or counts["rescalings"], "divided, and with other instances, in one restore"


def test_pipelines_have_every_kind_of_state_and_input() -> None:
    stages = [spec for seed in range(300) for spec in random_stages(seed)]
    assert {spec.kind for spec in stages} == {*SOURCES, *DERIVED}
    assert any(spec.enumerated for spec in stages)
    modes, fused = set(), 0
    for seed in range(1000):
        scenario = random_scenario(seed)
        fused += any(task.fused for task in scenario.variants[0].tasks)
        if any(i.static for spec in scenario.variants[0].stages for i in spec.inputs):
            modes.add((scenario.config.mode, scenario.config.unaligned))
    assert modes == {("exactly_once", False), ("exactly_once", True), ("at_least_once", False)}
    assert fused


@pytest.mark.parametrize("seed", EARLIER_VIOLATIONS)
def test_earlier_violations_are_fixed(seed: int) -> None:
    check(seed)


def check(seed: int) -> None:
    if run(random_scenario(seed), record=False).error is not None:
        pytest.fail(trace(seed, seconds=20) or f"seed {seed} broke an invariant, but not when repeated")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_deliberate_fault_is_found(fault: Fault) -> None:
    found = find(fault, WORLDS)
    assert found is not None
    assert run(random_scenario(found[0], fault.theme), record=False).error is None, "the same world breaks without the fault, too"


def test_there_are_enough_deliberate_faults() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_in_the_code_only_while_it_is_tried(fault: Fault) -> None:
    functions = [getattr(each, "fget", each) for each in (fault.function, fault.also) if each is not None]
    sound = [function.__code__ for function in functions]
    with injected(fault):
        broken = [function.__code__ for function in functions]
        assert all(a.co_code != b.co_code or a.co_consts != b.co_consts for a, b in zip(sound, broken, strict=True))
    assert [function.__code__ for function in functions] == sound


@pytest.mark.parametrize("old", ["no such text", "checkpoint"])
def test_a_fault_whose_text_does_not_occur_exactly_once_is_refused(old: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "a savepoint is subsumed")
    refused = f"Fault 'a savepoint is subsumed': expected '{old}' once in .*_subsume_older"
    with pytest.raises(StaleFault, match=refused), injected(replace(fault, old=old)):
        pass


def test_a_violation_in_one_worker_ends_all_workers_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "no final checkpoint")
    with injected(fault):
        assert main(["--seconds", "3000", "--workers", "2", "--seed", "0"]) == 1
    shown = capsys.readouterr()
    assert "breaks an invariant" in shown.err
    assert " steps:" in shown.out
    assert "pipelines in" in shown.out


def test_a_search_without_violations_prints_its_statistics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulation.search.PROGRESS_SECONDS", 0.5)
    assert main(["--seconds", "1.2", "--workers", "1", "--seed", "0"]) == 0
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) >= 2
    for what in ("pipelines", "checkpoints", "crashes", "finishes"):
        assert what in shown.err
    for what in ("pipelines", "checkpoints", "savepoints", "crashes", "take-overs", "rescalings", "finishes"):
        assert what in shown.out


def test_a_recorded_run_can_be_repeated() -> None:
    scenario = random_scenario(7)
    first = run(scenario)
    again = run(scenario, first.labels, to_end=False)
    assert again.error is None
    assert again.labels == first.labels
    assert again.counts["checkpoints"] == first.counts["checkpoints"]


def test_a_seed_is_the_same_run_in_every_process() -> None:
    imports = "from simulation.running import run; from simulation.scenario import random_scenario"
    program = f"{imports}; print(run(random_scenario(11)).labels)"
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
