"""`python -m bench`: measure, and print one table.

A missed target is shown in the table and is not an error; a run that fails, or has a wrong result, is an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import (
    barriers,
    batches,
    bursts,
    channels,
    checkpoints,
    coordination,
    definitions,
    delta_merge,
    delta_sink,
    fan_in,
    file_sink,
    iceberg_sink,
    idle,
    job_end,
    kafka,
    latency,
    long_life,
    many,
    measures,
    memory,
    planning,
    recorded,
    recovery,
    regions,
    report,
    rescaling,
    savepoints,
    simulation_rate,
    sql_sink,
    start,
    state,
    stops,
    throughput,
)
from bench.environment import Environment
from bench.measures import Measure

PARTS: dict[str, Callable[[Environment], Iterator[Measure]]] = {
    "plan": planning.measure,
    "metadata": state.measure_metadata,
    "redistribution": state.measure_redistribution,
    "coordination": coordination.measure,
    "simulation": simulation_rate.measure,
    "throughput": throughput.measure,
    "checkpoint-cost": throughput.measure_checkpoint_cost,
    "checkpoints": checkpoints.measure,
    "barriers": barriers.measure,
    "channel": channels.measure,
    "fan-in": fan_in.measure,
    "idle": idle.measure,
    "stops": stops.measure,
    "latency": latency.measure,
    "many": many.measure,
    "long-life": long_life.measure,
    "batches": batches.measure,
    "memory": memory.measure,
    "report": report.measure,
    "ending": job_end.measure,
    "start": start.measure,
    "definitions": definitions.measure,
    "bursts": bursts.measure,
    "recovery": recovery.measure,
    "regions": regions.measure,
    "rescaling": rescaling.measure,
    "savepoints": savepoints.measure,
    "delta-sink": delta_sink.measure,
    "delta-merge": delta_merge.measure,
    "iceberg-sink": iceberg_sink.measure,
    "file-sink": file_sink.measure,
    "sql-sink": sql_sink.measure,
    "kafka-source": kafka.measure_source,
    "kafka-sink": kafka.measure_sink,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    environment = Environment(options.rows, options.repeats, options.cache.resolve())
    results: list[Measure] = []
    try:
        for name in options.only or PARTS:
            began = time.monotonic()
            environment.say(f"{name} ...")
            measured = list(PARTS[name](environment))
            results += measured
            if options.record:
                recorded.record(recorded.of_this_machine(measured, options.rows, options.repeats))
            environment.say(f"{name}: {time.monotonic() - began:.0f} s")
    finally:
        environment.close()
    print(f"{options.rows:,} rows, {options.repeats} repeats; ratios are medians of rounds within this run")
    print(measures.table(results))
    if options.json:
        measures.write_json(results, options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="number of generated input rows (default: 10 million)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each measurement; the median counts")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="only this part; may be given several times")
    parser.add_argument("--json", type=Path, help="also write the measures to this file")
    parser.add_argument(
        "--record", action="store_true", help="keep the measures in the repository, and show them in docs/numbers.md"
    )
    parser.add_argument("--cache", type=Path, default=Path(".data/bench"), help="directory that keeps the generated rows")
    return parser


if __name__ == "__main__":
    sys.exit(main())
