"""The probe that an executor runs to prove that it sees the driver's work directory: it reads a word and writes a file.

This module is sent to Spark's workers by value, and they may not have the package: it must import nothing of it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time

QUESTION = "driver"


def probe(folder: str, word: str, seconds: float) -> dict[str, str]:
    """Read the driver's word in a folder, and write a file beside it; runs in a worker of an executor.

    Args:
        folder: The path of the driver's folder.
        word: The word that the driver has written to the folder.
        seconds: How long to wait for the driver's file: a shared file system may show it late.

    Returns:
        The fields of `work_directory_check.ProbeResult`: plain values: the driver could not unpickle a class of this module.
    """
    host = socket.gethostname()
    # Spark gives its workers the executor's own directories for temporary files; their names are random.
    executor = f"{host} {os.environ.get('SPARK_LOCAL_DIRS', os.getppid())}"
    until = time.monotonic() + seconds
    while True:
        try:
            with open(os.path.join(folder, QUESTION), encoding="utf-8") as file:
                found = file.read()
            problem = "" if found == word else f"{folder} holds the files of another run"
        except OSError as error:
            problem = str(error)
        if not problem:
            break
        if time.monotonic() >= until:
            return {"executor": executor, "host": host, "problem": problem}
        time.sleep(0.1)
    name = hashlib.sha256(executor.encode()).hexdigest()[:16]
    try:
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(word)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = f"it sees the directory, but cannot write to it: {error}"
        return {"executor": executor, "host": host, "problem": problem}
    return {"executor": executor, "host": host, "file": name}
