"""Whether an owner's process is known to have ended; and the take-over without waiting for the lease in that case."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.cli.status_view import status_as_text
from dagster_checkpoints.control import NoRunningPipeline, PipelineControl, RequestTimedOut
from dagster_checkpoints.errors import OwnershipLost
from dagster_checkpoints.execution.pipeline_state import Owner, PipelineState
from dagster_checkpoints.files.local import LocalStore
from dagster_checkpoints.storage import CheckpointStorage
from dagster_checkpoints.storage.processes import is_gone, this_process

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0
HOUR = 3600.0

OWNER = """
import subprocess, sys, time
from dagster_checkpoints.storage import CheckpointStorage, open_store
from dagster_checkpoints.storage.processes import mark_descendants, this_process

owner = this_process("killed")
mark_descendants(owner)
with CheckpointStorage(open_store(sys.argv[1]), "flights") as storage:
    ownership = storage.acquire(owner, 3600.0)
    ownership.begin_job(resume=False)
    ownership.complete(7, "checkpoints/chk-7-1")
    child = subprocess.Popen(["sleep", "600"], start_new_session=True) if "with-child" in sys.argv else None
    print(child.pid if child else 0, flush=True)
    time.sleep(600)
"""


@dataclass
class Proc:
    """A hand-made `proc`: a folder per process, a folder per thread in it."""

    folder: Path
    us: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        (self.folder / "sys/kernel/random").mkdir(parents=True)
        (self.folder / "sys/kernel/random/boot_id").write_text("boot-1\n")
        self.process(self.us, 900)
        (self.folder / "self").symlink_to(str(self.us))
        (self.folder / str(self.us) / "ns").mkdir()
        for kind, number in (("pid", 1), ("time", 2)):
            (self.folder / str(self.us) / "ns" / kind).symlink_to(f"{kind}:[{number}]")

    def process(self, pid: int, started: int, states: str = "S", environment: bytes = b"A=1\0") -> None:
        """A process with this start time, and a thread for each letter of its states."""
        for number, state in enumerate(states):
            stat = f"{pid + number} (a name) with ) in it) {state} 1 " + "0 " * 17 + f"{started} 0 0\n"
            (self.folder / str(pid) / "task" / str(pid + number)).mkdir(parents=True)
            (self.folder / str(pid) / "task" / str(pid + number) / "stat").write_text(stat)
            if not number:
                (self.folder / str(pid) / "stat").write_text(stat)
        (self.folder / str(pid) / "environ").write_bytes(environment)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def test_a_process_is_distinguished_from_every_other_one(proc: Proc) -> None:
    owner = this_process("run-a", proc.folder)
    assert (owner.pid, owner.boot_id, owner.namespaces, owner.started) == (proc.us, "boot-1", "pid:[1] time:[2]", 900)
    (proc.folder / "self").unlink()
    (proc.folder / "self").symlink_to("1")  # mounted for another namespace of processes
    assert this_process("run-a", proc.folder) == Owner(run_id="run-a", host=owner.host, pid=proc.us)


@pytest.mark.parametrize(
    ("what", "owner", "other", "gone"),
    [
        ("it runs", {}, {"started": 500}, False),
        ("its first thread has ended, another runs", {}, {"started": 500, "states": "ZS"}, False),
        ("it is stopped", {}, {"started": 500, "states": "T"}, False),
        ("it is in a system call", {}, {"started": 500, "states": "DD"}, False),
        ("it waits for its parent to ask how it ended", {}, {"started": 500, "states": "Z"}, True),
        ("its number was given to another one", {}, {"started": 700}, True),
        ("it has left a process behind", {}, {"started": 700, "environment": b"B=2\0DAGSTER_CHECKPOINTS_OWNER=PID.500\0"}, False),
        ("another one's process is there", {}, {"started": 700, "environment": b"DAGSTER_CHECKPOINTS_OWNER=PID.5000\0"}, True),
        ("on another machine", {"host": "elsewhere"}, {"started": 700}, False),
        ("the machine was started again", {"boot_id": "boot-0"}, {"started": 700}, False),
        ("in another container", {"namespaces": "pid:[9] time:[2]"}, {"started": 700}, False),
        (
            "an older release recorded nothing",
            {"boot_id": "", "namespaces": "", "started": 0},
            {"started": 700},
            False,
        ),
        ("proc hides it", {}, None, False),
    ],
)
def test_whether_a_process_is_known_to_have_ended(
    what: str, owner: dict[str, Any], other: dict[str, Any] | None, gone: bool, proc: Proc
) -> None:
    """The number of a living process: the one that has started this process."""
    us = this_process("observer", proc.folder)
    pid = os.getppid()
    if other is not None:
        environment = other.get("environment", b"A=1\0").replace(b"PID", str(pid).encode())
        proc.process(pid, **{**other, "environment": environment})
    owned = msgspec.structs.replace(us, pid=pid, **{"started": 500, **owner})
    assert is_gone(owned, us, proc.folder) == gone, what


@pytest.fixture
def storage(tmp_path: Path, clock: Any) -> CheckpointStorage:
    return CheckpointStorage(LocalStore(tmp_path / "store"), "flights", monotonic=clock.monotonic, sleep=clock.sleep)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Callable[..., tuple[int, int]]]:
    """Kills a process that owns the pipeline: returns its number, and the number of a child process that stays alive, or 0."""
    owners: list[subprocess.Popen[bytes]] = []
    children: list[int] = []

    def kill(*arguments: str) -> tuple[int, int]:
        command = [sys.executable, "-c", OWNER, str(tmp_path / "store"), *arguments]
        owners.append(subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}))
        assert owners[-1].stdout is not None
        children.append(int(owners[-1].stdout.readline()))
        os.kill(owners[-1].pid, signal.SIGKILL)  # a zombie: the test does not wait for it
        wait_until(lambda: is_zombie(owners[-1].pid), "the owner does not end")
        return owners[-1].pid, children[-1]

    yield kill
    for owner in owners:
        owner.kill()
        owner.wait(DEADLINE)
    for child in filter(None, children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_killed_owner_is_replaced_at_once(storage: CheckpointStorage, killed: Any, clock: Any) -> None:
    """The lease is an hour long, and the new owner does not wait for it."""
    pid, _ = killed()
    began, watched = clock.now, []
    taken = storage.acquire(this_process("second"), HOUR, on_watch=lambda state, seconds: watched.append((state, seconds)))
    assert clock.now == began
    assert taken.epoch == 2 and taken.previous.newest is not None and taken.previous.newest.checkpoint_id == 7
    assert [(state.lease.owner.pid, seconds) for state, seconds in watched] == [(pid, 0.0)]


def test_a_killed_owner_is_seen_as_dead_at_once(storage: CheckpointStorage, killed: Any, clock: Any) -> None:
    """By requests and by what shows the state, although its lease is an hour long; not while a child process is alive."""
    pid, child = killed("with-child")
    control = PipelineControl(storage, asked_by="a test", monotonic=clock.monotonic, sleep=clock.sleep)
    asked, state = control.savepoint(), storage.read_state()
    assert state is not None and "starting" in shown(state)
    with pytest.raises(RequestTimedOut):
        asked.wait(5.0)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: is_empty(child), "it does not end")
    began = clock.now
    with pytest.raises(NoRunningPipeline, match=rf"process {pid}.* that run is dead: its process has ended"):
        asked.wait(600.0)
    assert clock.now - began < 10
    assert "the run's process has ended, so another run may take the pipeline over" in shown(state)


def shown(state: PipelineState) -> str:
    """What `dagster-checkpoints status` prints in its first line."""
    return str(status_as_text(state, None)[0])


def test_a_killed_owner_is_replaced_when_nothing_of_it_is_left(storage: CheckpointStorage, killed: Any, clock: Any) -> None:
    """A child process that stays alive, as Spark's JVM for a moment, could still write: the new owner waits for its end only."""
    pid, child = killed("with-child")
    began, watched = clock.now, []

    def after_a_while() -> None:
        state = storage.read_state()
        assert state is not None and state.epoch == 1, "taken over while a child process of the owner was alive"
        if clock.now >= began + 5 and not is_empty(child):
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: is_empty(child), "it does not end")

    clock.on_sleep.append(after_a_while)
    taken = storage.acquire(this_process("second"), HOUR, on_watch=lambda state, seconds: watched.append((state, seconds)))
    assert 5 <= clock.now - began < 60
    assert taken.epoch == 2
    assert [(state.lease.owner.pid, seconds) for state, seconds in watched] == [(pid, HOUR)]


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def is_empty(pid: int) -> bool:
    """Whether a process has ended: a zombie has no environment."""
    try:
        return not Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True


def test_the_lease_decides_about_this_process_itself(storage: CheckpointStorage, clock: Any) -> None:
    """This process is alive; a request that it sent before another owner took over is refused."""
    first = storage.acquire(this_process("first"), 30.0)
    began = clock.now
    second = storage.acquire(this_process("second"), 30.0)
    assert clock.now >= began + 30 and second.epoch == 2
    with pytest.raises(OwnershipLost):
        first.complete(1, "checkpoints/chk-1-1")
