"""Random programs, each changed a little: where the plans are said to fit, plain Spark continues with the state exactly.

The judge is Spark itself: one batch under the program, then one under the changed program from the same checkpoint, compared with
a batch computation. In that one the first rows have passed what stood in front of the operators before, and the later rows what
stands there now.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dagster_checkpoints.spark.query.plan_fingerprint import PlanDescription, describe
from dagster_checkpoints.spark.query.plans import QueryPlan
from dagster_checkpoints.state.errors import StatefulPlanChanged
from dagster_checkpoints.state.metadata import QuerySnapshot, StageInstanceSnapshot, TaskSnapshot
from dagster_checkpoints.state.plans import check_stateful_plans

ROWS = StructType().add("k", "string").add("v", "long").add("w", "long").add("part", "integer")
FILTERS = ("true", "v > 4", "v <= 4", "w > 4", "w <= 4", "k > 'b'", "v > 4 AND w > 2")
PROJECTIONS = (("v", "w"), ("v * 2", "w"), ("w", "v"), ("v", "w + 1"))
GROUPS = ("sum(v) AS b, sum(w) AS c", "sum(w) AS b, sum(v) AS c", "max(v) AS b, sum(w) AS c")
KEYS = (("k", "v", "w"), ("k", "w", "v"), ("v", "k", "w"))
BEHIND = ("true", "b > 3", "a > 'b'", "a <= 'b'", "b < c", "c <= b")
OF_JOINS = ("true", "v = v2", "w = w2", "v < v2", "a > 'b'")


@dataclass(frozen=True)
class Branch:
    """One operator, with what stands in front of it and behind it."""

    kind: str  # group, duplicates, join
    where: str
    columns: tuple[str, str]
    of: int  # which functions, or keys
    behind: str
    other_side: str = "true"

    def front(self, rows: DataFrame, where: str) -> DataFrame:
        return rows.where(where).selectExpr("k", f"{self.columns[0]} AS v", f"{self.columns[1]} AS w", "part")

    def streamed(self, rows: DataFrame) -> DataFrame:
        fed = self.front(rows, self.where).drop("part")
        if self.kind == "group":
            return self._end(fed.groupBy(F.col("k").alias("a")).agg(*map(F.expr, GROUPS[self.of].split(", "))))
        if self.kind == "duplicates":
            return self._end(fed.dropDuplicates(list(KEYS[self.of])).selectExpr("k AS a", "v AS b", "w AS c"))
        other = self.front(rows, self.other_side).selectExpr("k AS k2", "v AS v2", "w AS w2")
        return self._end(fed.withColumnRenamed("k", "a").join(other, F.expr("a = k2")))

    def emitted(self, before: Branch, rows: DataFrame) -> DataFrame:
        """The rows that the branch emits for the second part, if another one stood here for the first part."""

        def fed(own: str) -> DataFrame:
            first, second = rows.where("part = 1"), rows.where("part = 2")
            return before.front(first, getattr(before, own)).unionByName(self.front(second, getattr(self, own)))

        if self.kind == "group":
            functions = [F.expr(each) for each in (*GROUPS[self.of].split(", "), "max(part) AS part")]
            found = fed("where").groupBy(F.col("k").alias("a")).agg(*functions)
        elif self.kind == "duplicates":
            found = fed("where").groupBy("k", "v", "w").agg(F.min("part").alias("part"))
            found = found.selectExpr("k AS a", "v AS b", "w AS c", "part")
        else:
            other = fed("other_side").selectExpr("k AS k2", "v AS v2", "w AS w2", "part AS part2")
            found = fed("where").withColumnRenamed("k", "a").join(other, F.expr("a = k2"))
            found = found.withColumn("part", F.greatest("part", "part2"))
        return self._end(found.where("part = 2"))

    def _end(self, rows: DataFrame) -> DataFrame:
        if self.kind == "join":
            return rows.where(self.behind).selectExpr("a", "v * 100 + w AS b", "v2 * 100 + w2 AS c")
        return rows.where(self.behind).select("a", "b", "c")


Program = tuple[Branch, ...]


def any_branch(chance: random.Random) -> Branch:
    kind = chance.choice(("group", "group", "duplicates", "join"))
    behind = chance.choice(OF_JOINS if kind == "join" else BEHIND)
    of = chance.randrange(3)
    return Branch(kind, chance.choice(FILTERS), chance.choice(PROJECTIONS), of, behind, chance.choice(FILTERS))


def any_program(chance: random.Random) -> Program:
    first = any_branch(chance)
    if chance.random() < 0.4:
        return (first,)
    alike = replace(first, where=chance.choice(FILTERS), columns=chance.choice(PROJECTIONS))
    return first, chance.choice((alike, alike, any_branch(chance)))


def edited(program: Program, chance: random.Random) -> Program:
    if len(program) > 1 and chance.random() < 0.3:
        return program[::-1]
    place = chance.randrange(len(program))
    branch = program[place]
    behind = OF_JOINS if branch.kind == "join" else BEHIND
    changed = chance.choice(
        (
            replace(branch, where=chance.choice(FILTERS)),
            replace(branch, columns=chance.choice(PROJECTIONS)),
            replace(branch, behind=chance.choice(behind)),
            replace(branch, of=chance.randrange(3)),
            replace(branch, where=branch.other_side, other_side=branch.where),
        )
    )
    found = (*program[:place], changed, *program[place + 1 :])
    return edited(found, chance) if chance.random() < 0.2 else found


def union(frames: Sequence[DataFrame]) -> DataFrame:
    result = frames[0]
    for each in frames[1:]:
        result = result.unionByName(each)
    return result


class Judge:
    """Runs a program and then the changed one on plain Spark, with one checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path, chance: random.Random, rows: int = 24) -> None:
        self.spark = spark
        self.folder = folder
        self.rows = [
            (chance.choice("abcd"), chance.randrange(10), chance.randrange(10), part) for part in (1, 2) for _ in range(rows)
        ]
        (folder / "input").mkdir()
        spark.createDataFrame(self.rows[:rows], ROWS).coalesce(1).write.parquet(str(folder / "first"))
        spark.createDataFrame(self.rows[rows:], ROWS).coalesce(1).write.parquet(str(folder / "second"))

    def described(self, program: Program) -> PlanDescription:
        frame = self._streamed(program)
        return describe(QueryPlan(frame, frame.schema, True, False, outputs={"stage": frame}, output_mode="update"))

    def _streamed(self, program: Program) -> DataFrame:
        source = self.spark.readStream.schema(ROWS).parquet(str(self.folder / "input"))
        return union([branch.streamed(source) for branch in program])

    def compare(self, name: str, before: Program, now: Program, continued: Program | None = None) -> None:
        """Check that the second run emits the expected rows; `continued` has the branches of `before` in the order of `now`."""
        given = self.folder / "input"
        for old in given.iterdir():
            old.unlink()
        self._run(name, before, "first")
        found = Counter(self._run(name, now, "second"))
        rows = self.spark.createDataFrame(self.rows, ROWS)
        expected = union([branch.emitted(old, rows) for old, branch in zip(continued or before, now, strict=True)])
        assert found == Counter(map(tuple, expected.collect())), f"{before}\n-> {now}"

    def _run(self, name: str, program: Program, part: str) -> list[tuple[Any, ...]]:
        for file in (self.folder / part).glob("*.parquet"):
            (self.folder / "input" / f"{part}.parquet").write_bytes(file.read_bytes())
        emitted: list[tuple[Any, ...]] = []

        def take(batch: DataFrame, number: int) -> None:
            emitted.extend(map(tuple, batch.collect()))

        writer = self._streamed(program).writeStream.outputMode("update").foreachBatch(take)
        query = writer.trigger(availableNow=True).option("checkpointLocation", str(self.folder / name)).start()
        query.awaitTermination()
        return emitted


