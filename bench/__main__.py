"""`python -m bench`: measure, and print one table.

A target that is missed is shown, not an error; a run that fails, or whose result is wrong, is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import (
    channels,
    checkpoints,
    coordination,
    ending,
    measures,
    memory,
    planning,
    recovery,
    savepoints,
    simulating,
    state,
    throughput,
)
from bench.measures import Measure
from bench.setting import Setting

PARTS: dict[str, Callable[[Setting], Iterator[Measure]]] = {
    "plan": planning.measure,
    "metadata": state.measure_metadata,
    "redistribution": state.measure_redistribution,
    "coordination": coordination.measure,
    "simulation": simulating.measure,
    "throughput": throughput.measure,
    "checkpoint-cost": throughput.measure_checkpoint_cost,
    "checkpoints": checkpoints.measure,
    "channel": channels.measure,
    "memory": memory.measure,
    "ending": ending.measure,
    "recovery": recovery.measure,
    "savepoints": savepoints.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    setting = Setting(options.rows, options.repeats, options.cache.resolve())
    found: list[Measure] = []
    try:
        for name in options.only or PARTS:
            began = time.monotonic()
            setting.say(f"{name} ...")
            found += PARTS[name](setting)
            setting.say(f"{name}: {time.monotonic() - began:.0f} s")
    finally:
        setting.close()
    print(f"{options.rows:,} rows, {options.repeats} repeats; ratios are medians of rounds within this run")
    print(measures.table(found))
    if options.json:
        measures.write_json(found, options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the generated input (default: 10 million)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each measurement; the median counts")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be given several times")
    parser.add_argument("--json", type=Path, help="also write the measures here")
    parser.add_argument("--cache", type=Path, default=Path(".data/bench"), help="where generated rows are kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
