"""Ports on loopback that nobody listens on."""

from __future__ import annotations

import atexit
import random
import socket
from contextlib import ExitStack

# Below the range from which the kernel takes the ports of outgoing connections: a client that tries to reach a dead
# server on a port of that range can be given the very port and so keep it from coming back.
SERVER_PORTS = range(20_000, 32_000)

# Never the same row of ports in two processes, however the program around us seeds its own chance.
_chance = random.SystemRandom()

_claims = ExitStack()
atexit.register(_claims.close)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError:
        return False
    return True


def claim(port: int) -> bool:
    """Keep it from all others on this machine that ask here, until this process ends: what is to listen there may take
    a minute to start. An abstract socket, as Linux has them, leaves no file behind."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0aftertouch-port-{port}")
    except OSError:
        mark.close()
        return False
    _claims.enter_context(mark)
    return True


def free_port(preferred: int | None = None) -> int:
    """The preferred port if it is free, else some free one that nobody else has been given.

    The preferred one is not claimed: it is its server's own, which comes back to it.
    """
    if preferred and is_free(preferred):
        return preferred
    while True:
        port = _chance.choice(SERVER_PORTS)
        if is_free(port) and claim(port):
            return port
