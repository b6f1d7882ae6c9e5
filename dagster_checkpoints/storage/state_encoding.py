"""The bytes of ``state.json``: indented JSON, so that people can read it."""

from __future__ import annotations

import msgspec

from dagster_checkpoints.errors import CorruptPipelineState, UnknownPipelineStateVersion
from dagster_checkpoints.execution.pipeline_state import VERSION, PipelineState

_READABLE = range(1, VERSION + 1)
"""Version 2 added how a job ended, the savepoint of its stop, and claimed savepoints; version 3 the requester of the stop, the
job's runs, and where the pipeline is defined; version 4 that a burst can be the requester; version 5 the instances that stages
have had. All these fields have defaults."""


class _Version(msgspec.Struct):
    version: int


# Created at import: two threads that decode a type for the first time at the same moment crash msgspec.
_VERSIONS = msgspec.json.Decoder(_Version)
_STATES = msgspec.json.Decoder(PipelineState)


def encode_state(state: PipelineState) -> bytes:
    """``state`` as the bytes of ``state.json``."""
    return msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"


def decode_state(data: bytes, where: str) -> PipelineState:
    """The state in the bytes of ``state.json``.

    Args:
        data: the file's bytes.
        where: the file's URL, for the text of errors.

    Raises:
        UnknownPipelineStateVersion: a newer release wrote the file.
        CorruptPipelineState: the bytes are not a pipeline's state.
    """
    try:
        version = _VERSIONS.decode(data).version
        if version in _READABLE:
            # The next write has the newest version.
            return msgspec.structs.replace(_STATES.decode(data), version=VERSION)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptPipelineState(
            f"expected the state of a pipeline as JSON in {where}, found {len(data)} bytes that are not: "
            f"{error}. Only this package writes the file, and replaces it as a whole: restore it from a "
            "backup; or stop every run, delete the file and start the pipeline again: the run can then name the "
            "checkpoint to restore from"
        ) from error
    raise UnknownPipelineStateVersion(
        f"expected version {VERSION} or older in {where}, found version {version}: a newer release of "
        "dagster-checkpoints wrote it. Run that release"
    )
