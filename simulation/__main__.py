"""`python -m simulation`: try to break the protocol. `make simulate` calls it."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from simulation.search import search, trace


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description="Try to break the protocol.")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the search (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; random by default")
    parser.add_argument("--workers", type=int, default=1, help="number of worker processes (%(default)s)")
    parser.add_argument("--replay", type=int, default=None, metavar="SEED", help="shrink and print this seed's violation")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        report = trace(options.replay)
        print(report or f"seed {options.replay} breaks no invariant")
        return 1 if report else 0
    first = random.randrange(10**9) if options.seed is None else options.seed
    _, failed_seeds = search(first, options.workers, options.seconds)
    return 1 if failed_seeds else 0


if __name__ == "__main__":
    sys.exit(main())
