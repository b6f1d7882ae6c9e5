"""A savepoint is corrected, and a job continues from it: other values of `context.state`, and a source that reads rows again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dagster_checkpoints.errors import MissingSavepoint
from dagster_checkpoints.pipeline import Pipeline, Stage, unbounded_source
from dagster_checkpoints.spark.job.events import JobStarted
from dagster_checkpoints.spark.stored_state import CorrectionError, correct_savepoint, read_state
from dagster_checkpoints.state.metadata_file import decode
from dagster_checkpoints.storage import open_store
from dagster_checkpoints.storage.locating import opened_at

ROWS = "v long"
KILLED_AT_EACH_WRITE = """
import os, signal, sys
from dagster_checkpoints.spark.stored_state import correct_savepoint
from dagster_checkpoints.storage import open_store

class Dying:
    left = 0

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        if name in ("put", "put_file", "copy_from"):
            Dying.left -= 1
            if Dying.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self.store, name)

    def sibling(self, url):
        found = self.store.sibling(url)
        return found and Dying(found)

for writes in range(100):
    child = os.fork()
    if not child:
        Dying.left = writes
        correct_savepoint(sys.argv[1], sys.argv[2], open_at=lambda url: Dying(open_store(url)), **CHANGES)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        print(writes)
        break
    assert status == -signal.SIGKILL, status
"""
STATE_PAGE = Path(__file__).parents[3] / "docs/state.md"


class Numbered(Stage):
    """Adds to each row the number of rows of this instance so far, and a text of a broadcast state."""

    def open(self, context: Any) -> None:
        self.context = context

    def transform(self, context: Any, live: Any) -> Any:
        return live.selectExpr("v", "0L AS number", "'' AS text")

    def process_batch(self, batch: Any, batch_id: int) -> Any:
        from pyspark.sql import functions as F

        state = self.context.state
        before = sum(state.list("sizes"))
        state.list("sizes").add(batch.count())
        state.union("batches").add([self.context.instance, batch_id])
        text = state.broadcast("texts").get("text", "first")
        state.broadcast("texts").put("text", text)
        return batch.select("v", F.lit(before).cast("long").alias("number"), F.lit(text).alias("text"))


def check_a_kill_at_each_write(location: str, target: Path, **changes: Any) -> list[Path]:
    """A process that corrects a savepoint is killed in front of each of its writes. Returns the directories that it has left."""
    program = KILLED_AT_EACH_WRITE.replace("CHANGES", repr(changes))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.run(
        [sys.executable, "-c", program, location, str(target)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-3000:]
    left = [folder for folder in target.iterdir() if not (folder / "_metadata").exists()]
    assert len(left) == int(run.stdout) - 1 >= 3, "before the first write there is no directory; the last one is complete"
    for folder in left:
        with pytest.raises(MissingSavepoint), opened_at(str(folder), open_store) as half:
            half.read()
    return left


def test_a_job_continues_from_a_corrected_savepoint(lab: Any, tmp_path: Path) -> None:
    instances = ["left", "right"]

    @unbounded_source(instances=instances)
    def live(context):
        return lab.stream(f"live-{context.instance}", ROWS)

    pipeline = Pipeline("corrected", [live, Numbered(instances=instances, sink=lab.sink())])
    for number in range(3):
        for instance in instances:
            lab.put(f"live-{instance}", ROWS, [(number,)] * 2)
    first = lab.start(pipeline, interval=None)
    first.wait_until(lambda: first.execution.rows().get("numbered", 0) == 12)
    location = first.done("savepoint", target=str(tmp_path / "kept")).location
    checkpoint = first.done("checkpoint").location
    first.drain()
    first.finished()
    before = lab.committed()
    assert before == sorted([(v, 2 * v, "first") for v in range(3) for _ in range(4)], key=repr)

    def correct(**changes: Any) -> str:
        return correct_savepoint(location, str(tmp_path / "new"), **changes)

    [*_, example] = re.findall(r"^```python\n(.*?)^```$", STATE_PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    page: dict[str, Any] = {}
    exec(example, page)
    as_shown = page["from_earlier_offsets"](location, str(tmp_path / "new"))
    state = read_state(lab.spark, as_shown, stage="numbered")
    assert [each.values for each in state.operator if (each.instance, each.name) == ("left", "sizes")] == [[]]

    new = correct(
        list_state={"numbered": {"sizes": {"left": [100]}, "batches": {"right": []}}},
        broadcast_state={"numbered": {"texts": {"text": "second"}}},
        offsets={"live": {"left": {0: {"logOffset": 0}}}},
        name="again",
    )
    assert Path(new.removeprefix("file://")).name.startswith("savepoint-1-again-")
    states = {(each.instance, each.name): each.values for each in read_state(lab.spark, new, stage="numbered").operator}
    assert states["left", "sizes"] == [100] and states["right", "sizes"] == [2, 2, 2]
    assert states["right", "batches"] == [] and len(states["left", "batches"]) == 3
    offsets = read_state(lab.spark, new, stage="live").offsets
    assert [each.sources[0][1] for each in offsets] == [{"logOffset": 0}, {"logOffset": 2}]
    with opened_at(location, open_store) as one, opened_at(new, open_store) as other:
        assert one.read() != other.read() == decode(other.storage.read_metadata(other.location), new)

    left = check_a_kill_at_each_write(location, tmp_path / "killed", list_state={"numbered": {"sizes": {"left": [100]}}})
    refused = lab.start(pipeline, interval=None, restore_from=str(left[-1]))
    with pytest.raises(MissingSavepoint, match=r"_metadata, found .* Savepoints there: .*/killed/savepoint-1-corrected-\w+\. "):
        refused.result()

    # Files 1 and 2 of the left instance are read again; the rows that the first job has committed stay.
    second = lab.start(pipeline, interval=None, restore_from=new)
    second.wait_until(lambda: second.execution.rows().get("numbered", 0) == 12 + 4)
    second.drain()
    second.finished()
    assert second.wait_for(JobStarted).restored_checkpoint == 1
    again = [(1, 100, "second")] * 2 + [(2, 100, "second")] * 2  # Spark reads both files as one batch
    assert lab.committed() == sorted([*before, *again], key=repr)

    for changes, said in (
        ({"list_state": {"numbers": {}}}, None),
        ({"list_state": {"numbers": {"sizes": {"left": []}}}}, "expected a stage 'numbers' .* Did you mean 'numbered'"),
        ({"list_state": {"numbered": {"size": {"left": []}}}}, "expected a list or union state 'size' .* Did you mean 'sizes'"),
        ({"list_state": {"numbered": {"sizes": {"lefty": []}}}}, "expected a running instance 'lefty' .* Did you mean 'left'"),
        ({"list_state": {"numbered": {"sizes": {"left": [object()]}}}}, "expected values that JSON can hold"),
        ({"broadcast_state": {"numbered": {"sizes": {}}}}, "expected a broadcast state 'sizes'"),
        ({"offsets": {"live": {"left": {1: {"logOffset": 0}}}}}, r"0: \{\"logOffset\":2\}.*, found 1: "),
        ({"offsets": {"live": {"left": {0: "earliest"}}}}, "an offset like its present one"),
    ):
        if said is None:
            assert correct(**changes), "nothing to change is a copy"
            continue
        with pytest.raises(CorrectionError, match=said):
            correct(**changes)
    with pytest.raises(CorrectionError, match="found a checkpoint, which is deleted when newer ones are complete"):
        correct_savepoint(lab.storage("corrected").url_of(checkpoint), str(tmp_path / "new"))
