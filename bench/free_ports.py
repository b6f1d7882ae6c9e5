"""Ports for servers that start a little later."""

from __future__ import annotations

import random
import socket

_FIRST, _BEHIND = 15_000, 32_000
"""Below the ports that Linux gives to clients, and to servers that ask for any port."""


def free_port() -> int:
    """A port of this machine that is free, and outside the range from which the system chooses ports itself.

    Raises:
        OSError: there is none.
    """
    for port in random.SystemRandom().sample(range(_FIRST, _BEHIND), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"expected a free port between {_FIRST} and {_BEHIND - 1}, found none among 200")
