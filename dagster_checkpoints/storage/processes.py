"""Which process owns a pipeline, and whether it is known to be gone: as far as Linux tells, of processes of this machine.

What cannot be told is "not known": the lease decides then. A process that is stopped, or stuck in a system call, is not gone: it
may go on. Neither is one that has left processes of its own behind: Spark's JVM ends by itself some moments after the Python
process that started it was killed, and until then a sink that commits on the JVM may still do so.

Source: proc(5), https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html; namespaces(7), time_namespaces(7).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dagster_checkpoints.execution.acquisition import shares_kernel
from dagster_checkpoints.execution.pipeline_state import Owner

PROC = Path("/proc")
_VARIABLE = "DAGSTER_CHECKPOINTS_OWNER"
_GONE = frozenset({"Z", "X", "x"})  # zombie, dead


def this_process(run_id: str, proc: Path = PROC) -> Owner:
    """This process as the owner of a pipeline.

    Args:
        run_id: Dagster's, or whatever a person would look for.
        proc: Where `proc` is mounted.
    """
    pid = os.getpid()
    boot, namespaces, started = "", "", 0
    with suppress(OSError, ValueError, IndexError):
        # Mounted for another namespace of processes, it would speak of other processes under these numbers.
        if os.readlink(proc / "self") == str(pid):
            boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespaces = _namespaces(proc)
            started = _started(proc, pid)
    return Owner(run_id=run_id, host=socket.gethostname(), pid=pid, boot_id=boot, namespaces=namespaces, started=started)


def mark_descendants(owner: Owner) -> None:
    """Let every process that this one starts from now on carry its name in the environment, for :func:`is_gone`."""
    os.environ[_VARIABLE] = _mark(owner)


def is_gone(owner: Owner, observer: Owner, proc: Path = PROC) -> bool:
    """Whether an owner's process is known to have ended, and every process that it has started.

    Args:
        owner: As `state.json` names it.
        observer: This process, see :func:`this_process`.
        proc: Where `proc` is mounted.

    Returns:
        False if it lives, and if it cannot be told.
    """
    return shares_kernel(owner, observer) and not _is_there(owner, proc) and not _has_descendants(owner, proc)


def _is_there(owner: Owner, proc: Path) -> bool:
    try:
        os.kill(owner.pid, 0)  # not `proc`: it may hide other users' processes
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        if _started(proc, owner.pid) != owner.started:
            return False  # its number was given to another one
        # The first thread may have ended before the others.
        threads = [int(thread.name) for thread in (proc / str(owner.pid) / "task").iterdir()]
        return any(_state(proc / str(owner.pid) / "task" / str(thread)) not in _GONE for thread in threads)
    except (OSError, ValueError, IndexError):
        return True


def _has_descendants(owner: Owner, proc: Path) -> bool:
    """Whether a process lives that carries the owner's mark. Those of other users are not ours, and cannot be read."""
    mark = f"{_VARIABLE}={_mark(owner)}".encode()
    return any(mark in environment.split(b"\0") for environment in _environments(proc))


def _environments(proc: Path) -> Iterator[bytes]:
    for process in proc.iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it has ended, or is another user's
                yield (process / "environ").read_bytes()


def _mark(owner: Owner) -> str:
    return f"{owner.pid}.{owner.started}"


def _namespaces(proc: Path) -> str:
    """Of processes, and of time where there is one: the time at which a process has started is told in it."""
    found = [os.readlink(proc / "self/ns/pid")]
    with suppress(FileNotFoundError):
        found.append(os.readlink(proc / "self/ns/time"))
    return " ".join(found)


def _started(proc: Path, pid: int) -> int:
    """Field 22, in clock ticks since the machine was started."""
    return int(_fields(proc / str(pid))[19])


def _state(process: Path) -> str:
    """Field 3."""
    return _fields(process)[0]


def _fields(process: Path) -> list[str]:
    """From field 3 on; the name before it may hold anything, also blanks and parentheses."""
    return (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
