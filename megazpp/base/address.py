"""TCP addresses that users give in flags and environment variables, with IPv4, IPv6 and host names.

An IPv6 address contains colons, so a text with a port has the address in brackets: [fd00::1]:29500. This file does not
import torch.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

MOST_PORT = 2**16 - 1  # largest number of a TCP port
# Hosts that stand for all addresses of a machine that listens; nobody can connect to them
WILDCARDS = ("0.0.0.0", "::")


class Address(NamedTuple):
    """A TCP address: host name or IP address without brackets, and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, flag: str, *, any_port: bool = False) -> Address:
    """Parse the text HOST:PORT, for example "10.8.0.1:29700" or "[fd00::1]:29700".

    Args:
        text: the text that the user has given.
        flag: flag or environment variable with this text, for error messages.
        any_port: True to accept port 0, with which a program listens at a free port.

    Raises:
        ValueError: `text` has no host or no port, an IPv6 address has no brackets, or the port is no number from 1 to
            65535.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port) or text.endswith("]"):
        raise ValueError(f"{flag} {text}: HOST:PORT is expected, for example 10.8.0.1:29700")
    if ":" in host and not host.startswith("["):
        raise ValueError(
            f"{flag} {text}: write HOST:PORT, with an IPv6 address in brackets, for example [fd00::1]:29700"
        )
    number = 0 if any_port and port == "0" else parse_port(port, f"{flag} {text}: the port")
    return Address(parse_host(host, flag), number)


def parse_host(text: str, flag: str) -> str:
    """Return a host name or IP address without the brackets of an IPv6 address.

    Args:
        text: the text that the user has given.
        flag: flag or environment variable with this text, for error messages.

    Raises:
        ValueError: `text` is no host, for example because it has a port.
    """
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not host or any(character in "[]/ " for character in host) or (":" in host and not _is_ip(host)):
        raise ValueError(
            f"{flag} {text} is not the name or the IP address of a host: give for example 10.0.0.1 or fd00::1, without "
            "a port"
        )
    return host


def parse_port(text: str, name: str) -> int:
    """Return the TCP port that `text` contains.

    Args:
        text: the text that the user has given.
        name: flag or environment variable with this text, for error messages.

    Raises:
        ValueError: `text` is not a number from 1 to 65535.
    """
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_PORT):
        raise ValueError(f"{name} {text} is not a TCP port: give a number from 1 to {MOST_PORT}")
    return int(text)


def is_loopback(host: str) -> bool:
    """Return True for "localhost", and for an IP address that only this machine itself can reach."""
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def store_address(env: Mapping[str, str] = os.environ) -> str:
    """Return the address of the job's store as "HOST:PORT", for error messages.

    "?" replaces the host or the port if MASTER_ADDR or MASTER_PORT is not set.
    """
    host, port = (env.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: Address) -> socket.socket:
    """Return a TCP socket that listens at `address`; for port 0 the system chooses a free port.

    Raises:
        OSError: this machine cannot listen there, or the host name is unknown.
    """
    family, *_, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family)


def _is_ip(host: str) -> bool:
    """Return True if `host` is an IPv4 or IPv6 address, not a host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
