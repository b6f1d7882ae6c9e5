"""The file that a run's trace is written to.

Each line is given to the operating system at once: a run that is killed leaves all but its last line. A disk that is full ends
the trace, not the run. Must not know what the lines say.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import TracebackType


class TraceFile:
    """Receives the lines of one trace, from any thread.

    Args:
        path: the file; an existing one is replaced.
        log: told if the trace cannot be written.

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
        """End the trace; does nothing if it is closed."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
