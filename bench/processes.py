"""A process and its descendants on Linux: their ids, memory and processor time.

All values come from /proc; without /proc they are empty or 0, without an error.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc") if Path("/proc").exists() else ():
        if entry.isdigit() and (fields := _stat(int(entry))):
            children[int(fields[1])].append(int(entry))
    pids = [root]
    for pid in pids:
        pids += children[pid]
    return pids


def is_java(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "java"
    except OSError:
        return False


def pss_mb(pid: int) -> float:
    """Proportional set size in MB; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def cpu_seconds(root: int) -> float:
    """Processor time in seconds that a process and its descendants have used, including descendants that have ended."""
    ticks = 0
    for pid in tree(root):
        ticks += sum(int(field) for field in _stat(pid)[11:15])  # own and waited-for children's: user, system
    return ticks / os.sysconf("SC_CLK_TCK")


def threads(root: int) -> int:
    """The number of threads of a process and its descendants."""
    return sum(int(fields[17]) for pid in tree(root) if (fields := _stat(pid)))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third on; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []
