"""Numbers of rows as a condition reads them: a name or a number that is not known is refused, and never 0."""

from __future__ import annotations

import pytest

from dagster_checkpoints.pipeline import StageRows, UnknownRowsError, UnknownStageError, total_rows

ROWS = StageRows({"history": 3, "live": None, "sales": 0})


@pytest.mark.parametrize(
    ("counts", "total"), [([], 0), ([1, 2], 3), ([0], 0), ([None], None), ([1, None], None), ([None, 0, 4], None)]
)
def test_a_sum_with_an_unknown_number_is_unknown(counts: list[int | None], total: int | None) -> None:
    assert total_rows(counts) == total


def test_known_numbers_are_read_as_from_a_dictionary() -> None:
    known = StageRows({"history": 3, "sales": 0})
    assert (known["history"], known.get("sales"), known.get("sales", 7)) == (3, 0, 0)
    assert known == {"history": 3, "sales": 0} and len(known) == 2 and "sales" in known and "other" not in known
    assert dict(known) == {"history": 3, "sales": 0}


@pytest.mark.parametrize("ask", [lambda rows: rows["live"], lambda rows: rows.get("live", 0), lambda rows: sum(rows.values())])
def test_a_condition_on_an_unknown_number_is_refused(ask: object) -> None:
    with pytest.raises(UnknownRowsError, match=r"rows of stage 'live', whose number is not known.*'history', 'sales'"):
        ask(ROWS)  # type: ignore[operator]


@pytest.mark.parametrize("ask", [lambda rows: rows["hist"], lambda rows: rows.get("hist", 0)])
def test_a_condition_on_a_stage_that_is_not_there_is_refused(ask: object) -> None:
    with pytest.raises(UnknownStageError, match=r"rows of stage 'hist', which the pipeline does not have.*history"):
        ask(ROWS)  # type: ignore[operator]
