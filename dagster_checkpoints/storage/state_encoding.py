"""The bytes of ``state.json``: indented JSON, for people too."""

from __future__ import annotations

import msgspec

from dagster_checkpoints.execution.pipeline_state import VERSION, PipelineState
from dagster_checkpoints.storage.errors import CorruptPipelineState, UnknownPipelineStateVersion

_READABLE = frozenset({1, 2, VERSION})
"""Version 2 added how a job ended, its stop's savepoint, and claimed savepoints; version 3 what asked for the stop, the job's
runs, and where the pipeline is defined. All have defaults."""


class _Version(msgspec.Struct):
    version: int


# Made here: two threads that decode a type for the first time at the same moment crash msgspec.
_VERSIONS = msgspec.json.Decoder(_Version)
_STATES = msgspec.json.Decoder(PipelineState)


def encode_state(state: PipelineState) -> bytes:
    """``state`` as the bytes of ``state.json``."""
    return msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"


def decode_state(data: bytes, where: str) -> PipelineState:
    """The state in the bytes of ``state.json``.

    Args:
        data: the file's bytes.
        where: its URL, for the text of errors.

    Raises:
        UnknownPipelineStateVersion: a newer release wrote it.
        CorruptPipelineState: it is no such file.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version in _READABLE:
            # What is written next is of this version.
            return msgspec.structs.replace(_STATES.decode(data), version=VERSION)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptPipelineState(
            f"expected the state of a pipeline as JSON in {where}, found {len(data)} bytes that are not: "
            f"{error}. It is written by this package alone and replaced whole: restore the file from a "
            "backup, or, with every run stopped, delete it and start anew; a checkpoint can then be named "
            "explicitly"
        ) from error
    raise UnknownPipelineStateVersion(
        f"expected version {VERSION} or older in {where}, found version {version}: a newer release of "
        "dagster-checkpoints wrote it. Run that release"
    )
