"""Java's answers of more than 8 KiB arrive at once, not after 40 ms.

py4j's server writes an answer in blocks of 8 KiB, and its socket keeps a block back, if it is smaller than a segment, until those
before it are acknowledged (Nagle's algorithm). On a connection of questions and answers Linux acknowledges 40 ms later: so each
plan, list of files or description of a class took 44 ms where it takes 1. The sockets of this process acknowledge at once.

Source: py4j's `ClientServerConnection` (which has no setting for its sockets), and `TCP_QUICKACK` in tcp(7): "not permanent".
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

_INSTALLED = "_dagster_checkpoints_prompt"


class PromptSocket(socket.socket):
    """A connected TCP socket that acknowledges at once what it receives."""

    __slots__ = ()

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        super().sendall(data, flags)
        self._acknowledge_at_once()

    def recv_into(self, *args: Any) -> int:
        received = super().recv_into(*args)
        self._acknowledge_at_once()  # an answer can be longer than what Linux acknowledges before it delays again
        return received

    def _acknowledge_at_once(self) -> None:
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def answer_promptly() -> None:
    """Let the connections to Java that are made after this call use such sockets, where the system has the option. Idempotent."""
    from py4j.clientserver import ClientServerConnection

    if not hasattr(socket, "TCP_QUICKACK") or hasattr(ClientServerConnection, _INSTALLED):
        return
    for name in ("_authenticate_connection", "init_socket_from_python_server"):
        setattr(ClientServerConnection, name, _prompt(getattr(ClientServerConnection, name)))
    setattr(ClientServerConnection, _INSTALLED, True)


def _prompt(method: Callable[..., None]) -> Callable[..., None]:
    """A method of a connection, in front of which or behind which the connection has its socket."""

    def with_prompt_socket(connection: Any, *args: Any) -> None:
        for found in (connection.socket, *args[:1]):
            if type(found) is socket.socket:  # not one that encrypts
                found.__class__ = PromptSocket
        method(connection, *args)

    return with_prompt_socket
