"""Makes the files that the sources read: January is the backfill, February what the live feed has brought so far."""

from datetime import UTC, datetime, timedelta
from pathlib import Path


def files_of(folder: Path) -> tuple[str, str]:
    """The directories of the backfill and of the live feed; they are filled when they are missing."""
    for name, month in (("history", 1), ("live", 2)):
        if not (folder / name).exists():
            import pyarrow as pa  # not when definitions are loaded: files are made once
            import pyarrow.parquet as pq

            (folder / name).mkdir(parents=True)
            hours = [datetime(2026, month, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in range(240)]
            rows = pa.table({"ts": hours, "shop": ["north", "south"] * 120, "amount": [1.0] * 240})
            pq.write_table(rows, folder / name / f"{month}.parquet")
    return str(folder / "history"), str(folder / "live")
