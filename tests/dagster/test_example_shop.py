"""The project in examples/shop: its definitions, and a burst of its job."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pyarrow.dataset as ds
import pytest

from dagster_checkpoints import PipelineRunConfig

SHOP = Path(__file__).parents[2] / "examples/shop"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.Definitions]:
    """The definitions of a copy of the project, which is the current directory."""
    shutil.copytree(SHOP, tmp_path / "shop", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "shop")
    monkeypatch.syspath_prepend(str(tmp_path / "shop/src"))
    yield dg.load_from_defs_folder(path_within_project=tmp_path / "shop/src/shop")
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def test_the_example_project_loads_and_a_burst_of_its_job_commits_the_closed_days(shop: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(shop)
    graph = shop.resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert keys == {"history", "live", "sold", "daily_sales", "checkpoints/sales", "savepoints/sales"}
    assert list(graph.get(dg.AssetKey("daily_sales")).owners) == ["team:sales"]
    repository = shop.get_repository_def()
    assert {each.name for each in repository.schedule_defs} == {"sales_bursts"}
    assert {each.name for each in repository.sensor_defs} >= {"sales_recovery", "sales_health"}

    job = shop.resolve_job_def("sales_job")
    until = dg.RunConfig(ops={"sales_assets": PipelineRunConfig(until="caught_up")})
    assert job.execute_in_process(run_config=until).success
    rows = ds.dataset("data/sales/daily_sales", partitioning="hive").to_table().to_pylist()
    days = {(str(row["day"])[:10], row["shop"]): row["amount"] for row in rows}
    assert len(days) == len(rows) == 2 * 19, "ten days of each month; the last one is not over"
    assert set(days.values()) == {12.0}
