"""Reads the signature of a user's function: the stages that it names, and its source location.

The only module that inspects functions; must not know stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dagster_checkpoints.pipeline.edges import StageInput
from dagster_checkpoints.pipeline.errors import InvalidStageInputError, StageSignatureError
from dagster_checkpoints.pipeline.names import suggestion

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class SourceLocation:
    """Source location of the user's code.

    Args:
        file: Path of the file as Python compiled it.
        line: First line of the function (of its first decorator), from 1; 0 when unknown.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def locate(function: Callable[..., Any]) -> SourceLocation:
    """The source location of a function; decorators that use `functools.wraps` are skipped."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return SourceLocation("<unknown>", 0)
    return SourceLocation(code.co_filename, code.co_firstlineno)


def function_inputs(
    function: Callable[..., Any], options: Mapping[str, StageInput], where: str
) -> tuple[Mapping[str, StageInput], bool]:
    """The inputs that a function names, and whether it takes the context.

    Args:
        function: The user's function; its parameters, except `context`, name upstream stages.
        options: Options for some of the inputs, by name.
        where: The stage as errors name it.

    Returns:
        The inputs in the order of the parameters, and whether there is a parameter `context`.

    Raises:
        StageSignatureError: A parameter cannot be passed by name, or an option has no parameter of its name.
        InvalidStageInputError: An option is not a StageInput.
    """
    parameters = inspect.signature(function).parameters
    names = _named(list(parameters.values()), where)
    return _with_options(names, options, where), "context" in parameters


def method_inputs(
    transform: Callable[..., Any], options: Mapping[str, StageInput], where: str, *, reads_rest: bool = False
) -> Mapping[str, StageInput]:
    """The inputs that a subclass's `transform(self, context, ...)` names.

    With `**inputs`, or `reads_rest`, the keys of `options` name further inputs.

    Raises:
        StageSignatureError: `context` is not the first parameter, a parameter cannot be passed by name, or an
            option has no parameter of its name.
        InvalidStageInputError: An option is not a StageInput.
    """
    parameters = _parameters(transform)[1:]  # without self
    if not parameters or parameters[0].name != "context":
        raise StageSignatureError(f"{where}: transform must begin with the parameters (self, context, ...).")
    rest = [parameter for parameter in parameters[1:] if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    if reads_rest:
        return _with_options(list(options), options, where)
    names = _named([parameter for parameter in parameters[1:] if parameter not in rest], where)
    if rest:
        names += [name for name in options if name not in names]
    return _with_options(names, options, where)


@lru_cache(maxsize=128)
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _named(parameters: list[inspect.Parameter], where: str) -> list[str]:
    for parameter in parameters:
        if parameter.kind not in _BY_NAME:
            raise StageSignatureError(
                f"{where}: the parameter '{str(parameter).split(':')[0]}' names no stage. Every "
                f"parameter except 'context' is the name of one upstream stage, without * or /."
            )
    return [parameter.name for parameter in parameters if parameter.name != "context"]


def _with_options(names: list[str], options: Mapping[str, StageInput], where: str) -> Mapping[str, StageInput]:
    if not isinstance(options, Mapping):
        raise InvalidStageInputError(f'{where}: inputs={options!r}; expected {{"upstream_stage": StageInput(...)}}.')
    for name, option in options.items():
        if name not in names:
            raise StageSignatureError(
                f"{where}: inputs has options for {name!r}, but the function has no parameter of that name. "
                f"{suggestion(str(name), names)}"
            )
        if not isinstance(option, StageInput):
            raise InvalidStageInputError(
                f'{where}: inputs[{name!r}] is {option!r}; expected a StageInput, such as StageInput(mode="static").'
            )
    return {name: options.get(name, StageInput()) for name in names}
