"""The process that owns a pipeline, and whether it is known to have ended. Works for Linux processes on this machine.

If the module cannot find out, the answer is "not known", and the lease decides. A process that is stopped, or blocked in a system
call, has not ended: it may continue. Nor has a process whose child processes are still alive: Spark's JVM ends some moments after
the Python process that started it was killed, and until then a sink that commits on the JVM may still do so.

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
        run_id: id of the Dagster run; without Dagster, another name that an operator recognises.
        proc: directory where `proc` is mounted.
    """
    pid = os.getpid()
    boot, namespaces, started = "", "", 0
    with suppress(OSError, ValueError, IndexError):
        # A `proc` that is mounted for another namespace shows other processes under these numbers.
        if os.readlink(proc / "self") == str(pid):
            boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespaces = _namespaces(proc)
            started = _started(proc, pid)
    return Owner(run_id=run_id, host=socket.gethostname(), pid=pid, boot_id=boot, namespaces=namespaces, started=started)


def mark_descendants(owner: Owner) -> None:
    """Mark every process that this one starts from now on, by an environment variable, for :func:`is_gone`."""
    os.environ[_VARIABLE] = _mark(owner)


def without_owner_mark() -> dict[str, str]:
    """The environment for a process that does nothing for the pipeline: :func:`is_gone` does not wait for its end."""
    return {name: value for name, value in os.environ.items() if name != _VARIABLE}


def is_gone(owner: Owner, observer: Owner, proc: Path = PROC) -> bool:
    """Whether an owner's process, and every process that it has started, is known to have ended.

    Args:
        owner: the owner that `state.json` names.
        observer: this process, see :func:`this_process`.
        proc: directory where `proc` is mounted.

    Returns:
        False if one of them is alive, and if that is not known.
    """
    return shares_kernel(owner, observer) and not _is_alive(owner, proc) and not _has_descendants(owner, proc)


def _is_alive(owner: Owner, proc: Path) -> bool:
    try:
        os.kill(owner.pid, 0)  # not `proc`: that may hide other users' processes
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        if _started(proc, owner.pid) != owner.started:
            return False  # another process has the number now
        # The first thread may have ended before the others.
        threads = [int(thread.name) for thread in (proc / str(owner.pid) / "task").iterdir()]
        return any(_state(proc / str(owner.pid) / "task" / str(thread)) not in _GONE for thread in threads)
    except (OSError, ValueError, IndexError):
        return True


def _has_descendants(owner: Owner, proc: Path) -> bool:
    """Whether a process with the owner's mark is alive. Processes of other users cannot be read, and do not have the mark."""
    mark = f"{_VARIABLE}={_mark(owner)}".encode()
    return any(mark in environment.split(b"\0") for environment in _environments(proc))


def _environments(proc: Path) -> Iterator[bytes]:
    for process in proc.iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # the process has ended, or belongs to another user
                yield (process / "environ").read_bytes()


def _mark(owner: Owner) -> str:
    return f"{owner.pid}.{owner.started}"


def _namespaces(proc: Path) -> str:
    """The process namespace, and the time namespace if the kernel has one: start times of processes are relative to it."""
    namespaces = [os.readlink(proc / "self/ns/pid")]
    with suppress(FileNotFoundError):
        namespaces.append(os.readlink(proc / "self/ns/time"))
    return " ".join(namespaces)


def _started(proc: Path, pid: int) -> int:
    """The start time (field 22), in clock ticks since the machine was started."""
    return int(_fields(proc / str(pid))[19])


def _state(process: Path) -> str:
    """The state (field 3)."""
    return _fields(process)[0]


def _fields(process: Path) -> list[str]:
    """The fields of `stat` from field 3 on; the name before them may contain blanks and parentheses."""
    return (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
