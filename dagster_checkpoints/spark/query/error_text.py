"""The text of an error as a user reads it: without the plans, the stack traces and the query's state that Spark adds.

Nothing is lost: the error itself, with all of its text, stays the cause of the stage's error. Must not know tasks or stages.
"""

from __future__ import annotations

import re

from pyspark.errors import AnalysisException

# What Spark writes behind the message of an error, each to the end of the text.
_APPENDIX = re.compile(r"\n=== Streaming Query ===|\n+JVM stacktrace:|\n+Driver stacktrace:")
# The line of a plan behind the message of an AnalysisException.
_PLAN = re.compile(r";\s*\n\s*['~+!*:-]*\s*[A-Z][\w ]*[(\[{<#,'` \n]")
_JAVA_FRAME = re.compile(r"^\s*(at [\w.$/<>]+\(.*\)|\.\.\. \d+ more)\s*$")
_WRAPPINGS = (
    re.compile(r"^\[STREAM_FAILED\] Query \[[^\]]*\] terminated with exception: "),
    re.compile(r"^An error occurred while calling [\w.]+\.\n: "),
    re.compile(r"^(?:org\.apache\.spark|java)\.[\w.$]+: (?=\[)"),
    re.compile(r"^Job aborted due to stage failure: .*?most recent failure: Lost task [^\n]*?\): (?=\S)", re.DOTALL),
)
_WRAPPING_STATE = " SQLSTATE: XXKST"


def text_of_error(error: BaseException) -> str:
    """The name of an error's class, and its message."""
    text = str(error)
    if type(error).__module__.partition(".")[0] in ("pyspark", "py4j"):
        text = _without_appendices(text, analysis=isinstance(error, AnalysisException))
    return f"{type(error).__name__}: {text}" if text.strip() else type(error).__name__


def _without_appendices(text: str, *, analysis: bool) -> str:
    appendix = _APPENDIX.search(text)
    text = text[: appendix.start()] if appendix else text
    for wrapping in _WRAPPINGS:
        text, wrapped = wrapping.subn("", text, count=1)
        if wrapped:
            text = text.removesuffix(_WRAPPING_STATE)
    plan = _PLAN.search(text) if analysis else None
    text = text[: plan.start()] if plan else text
    return "\n".join(line for line in text.splitlines() if not _JAVA_FRAME.match(line)).rstrip().removesuffix(_WRAPPING_STATE)
