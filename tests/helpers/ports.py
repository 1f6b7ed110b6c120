"""A free TCP port for a test whose programs listen on it later."""

import socket

HELD: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port that programs of this test can listen on, and that the system gives to no other process.

    This process stays bound to the port, and does not listen. Linux still lets a program listen on the port if it sets
    SO_REUSEADDR, as servers do. Until a program listens, a connection to the port is refused.
    """
    HELD.append(socket.socket())
    HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    HELD[-1].bind(("127.0.0.1", 0))
    return HELD[-1].getsockname()[1]
