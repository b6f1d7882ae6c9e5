"""Makes the files that the sources read: January is the backfill, February what the live feed has brought so far."""

from pathlib import Path


def files_of(folder: Path) -> tuple[str, str]:
    """The directories of the backfill and of the live feed; they are filled when they are missing."""
    for name, month in (("history", "2026-01"), ("live", "2026-02")):
        if not (folder / name).exists():
            import pandas as pd  # not when definitions are loaded: files are made once

            (folder / name).mkdir(parents=True)
            hours = pd.date_range(f"{month}-01", periods=240, freq="h", tz="UTC").as_unit("us")
            rows = pd.DataFrame({"ts": hours, "shop": ["north", "south"] * 120, "amount": 1.0})
            rows.to_parquet(folder / name / f"{month}.parquet")
    return str(folder / "history"), str(folder / "live")
