"""The stages over a few rows: no files, no Dagster."""

from datetime import UTC, datetime, timedelta

from shop.defs.sales.pipeline import SALES, sales

from dagster_checkpoints.testing import SourceRows, check_pipeline, run_pipeline

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def test_backfill_and_feed_meet_in_one_day_and_cancelled_sales_do_not_count():
    def at(hours):
        return NEW_YEAR + timedelta(hours=hours)

    history = SourceRows(SALES, [(at(1), "north", 10.0), (at(2), "north", -10.0)])
    live = SourceRows(SALES, [(at(20), "north", 5.0)], [(at(30), "south", 7.0)])
    output = run_pipeline(sales, {"history": history, "live": live})
    assert output.rows("daily_sales", 0) == []  # the first day is not over
    assert [(row.shop, row.amount) for row in output.rows("daily_sales", 1)] == [("north", 15.0)]
    assert [(row.shop, row.amount) for row in output.rows("daily_sales", -1)] == [("south", 7.0)]


def test_days_do_not_depend_on_how_sales_come():
    def every(minutes, shops):
        return [(NEW_YEAR + timedelta(minutes=minutes * n), shops[n % len(shops)], float(n % 5 - 1)) for n in range(60)]

    inputs = {
        "history": SourceRows(SALES, every(20, ["north", "south"])),
        "live": SourceRows(SALES, every(90, ["north", "east"])),
    }
    check_pipeline(sales, inputs, histories=3)
