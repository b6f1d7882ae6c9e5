"""The files, directories and tables that ready-made discoveries find, and a pipeline that reads a growing prefix."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagster_checkpoints.pipeline import DiscoveryContext, Pipeline, split_source
from dagster_checkpoints.sources import FileSplits, InvalidSource, SourceUnavailable
from dagster_checkpoints.spark.files.hadoop_path import HadoopPath, WorkFileMissing

ROWS = "k string, v long"


@pytest.fixture
def context(spark: Any) -> DiscoveryContext:
    return DiscoveryContext(spark, "files", logging.getLogger("tests"))


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize(
    ("pattern", "complete", "found"),
    [
        ("day=*/*.parquet", None, ["day=1/a.parquet", "day=1/b c.parquet", "day=2/a.parquet"]),
        ("day={1,3}", None, ["day=1", "day=3"]),
        ("day=*", "_SUCCESS", ["day=1", "day=3"]),
        ("", None, ["_day=4/a.parquet", "day=1/a.parquet", "day=1/b c.parquet", "day=2/a.parquet", "day=3/deep/er.parquet"]),
        ("", "_SUCCESS", ["_day=4", "day=1", "day=3"]),
        ("day=1/a.parquet", None, ["day=1/a.parquet"]),
        ("day=9/a.parquet", None, []),
        ("none/*/x", None, []),
        ("none/", None, []),
    ],
)
def test_the_files_of_a_pattern(
    context: DiscoveryContext, tmp_path: Path, pattern: str, complete: str | None, found: list[str]
) -> None:
    root = tmp_path / "_hidden" / "input"  # only what is found counts as hidden
    make(root, "day=1/a.parquet", "day=1/b c.parquet", "day=1/_SUCCESS", "day=1/.a.crc", "day=2/a.parquet", "day=2/_temporary/x")
    make(root, "day=3/deep/er.parquet", "day=3/_SUCCESS", "_none/_SUCCESS", "_none/a.parquet")
    make(root, "day=2/b.parquet._COPYING_", "_day=4/_SUCCESS", "_day=4/a.parquet")
    splits = FileSplits(f"{root}/{pattern}", complete)(context)
    assert splits == [f"file:{root}/{name}" for name in found]


def test_files_that_come_and_go_while_others_are_listed(context: DiscoveryContext, tmp_path: Path) -> None:
    stay = [f"day={number}/a.parquet" for number in range(20)]
    make(tmp_path, *stay)
    over = threading.Event()

    def come_and_go() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            make(tmp_path, f"day=7/.{number}.next", f"day=8/{number}/x.parquet")
            (tmp_path / f"day=7/.{number}.next").rename(tmp_path / f"day=7/{number}.parquet").unlink()
            shutil.rmtree(tmp_path / f"day=8/{number}")

    others = threading.Thread(target=come_and_go)
    others.start()
    try:
        for pattern in ["", "day=*/*.parquet"] * 20:
            assert {f"file:{tmp_path}/{name}" for name in stay} <= set(FileSplits(f"{tmp_path}/{pattern}")(context))
    finally:
        over.set()
        others.join()


class _Vanishing:
    """A client of Hadoop's that finds no file while it lists a directory, which is there or is not."""

    def __init__(self, is_there: bool) -> None:
        self._is_there = is_there

    def exists(self, path: Any) -> bool:
        return self._is_there

    def listFiles(self, path: Any, recursive: bool) -> Any:
        raise WorkFileMissing("hdfs://x/days/day=3", None)


def test_a_directory_that_vanishes_while_its_parent_is_listed_is_not_an_empty_parent() -> None:
    def listed(is_there: bool) -> Any:
        system = SimpleNamespace(is_local=False, client=_Vanishing(is_there), path=str, parsed=str, to_list=list)
        return HadoopPath(cast(Any, system), "hdfs://x/days").files_below()

    assert listed(is_there=False) == []
    with pytest.raises(WorkFileMissing, match="day=3"):
        listed(is_there=True)


def test_what_a_discovery_of_files_refuses(context: DiscoveryContext, tmp_path: Path) -> None:
    make(tmp_path / "{x}", "a.parquet")
    with pytest.raises(InvalidSource, match=r"without the characters .* found file:.*/\{x\}/a.parquet: Spark would read it"):
        FileSplits(f"{tmp_path}/")(context)
    with pytest.raises(SourceUnavailable, match=r"'files': expected to list nosuch://x/\*, but .* spark.hadoop"):
        FileSplits("nosuch://x/*")(context)


def test_a_pipeline_reads_each_directory_of_a_growing_prefix_once(lab: Any) -> None:
    def add(day: int) -> None:
        for part in range(2):
            lab.put(f"days/day={day}", ROWS, [("a", 10 * day + part)])
        lab.input(f"days/day={day}").joinpath("_SUCCESS").touch()

    @split_source(
        schema=ROWS,
        discover=FileSplits(f"{lab.input('days')}/", complete="_SUCCESS"),
        bounded=False,
        discovery_interval=0.2,
        instances=["x", "y"],
        sink=lab.sink("days"),
    )
    def days(context, split):
        return context.spark.read.schema(ROWS).parquet(split)

    add(1)
    lab.put("days/day=2", ROWS, [("a", 99)])
    job = lab.start(Pipeline("growing", [days]))
    job.wait_until(lambda: lab.count("days") == 2)
    (first,) = lab.input("days/day=2").glob("*.parquet")
    first.unlink()  # the directory was not complete
    add(2)
    add(3)
    job.wait_until(lambda: lab.count("days") == 6)
    job.drain()
    job.finished()
    assert sorted(lab.committed("days")) == [("a", 10 * day + part) for day in (1, 2, 3) for part in range(2)]
