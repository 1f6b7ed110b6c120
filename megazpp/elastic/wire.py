"""Authenticated messages over TCP for elastic DiLoCo: between the coordinator and ranks, and between ranks.

Both sides of a connection prove that they know the run's secret: each sends a random number and answers with an
HMAC-SHA256 over both numbers. Every message is then a frame of JSON with a MAC over the frame's number and content. The
key of the MAC belongs to one direction of one connection, so no frame can be forged, repeated, reordered or sent back.
Bulk data follows a frame with its length, and precedes a frame with its SHA-256. Nothing is encrypted: use a VPN such
as WireGuard over the open internet. This file uses the standard library only, so the coordinator does not need torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megazpp.base.address import Address, listen
from megazpp.base.files import cause

GREETING = b"megazpp elastic 1\n"
# Sizes in bytes: of each side's random number in the handshake, of a MAC (HMAC-SHA256), and of the longest JSON message
# that is sent or accepted
NONCE_BYTES, MAC_BYTES, MOST_FRAME_BYTES = 16, 32, 1 << 24
# Bytes of bulk data per call of `sendall`. The socket's time limit holds for a whole call, within which a slow link can
# send only a small part.
PART_BYTES = 1 << 16
RETRY_SECONDS = 0.3  # wait before a connection, a fetch, or the acceptance of a connection is tried again
HANDSHAKE_SECONDS = 10.0  # limit for each read and write until the peer has proved that it knows the secret
# Largest number of accepted connections whose peers have not proved yet that they know the secret. Further connections
# wait in the operating system's queue, so that they cannot use up the threads and open files of this process.
MOST_HANDSHAKES = 100
NO_SECRET = b"all groups are on this machine"  # secret of a run without a secret file
_HEAD = struct.Struct("!I")  # header of a frame: the length of the frame's JSON in bytes
_NUMBER = struct.Struct("!Q")  # number of a frame, or length of a value, as 8 bytes that enter a MAC


class WireError(ConnectionError):
    """The error of a connection whose peer does not know the run's secret, or has sent an invalid frame."""


class Channel:
    """One side of an authenticated TCP connection, which sends and receives JSON messages.

    Several threads may send. Only one thread may receive.

    Args:
        sock: connected socket. `Channel` closes the socket, also if the handshake fails.
        secret: secret of the run.
        accepted: True on the side that has accepted the connection, False on the side that has opened it.

    Raises:
        WireError: the peer does not know the secret, or speaks another protocol.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, accepted: bool) -> None:
        self._sock, self._sent, self._received, self._lock = sock, 0, 0, threading.Lock()
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own = os.urandom(NONCE_BYTES)
            sock.sendall(GREETING + own)
            if self._read(len(GREETING)) != GREETING:
                raise WireError(
                    "the peer speaks another protocol, or another version of elastic DiLoCo: check the address, and "
                    "run the same version of MegaZ++ in all groups and the coordinator"
                )
            other = self._read(NONCE_BYTES)
            nonces = other + own if accepted else own + other  # both sides use the same order
            sides = (b"accepted", b"connected") if accepted else (b"connected", b"accepted")
            self._send_key, self._receive_key = (_mac(secret, side, nonces) for side in sides)
            sock.sendall(_mac(self._send_key, b"proof"))
            if not hmac.compare_digest(self._read(MAC_BYTES), _mac(self._receive_key, b"proof")):
                raise WireError(
                    "the peer does not know the secret of this run: give all groups and the coordinator the same "
                    "secret file"
                )
        except BaseException:
            sock.close()
            raise

    @property
    def local_host(self) -> str:
        """The IP address of this side of the connection, on which other groups may be able to reach this host."""
        return self._sock.getsockname()[0]

    def set_timeout(self, seconds: float) -> None:
        """Set the time limit of `send` and `receive`, which raise a TimeoutError when the time is over.

        The limit holds for a complete call of `send`. In `receive` it holds for each wait for further bytes.
        """
        self._sock.settimeout(seconds)

    def send(self, message: Any) -> None:
        """Send a message, any value that JSON can represent."""
        data = json.dumps(message).encode()
        assert len(data) <= MOST_FRAME_BYTES, len(data)
        with self._lock:
            mac = _mac(self._send_key, _NUMBER.pack(self._sent), data)
            self._sent += 1
            self._sock.sendall(_HEAD.pack(len(data)) + mac + data)

    def receive(self) -> Any:
        """Wait for the next message from the peer, and return it as `json.loads` decodes it.

        Raises:
            WireError: the frame is longer than MOST_FRAME_BYTES, or its MAC is wrong.
            OSError: the connection has ended, or the timeout is over.
        """
        (length,) = _HEAD.unpack(self._read(_HEAD.size))
        if length > MOST_FRAME_BYTES:
            raise WireError(
                f"a frame of {length} bytes from the peer is too long: at most {MOST_FRAME_BYTES} are allowed; "
                "closing the connection"
            )
        mac, data = self._read(MAC_BYTES), self._read(length)
        if not hmac.compare_digest(mac, _mac(self._receive_key, _NUMBER.pack(self._received), data)):
            raise WireError(
                "the MAC of a frame from the peer is wrong, so the frame was changed, repeated or reordered: "
                "closing the connection"
            )
        self._received += 1
        return json.loads(data)

    def send_data(self, message: dict[str, Any], data: bytes | memoryview) -> None:
        """Send a message, then bulk data. No other thread may send on this connection meanwhile.

        Args:
            message: JSON object; the key "bytes" is added to it.
            data: the bulk data, which the peer gets from `receive_data`.
        """
        self.send(message | {"bytes": len(data)})
        digest, view = hashlib.sha256(), memoryview(data)
        for start in range(0, len(data), PART_BYTES):
            part = view[start : start + PART_BYTES]
            digest.update(part)
            self._sock.sendall(part)
        self.send(digest.hexdigest())

    def receive_data(self, most_bytes: int) -> tuple[dict[str, Any], bytearray]:
        """Wait for a message that was sent by `send_data`, and return the message and its bulk data.

        Raises:
            WireError: the data is longer than `most_bytes`, or its SHA-256 is not the one that the peer has sent.
        """
        message = self.receive()
        if not 0 <= message["bytes"] <= most_bytes:
            raise WireError(
                f"the peer announced {message['bytes']} bytes of data, but at most {most_bytes} are expected: closing "
                "the connection"
            )
        data = self._read(message["bytes"])
        if hashlib.sha256(data).hexdigest() != self.receive():
            raise WireError(
                "bulk data from the peer was damaged on the way, and is dropped: its SHA-256 is not the announced one"
            )
        return message, data

    def close(self) -> None:
        """Close the connection. A thread that is blocked in `receive` gets an OSError."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, length: int) -> bytearray:
        """Wait for exactly `length` bytes from the peer, and return them.

        Raises:
            ConnectionError: the peer has closed the connection before it has sent all of the bytes.
        """
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            count = self._sock.recv_into(view[done:])
            if count == 0:
                raise ConnectionError(f"the peer closed the connection after {done} of {length} expected bytes")
            done += count
        return data


