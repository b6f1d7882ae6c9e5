"""Runs a model job in child processes, kills them with SIGKILL at many moments, and lets the job continue each time.

It is a program, since a process with threads must not fork: ``python -m dagster_checkpoints.testing.crashes FILE CLASS FOLDER
POINTS SEED`` prints what was wrong as JSON, an empty list if nothing was.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from dagster_checkpoints.testing.model_job import ModelCheckpoint, ModelJob
from dagster_checkpoints.testing.watched_sink import CallEvents, WatchedSink

if TYPE_CHECKING:
    from dagster_checkpoints.testing.conformance import SinkConformance

_BATCHES, _ROWS, _INSTANCES = 9, 3, 2


class _State(msgspec.Struct, frozen=True):
    """What a checkpoint storage would hold: the newest owner's epoch, and the completed checkpoints, oldest first."""

    epoch: int = 0
    completed: tuple[ModelCheckpoint, ...] = ()


class _Storage:
    """The file that stands for the checkpoint storage; it is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "storage.json"

    def read(self) -> _State:
        return msgspec.json.decode(self._file.read_bytes(), type=_State) if self._file.exists() else _State()

    def write(self, state: _State) -> None:
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(state))
        os.replace(new, self._file)


def run_job(suite: SinkConformance, folder: Path, events: CallEvents) -> None:
    """Run a job to its end, from the newest completed checkpoint; some checkpoints are aborted, and some are empty."""
    storage = _Storage(folder)
    state = msgspec.structs.replace(storage.read(), epoch=storage.read().epoch + 1)
    storage.write(state)
    newest = state.completed[-1] if state.completed else None
    job = ModelJob(suite.make_sink(folder / "target"), folder, _INSTANCES, lambda sink: WatchedSink(sink, events))
    job.start(newest, epoch=state.epoch)
    written = newest.rows[0] // _ROWS if newest else 0
    checkpoint_id = newest.id if newest else 0
    while not (newest and newest.finished):
        checkpoint_id += 1
        if checkpoint_id % 4 and written < _BATCHES:
            written += 1
            for index in range(_INSTANCES):
                job.write(_ROWS, index)
        finished = written == _BATCHES
        if finished:
            job.finish()
        taken = job.snapshot(checkpoint_id, finished=finished)
        if checkpoint_id % 3 or finished:
            newest = taken
            state = msgspec.structs.replace(state, completed=(*state.completed, taken))
            storage.write(state)
            job.commit(checkpoint_id)
    job.close()


def main(arguments: list[str]) -> int:
    file, name, folder, points, seed = arguments
    suite: SinkConformance = getattr(_module(Path(file)), name)()
    print(json.dumps(_crash(suite, Path(folder), int(points), random.Random(int(seed)))))
    return 0


def _module(file: Path) -> Any:
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("sink_under_test", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _crash(suite: SinkConformance, folder: Path, points: int, r: random.Random) -> list[str]:
    calm = _new_folder(folder, "calm")
    began = time.monotonic()
    counted = _fork(lambda: _counted(suite, calm))
    took = time.monotonic() - began
    if isinstance(counted, str):
        return [f"without a crash: {counted}"]
    calls: dict[str, list[tuple[int, int]]] = {}
    for method, first, last in counted.calls:
        calls.setdefault(method, []).append((first, last))
    wrong = _wrong(suite, calm, ended=True)
    if wrong:
        return [f"without a crash: {wrong}"]

    def moment() -> int:
        """Before, after or within a call of any method, each as probable as the others."""
        first, last = r.choice(calls[r.choice(sorted(calls))])
        return r.choice((first, last, r.randint(first, last), r.randint(first, last)))

    r.shuffle(counted.effects)
    effects = [r.choice(events) for events in counted.effects[: points // 2]]
    moments = [*effects, *(moment() for _ in range(points - len(effects)))]
    found = []
    for number, event in enumerate(moments):
        wrong = _killed_and_continued(suite, _new_folder(folder, f"crash-{number}"), event, moment(), None)
        method = next(method for method, first, last in counted.calls if first <= event <= last)
        found += [f"killed in {method}, at event {event} within calls to the sink: {wrong}"] if wrong else []
    for number in range(points // 8):  # code outside Python gives no events
        seconds = r.uniform(0.3, 1.0) * took
        wrong = _killed_and_continued(suite, _new_folder(folder, f"late-{number}"), None, moment(), seconds)
        found += [f"killed after {seconds:.3f} s: {wrong}"] if wrong else []
    return found


def _killed_and_continued(
    suite: SinkConformance, folder: Path, event: int | None, again_at: int, seconds: float | None
) -> str | None:
    """What is wrong after a kill, after a second kill while the job continues, or at the end; None if nothing is."""
    wrong = None
    for kill_at, after in ((event, seconds), (again_at, None), (None, None)):
        result = _fork(lambda at=kill_at: run_job(suite, folder, CallEvents(at)), after)  # type: ignore[misc]
        ended = result is None
        wrong = result if isinstance(result, str) else _wrong(suite, folder, ended=ended)
        if wrong or ended:
            break
    return wrong


def _wrong(suite: SinkConformance, folder: Path, *, ended: bool) -> str | None:
    """What is wrong about the rows that readers see; None if nothing is.

    They may see of each instance what some of a completed checkpoint's transactions hold, oldest first: one transaction is
    committed after the other. At the end they see all rows.
    """
    shown = _fork(lambda: suite.read(folder / "target"))
    if isinstance(shown, str):
        return f"read() raised {shown}"
    twice = [row for row, times in Counter(shown).items() if times > 1]
    if twice:
        return f"readers see {len(twice)} rows twice, for example {sorted(twice)[:3]}"
    completed = _Storage(folder).read().completed
    newest = completed[-1].rows if completed else (0,) * _INSTANCES
    for index in range(_INSTANCES):
        own = {row for row in shown if row // 1_000_000 == index}
        counts = [newest[index]] if ended else range(0, newest[index] + 1, _ROWS)
        if own not in [set(range(index * 1_000_000, index * 1_000_000 + count)) for count in counts]:
            return f"expected the first {' or '.join(map(str, counts))} rows of instance {index}, found {sorted(own)}"
    return None


class _Counted(NamedTuple):
    calls: list[tuple[str, int, int]]
    effects: list[list[int]]


def _counted(suite: SinkConformance, folder: Path) -> _Counted:
    events = CallEvents()
    run_job(suite, folder, events)
    return _Counted(events.calls, list(events.effects.values()))


def _new_folder(folder: Path, name: str) -> Path:
    (folder / name / "target").mkdir(parents=True)
    return folder / name


def _fork(work: Callable[[], Any], kill_after: float | None = None) -> Any:
    """The result of `work` in a child process; the text of its error; False if the child was killed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(read_end)
        _work(work, write_end)
    os.close(write_end)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    return pickle.loads(answer) if answer else f"the process ended with status {status}"


def _work(work: Callable[[], Any], pipe: int) -> NoReturn:
    try:
        answer = work()
    except BaseException:
        answer = "".join(traceback.format_exc())
    with os.fdopen(pipe, "wb") as out:
        out.write(pickle.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
