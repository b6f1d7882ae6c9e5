"""Prints what a reader sees of the table: `python show.py FOLDER`."""

import sys
from pathlib import Path

import pyarrow.parquet as pq

rows = pq.read_table(sys.argv[1]).to_pylist() if any(Path(sys.argv[1]).glob("*/*.parquet")) else []
for shop in sorted({row["shop"] for row in rows}):
    days = [row["day"].date() for row in rows if row["shop"] == shop]
    amount = sum(row["amount"] for row in rows if row["shop"] == shop)
    print(f"{shop}: {len(days)} rows, {min(days)} to {max(days)}, {amount:.0f} sold")
