"""Random DataFrame programs over two inputs, in random micro-batches, against the result of the same program over all rows.

`python -m bench.stream_programs --seconds 3600 --workers 2` searches for a difference. Read `program.py` (what a program is, and
the DataFrame that it makes), `arrivals.py` (rows, and the micro-batches in which they arrive), `random_programs.py` (all of these
from a seed), `queries.py` (a program as one query over the inputs that a stage gets), `jobs.py` (a program as a whole job) and
`search.py`.
"""
