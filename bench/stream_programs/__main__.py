"""`python -m bench.stream_programs`: search for a program whose rows differ from its batch result."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from bench.stream_programs.search import repeat, search


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stream_programs", description="Random programs over two streams.")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the search (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; random by default")
    parser.add_argument("--workers", type=int, default=1, help="number of worker processes (%(default)s)")
    parser.add_argument("--repeat", type=int, default=None, metavar="SEED", help="run this seed alone, and print its case")
    options = parser.parse_args(arguments)
    if options.repeat is not None:
        return 0 if repeat(options.repeat) else 1
    first = random.randrange(10**9) if options.seed is None else options.seed
    _, wrong = search(first, options.workers, options.seconds)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