def fits(before: PlanDescription, now: PlanDescription) -> bool:
    assert before.planned is not None
    held = StageInstanceSnapshot(state_plan=before.operators["stage"], planned=before.planned["stage"])
    snapshot = TaskSnapshot({"stage": held}, QuerySnapshot(0))
    try:
        check_stateful_plans(snapshot, now.operators, "0", {}, "checkpoint 0", now.planned)
    except StatefulPlanChanged:
        return False
    return True


@pytest.fixture
def judged_session(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.unsupportedOperationCheck", "false")  # several operators, and rows that are replaced
    session.conf.set("spark.sql.shuffle.partitions", "1")
    return session


def test_programs_whose_plans_fit_continue_exactly(judged_session: SparkSession, tmp_path: Path, chance: random.Random) -> None:
    judge = Judge(judged_session, tmp_path, chance)
    compared = refused = 0
    while compared < 3:
        before = any_program(chance)
        now = edited(before, chance)
        if fits(judge.described(before), judge.described(now)):
            if before != now:
                judge.compare(f"pair{compared}", before, now)
                compared += 1
        else:
            refused += 1
    print(f"{compared} pairs compared, {refused} refused")


def branch(kind: str, **of: Any) -> Branch:
    return Branch(**{"kind": kind, "where": "true", "columns": PROJECTIONS[0], "of": 0, "behind": "true", **of})


REFUSED: dict[str, tuple[Program, Program]] = {
    "the keys of duplicates in another order": ((branch("duplicates"),), (branch("duplicates", of=1),)),
    "another equality behind a join": ((branch("join", behind="v = v2"),), (branch("join", behind="w = w2"),)),
    "two groups that exchange places": (
        (branch("group", where="v > 4"), branch("group", where="v <= 4")),
        (branch("group", where="v <= 4"), branch("group", where="v > 4")),
    ),
    "no filter on a key behind a group any more": ((branch("group", behind="a > 'b'"),), (branch("group"),)),
}


@pytest.mark.parametrize(("before", "now"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_would_be_wrong(judged_session: SparkSession, tmp_path: Path, before: Program, now: Program) -> None:
    """Spark itself continues in silence: the comparison with the batch result can fail."""
    judge = Judge(judged_session, tmp_path, random.Random(0), rows=80)
    assert not fits(judge.described(before), judge.described(now))
    with pytest.raises(AssertionError, match="->"):
        judge.compare("pair", before, now, continued=now if now == before[::-1] else before)
