"""Deliberate faults: the replacement of a piece of the source text of one function while the fault is tried.

A fault whose text is no longer in the function is refused.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule broken.

    Attributes:
        name: the behaviour of the code with the fault.
        function: the function, method or property that is broken.
        old: a piece of its source text, which occurs in it once.
        new: the replacement.
        theme: the theme (`scenario.THEMES`) of the worlds to search, if worlds of all themes take too long.
        also: another function, in which the same text is replaced in the same way.
    """

    name: str
    function: Any
    old: str
    new: str
    theme: str = ""
    also: Any = None


class StaleFault(Exception):
    """The code that a fault breaks has changed."""


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """The shipped code has the fault inside the block: every reference to the function sees it, because its code object changes.

    Raises:
        StaleFault: the function's source does not have the fault's text, or has it more than once.
    """
    with ExitStack() as restore:
        for function in [getattr(each, "fget", each) for each in (fault.function, fault.also) if each is not None]:
            restore.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = _broken(fault, function)
        yield


def _broken(fault: Fault, function: Callable[..., Any]) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    found = source.count(fault.old)
    if found != 1:
        raise StaleFault(
            f"Fault {fault.name!r}: expected {fault.old!r} once in the source of {function.__qualname__}, found it {found} "
            "times. The code has changed: name the text that breaks the same rule now."
        )
    module = compile(source.replace(fault.old, fault.new), f"<fault: {fault.name}>", "exec", dont_inherit=True)
    return next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)
