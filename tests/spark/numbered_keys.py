"""A `transformWithState` processor with a value and a list by key, and the rows that it has to emit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def numbered_by_key(rows: Any) -> Any:
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Numbers(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.count = handle.getValueState("count", "n long")
            self.seen = handle.getListState("seen", "v long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for batch in rows:
                for v in sorted(batch["v"]):
                    number = (self.count.get()[0] if self.count.exists() else 0) + 1
                    self.count.update((number,))
                    self.seen.appendValue((int(v),))
                    seen = ",".join(str(each[0]) for each in self.seen.get())
                    yield pd.DataFrame({"k": [key[0]], "v": [v], "number": [number], "seen": [seen]})

        def close(self) -> None:
            pass

    return rows.groupBy("k").transformWithStateInPandas(Numbers(), "k string, v long, number long, seen string", "Append", "None")


class NumberedKeys:
    """The expected rows, as `(key, v, number of the key's row, all v of the key so far)`."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, str]] = []
        self._seen: dict[str, list[int]] = {}

    def put(self, keys: Iterable[str], v: int) -> None:
        """Expect a row of each key."""
        for key in keys:
            seen = self._seen.setdefault(key, [])
            seen.append(v)
            self.rows.append((key, v, len(seen), ",".join(map(str, seen))))
