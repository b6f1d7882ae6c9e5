"""The lines of the user's code in a traceback: neither Python's own, nor of installed packages, nor of this one."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = (
    *(os.path.join(sysconfig.get_path(each), "") for each in ("stdlib", "purelib", "platlib")),
    os.path.join(Path(__file__).parent, ""),
    "<frozen ",
)


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's code in the traceback of an error, the innermost last."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