def _mac(key: bytes, *parts: bytes | bytearray) -> bytes:
    """Return the HMAC-SHA256 of `parts`.

    The length of each part enters too, so that the same bytes divided into other parts get another MAC.
    """
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(_NUMBER.pack(len(part)))
        mac.update(part)
    return mac.digest()


def connect(address: Address, secret: bytes, *, seconds: float) -> Channel:
    """Open an authenticated connection to `address`, and return this side's channel.

    Args:
        address: address of an `AuthenticatedListener`.
        secret: secret of the run.
        seconds: limit for connecting, and later for the calls of `send` and `receive` (see `Channel.set_timeout`).
    """
    channel = Channel(socket.create_connection(address, seconds), secret, accepted=False)
    channel.set_timeout(seconds)
    return channel


class AuthenticatedListener:
    """A server that accepts TCP connections, and runs `serve` in a new thread for each peer that knows the secret.

    Args:
        address: address to listen on; port 0 chooses a free port.
        secret: secret of the run.
        serve: function that gets the channel to a peer. The channel is closed when the function returns or raises.
        refused: function that gets a line of text about each connection that was refused or broke the protocol.
        flag: command-line flag that gives the address, for an error message.
    Attributes:
        address: the address on which this listener listens, with the chosen port.

    Raises:
        ValueError: this machine cannot listen on `address`.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        serve: Callable[[Channel], None],
        refused: Callable[[str], None] = lambda why: None,
        *,
        flag: str = "--listen",
    ) -> None:
        self._secret, self._serve, self._refused = secret, serve, refused
        self._handshakes = threading.Semaphore(MOST_HANDSHAKES)
        try:
            self._server = listen(address)
        except OSError as error:
            why = cause(error).partition(" (while")[0]  # without the address, which the message below names
            raise ValueError(
                f"{flag} {address} cannot be used: {why}; give an address of this machine, and a "
                "port that no other program uses"
            ) from error
        self.address = Address(*self._server.getsockname()[:2])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections. Open connections continue."""
        self._server.close()

    def _accept(self) -> None:
        """Accept connections until `close`, and start a thread with `_run` for each. This is the body of a thread."""
        while True:
            self._handshakes.acquire()
            try:
                sock, peer = self._server.accept()
            except OSError:  # this listener is closed, or the process has too many open files for now
                if self._server.fileno() < 0:
                    return
                self._handshakes.release()
                time.sleep(RETRY_SECONDS)
                continue
            threading.Thread(target=self._run, args=(sock, peer[0]), daemon=True).start()

    def _run(self, sock: socket.socket, peer: str) -> None:
        """Let the peer prove that it knows the secret, call `serve` with its channel, and close the connection.

        If the proof fails or a message is malformed, `refused` gets a line. This is the body of a connection's thread.

        Args:
            sock: socket of the accepted connection.
            peer: IP address of the peer, for the lines that `refused` gets.
        """
        try:
            channel = Channel(sock, self._secret, accepted=True)
        except OSError as error:
            self._refused(f"refused a connection from {peer}: {error}")
            return
        finally:
            self._handshakes.release()
        try:
            self._serve(channel)
        except (WireError, ValueError, KeyError, TypeError) as error:
            self._refused(f"closed the connection to {peer}: {error!r}")
        except OSError:
            pass
        finally:
            channel.close()


def read_secret(path: str | None, flag: str) -> bytes:
    """Return the secret of an elastic run, which all of its groups share, from a file.

    Args:
        path: the file; white space around the secret is removed. None: all groups run on this machine and use a
            constant secret.
        flag: command-line flag that has given `path`, for error messages.

    Raises:
        ValueError: the file cannot be read, other users may read it, or the secret has less than 32 characters.
    """
    if path is None:
        return NO_SECRET
    try:
        with Path(path).expanduser().open("rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode & 0o777, file.read(4096).strip()
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error
    if mode & 0o077:
        raise ValueError(f"{flag} {path}: other users may read this file (mode {mode:o}); use chmod 600")
    if len(secret) < 32:
        raise ValueError(
            f"{flag} {path}: {len(secret)} characters are too few, at least 32 are needed; make one with "
            "head -c 32 /dev/urandom | base64"
        )
    return secret
