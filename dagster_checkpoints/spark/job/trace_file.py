"""The file that a run's trace is written to.

Each line is given to the operating system at once: a run that is killed loses at most its last line. A full disk ends the
trace, not the run. Must not know what the lines say.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from dagster_checkpoints.execution.trace import Recorder
from dagster_checkpoints.spark.errors import TraceError


class TraceFile:
    """Receives the lines of one trace, from any thread.

    Args:
        path: the file; an existing file is replaced.
        log: receives a warning if the trace cannot be written.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, log: logging.Logger) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._log = log
        self._lock = threading.Lock()
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._broken = False

    def write(self, line: str) -> None:
        """Append a line. After the first failure nothing more is written."""
        with self._lock:
            if self._broken or self._file.closed:
                return
            try:
                self._file.write(line + "\n")
            except OSError as error:
                self._broken = True
                self._log.warning("The trace %s ends here, since it cannot be written: %s", self.path, error)

    def close(self) -> None:
        """Close the file; does nothing if it is closed."""
        with self._lock, contextlib.suppress(OSError):  # an error of the last write; the first one was reported
            self._file.close()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_trace_folder(folder: Path, pipeline: str) -> None:
    """Check that a trace can be written to a directory, before anything has started.

    Args:
        folder: the directory below which traces are written.
        pipeline: name of the pipeline, which names the directory of its traces.

    Raises:
        TraceError: no file can be created in the directory.
    """
    try:
        (folder / pipeline).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / pipeline):
            pass
    except OSError as error:
        raise TraceError(
            f"expected to write the run's trace below {folder / pipeline}, found that no file can be created there: {error}. "
            "Name another directory in the resource's setting 'trace', or leave it out. Nothing was started"
        ) from error


@contextlib.contextmanager
def recording(folder: Path | None, pipeline: str, run_id: str, epoch: int, log: logging.Logger) -> Iterator[Recorder | None]:
    """Record a run if a directory for traces is set.

    Args:
        folder: the directory below which the trace is written; None for no trace.
        pipeline: name of the pipeline, which names the directory of its traces.
        run_id: id of the run, which names the file together with the epoch.
        epoch: the run's fencing epoch.
        log: receives the trace's path, and a warning if it cannot be written.

    Returns:
        The recorder; None if no trace is written.
    """
    if folder is None:
        yield None
        return
    path = folder / pipeline / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run_id)}-e{epoch}.trace"
    try:
        file = TraceFile(path, log)
    except OSError as error:
        log.warning("The run's trace %s cannot be written, and the run continues without one: %s", path, error)
        yield None
        return
    with file:
        log.info("The run's trace is written to %s; `dagster-checkpoints replay` shows it.", path)
        recorder = Recorder(file.write)
        recorder.begin({"pipeline": pipeline, "run": run_id, "epoch": str(epoch), "began": datetime.now(UTC).isoformat()})
        yield recorder
