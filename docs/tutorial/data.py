"""Makes sales: `python data.py FOLDER FIRST_DAY DAYS` writes one file of JSON lines for each day, a sale in each hour.

A file appears complete, under a new name, as each source of files needs it.
"""

import json
import os
import sys
from datetime import date, timedelta
from pathlib import Path


def main(folder: str, first_day: str, days: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(int(days)):
        day = date.fromisoformat(first_day) + timedelta(days=number)
        sales = [
            {"ts": f"{day}T{hour:02}:30:00Z", "shop": ("north", "south")[hour % 2], "amount": float(hour)} for hour in range(24)
        ]
        file = Path(folder, f"{day}.json")
        hidden = file.with_name(f".{file.name}")
        hidden.write_text("".join(json.dumps(sale) + "\n" for sale in sales))
        seconds = (day - date(1970, 1, 1)).days * 86400
        os.utime(hidden, (seconds, seconds))  # Spark reads files in the order of their times
        hidden.rename(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
