"""Test the authenticated messages of elastic DiLoCo: hostile peers are refused, and the listener goes on."""

import errno
import hashlib
import itertools
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
from helpers.disks import small_disk
from helpers.ports import free_port

from megazpp.base.address import Address, parse_address
from megazpp.base.files import DamagedError
from megazpp.elastic import coordinator as coordinators
from megazpp.elastic import wire
from megazpp.elastic.agent import Agent, OutError
from megazpp.elastic.config import ElasticConfig
from megazpp.elastic.coordinator import Coordinator, Journal, SupersededError
from megazpp.elastic.rounds import BLIP_SECONDS, NO_COMMIT, Rounds
from megazpp.elastic.wire import AuthenticatedListener, Channel, WireError, connect, read_secret

SECRET = b"0123456789abcdef0123456789abcdef"
HERE = Address("127.0.0.1", 0)
HELLO = {
    "group": "a",
    "rank": 0,
    "incarnation": "i",
    "facts": {},
    "rules": [1, 4, 1, 10, 1, None, 1.0, 1, None, None],
    "version": 0,
    "id": NO_COMMIT,
    "saves": "",
}
REPORT = dict.fromkeys(("steps", "wants", "version", "sent_bytes"), 0) | {
    "address": ["host", 7],
    "joined": True,
    "fingerprint": None,
    "seconds": None,
    "trains": False,
    "unsent": False,
    "leaves": False,
    "published": {},
    "have": [],
    "unreached": {},
}


def test_group_says_at_once_that_it_waits_for_the_coordinator(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    address = f"127.0.0.1:{free_port()}"
    flags = ElasticConfig(diloco_coordinator=address, diloco_secret_file=str(tmp_path / "secret"))
    lines, hello = [], {"group": "a", "version": 0, "id": NO_COMMIT}
    options = {"snapshot": lambda: ({}, b""), "stopped": lambda: bool(lines), "say": lines.append}
    with pytest.raises(OutError, match=r"start tools/coordinate\.py there"):
        Agent(flags, hello, most_bytes=0, **options)
    (line,) = lines
    assert line.startswith(f"waiting for the coordinator at {address}, which cannot be reached: ")


@pytest.fixture
def listener() -> Iterator[AuthenticatedListener]:
    """Yield a listener that answers each message with its double, and lists why it has refused peers in `refusals`."""
    refused: list[str] = []

    def serve(channel: Channel) -> None:
        while True:
            channel.send(2 * channel.receive())

    found = AuthenticatedListener(HERE, SECRET, serve, refused.append)
    found.refusals = refused
    yield found
    found.close()


def refusals(listener: AuthenticatedListener) -> list[str]:
    deadline = time.monotonic() + 60
    while not listener.refusals and time.monotonic() < deadline:
        time.sleep(0.01)
    return listener.refusals


def answers(listener: AuthenticatedListener) -> bool:
    channel = connect(listener.address, SECRET, seconds=5)
    channel.send("ab")
    return channel.receive() == "abab"


def raw(channel: Channel, data: bytes) -> None:
    channel._sock.sendall(data)


def frame(channel: Channel, data: bytes) -> bytes:
    """Return `data` as the next valid frame of a channel, without sending it."""
    mac = wire._mac(channel._send_key, wire._NUMBER.pack(channel._sent), data)
    return wire._HEAD.pack(len(data)) + mac + data


def test_peer_with_another_secret_is_refused_on_both_sides(listener):
    with pytest.raises((WireError, ConnectionError)):
        connect(listener.address, SECRET[::-1], seconds=5)
    assert "does not know the secret" in refusals(listener)[0]
    assert answers(listener)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64), bytes(100)])
def test_garbage_is_refused(listener, data):
    with socket.create_connection(listener.address) as sock:
        sock.sendall(data)
        assert "another protocol" in refusals(listener)[0]
    assert answers(listener)


def test_proof_of_one_side_does_not_authenticate_the_other(listener):
    """A peer without the secret sends the server's own random number and proof back, which the server must refuse."""
    with socket.create_connection(listener.address) as sock:
        greeting = sock.recv(len(wire.GREETING) + wire.NONCE_BYTES, socket.MSG_WAITALL)
        sock.sendall(greeting)
        sock.sendall(sock.recv(wire.MAC_BYTES, socket.MSG_WAITALL))
        assert "does not know the secret" in refusals(listener)[0]


FORGED = {
    "forged": lambda channel: raw(channel, frame(channel, b'"x"')[:-1] + b"y"),
    "repeated": lambda channel: [raw(channel, frame(channel, b'"x"')) for _ in range(2)],
    "reordered": lambda channel: [setattr(channel, "_sent", 1), raw(channel, frame(channel, b'"x"'))],
    "too long": lambda channel: raw(channel, wire._HEAD.pack(wire.MOST_FRAME_BYTES + 1) + bytes(100)),
}


@pytest.mark.parametrize("name", FORGED)
def test_frame_without_a_valid_mac_is_refused(listener, name):
    channel = connect(listener.address, SECRET, seconds=5)
    FORGED[name](channel)
    text = refusals(listener)[0]
    assert ("too long" if name == "too long" else "MAC") in text
    assert answers(listener)


def test_reflected_frame_is_refused():
    listener = AuthenticatedListener(HERE, SECRET, lambda channel: raw(channel, channel._sock.recv(1000)))
    channel = connect(listener.address, SECRET, seconds=5)
    channel.send("x")
    with pytest.raises(WireError, match="MAC"):
        channel.receive()


def test_rank_that_does_not_read_delays_no_one_and_gets_the_newest_state(tmp_path, monkeypatch):
    """The fast rank reads six states while the slow rank reads none.

    The slow rank then reads an old state, which its connection has buffered. The second or third state that it reads
    must be newer than the fast rank's last one, so the coordinator skips the states between for the slow rank.
    """
    state, numbers = Rounds.state, itertools.count()
    filler = "x" * 8_000_000  # more bytes than the kernel buffers for a connection

    def numbered(*args, **known):
        return state(*args, **known) | {"number": next(numbers), "filler": filler}

    monkeypatch.setattr(Rounds, "state", numbered)
    monkeypatch.setattr(coordinators, "PUSH_SECONDS", 0.01)
    monkeypatch.setattr(coordinators, "HEARTBEAT_SECONDS", 60.0)  # ranks without reports must not count as lost here
    coordinator = Coordinator(tmp_path, HERE, SECRET, say=lambda line: None)
    slow, fast = (connect(coordinator.address, SECRET, seconds=60) for _ in range(2))
    for name, channel in (("slow", slow), ("fast", fast)):
        channel.send(HELLO | {"group": name, "joined": False})
    received = [fast.receive()["number"] for _ in range(6)]
    late = [slow.receive()["number"] for _ in range(3)]
    assert received == sorted(received)
    assert late[0] < received[-1] < late[-1]
    coordinator.close()


def test_old_connection_of_a_rank_ends_after_its_new_one_began(tmp_path):
    coordinator = Coordinator(tmp_path, HERE, SECRET, say=lambda line: None)
    old, new = (connect(coordinator.address, SECRET, seconds=5) for _ in range(2))
    for channel in (old, new):
        channel.send(HELLO | {"joined": False})
        assert "commits" in channel.receive()
        assert "commits" not in channel.receive()  # the run still has the same version
    new.send(REPORT)
    old.close()
    deadline = time.monotonic() + 60
    while len(coordinator._channels) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    while new.receive()["live"] == 0:
        pass
    assert coordinator._rounds.groups["a"].deadline > time.monotonic() + BLIP_SECONDS
    coordinator.close()


def test_group_that_listens_on_all_addresses_announces_that_of_its_connection(tmp_path):
    secret = tmp_path / "run.secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    coordinator = Coordinator(tmp_path, HERE, SECRET, say=lambda line: None)
    given = {"diloco_listen": "0.0.0.0", "diloco_secret_file": str(secret)}
    flags = ElasticConfig(diloco_coordinator=str(coordinator.address), **given)
    agent = Agent(flags, HELLO, most_bytes=0, snapshot=lambda: ({}, b""), stopped=lambda: False, say=print)
    assert agent.wait(lambda state: state["live"], 60)
    assert coordinator._rounds.groups["a"].reports[0]["address"][0] == "127.0.0.1"
    agent.close()
    coordinator.close()


def test_peers_that_never_prove_the_secret_delay_others_only_for_the_handshake_limit(monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(wire, "MOST_HANDSHAKES", 2)
    listener = AuthenticatedListener(HERE, SECRET, print)
    others = threading.active_count()
    silent = [socket.create_connection(listener.address) for _ in range(5)]
    time.sleep(0.1)
    assert threading.active_count() - others <= 2
    deadline, channel = time.monotonic() + 60, None
    while channel is None:
        try:
            channel = connect(listener.address, SECRET, seconds=5)
        except OSError:
            assert time.monotonic() < deadline
    for sock in silent:
        sock.close()


def test_listener_survives_a_lack_of_open_files(listener):
    server = listener._server
    full = mock.Mock(accept=mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files")), fileno=server.fileno)
    listener._server = full
    with socket.create_connection(listener.address):  # ends a call of `accept` that has begun before
        deadline = time.monotonic() + 60
        while not full.accept.called and time.monotonic() < deadline:
            time.sleep(0.01)
    assert full.accept.called
    listener._server = server
    assert answers(listener)


def test_silent_peer_is_closed_after_the_handshake_limit(monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.2)
    refused = []
    listener = AuthenticatedListener(HERE, SECRET, lambda channel: None, refused.append)
    with socket.create_connection(listener.address) as sock:
        listener.refusals = refused
        assert "timed out" in refusals(listener)[0]
        assert sock.recv(1000)  # the server has sent its greeting, and then ends the connection
        assert sock.recv(1000) == b""


def test_bulk_data_must_match_its_digest_and_size():
    data = bytes(range(256)) * 100

    def serve(channel: Channel) -> None:
        request = channel.receive()
        channel.send({"bytes": len(data)})
        raw(channel, data if request == "good" else data[:-1] + b"x")
        channel.send(hashlib.sha256(data).hexdigest())
        channel.receive()

    listener = AuthenticatedListener(HERE, SECRET, serve)

    def fetch(request: str, most: int) -> bytes:
        channel = connect(listener.address, SECRET, seconds=5)
        channel.send(request)
        return bytes(channel.receive_data(most)[1])

    assert fetch("good", len(data)) == data
    with pytest.raises(WireError, match="damaged"):
        fetch("bad", len(data))
    with pytest.raises(WireError, match="at most 10 are expected"):
        fetch("good", 10)


def test_bulk_data_is_sent_in_parts_because_the_time_limit_holds_for_each_call():
    data, sent = bytes(3 * wire.PART_BYTES + 1), list[int]()

    def serve(channel: Channel) -> None:
        sock = channel._sock
        record = lambda part: (sent.append(len(part)), sock.sendall(part))  # noqa: E731
        channel._sock = mock.Mock(wraps=sock, sendall=record)
        channel.send_data({}, data)

    listener = AuthenticatedListener(HERE, SECRET, serve)
    channel = connect(listener.address, SECRET, seconds=60)
    assert channel.receive_data(len(data))[1] == data
    assert sent.count(wire.PART_BYTES) == 3
    assert max(sent) == wire.PART_BYTES


def test_secret_file_that_others_can_read_or_that_is_short_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text("x" * 44 + "\n")
    path.chmod(0o600)
    assert read_secret(str(path), "--secret-file") == b"x" * 44
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"--secret-file .*chmod 600"):
        read_secret(str(path), "--secret-file")
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ValueError, match="5 characters are too few"):
        read_secret(str(path), "--secret-file")
    with pytest.raises(ValueError, match="No such file"):
        read_secret(str(tmp_path / "none"), "--secret-file")
    with pytest.raises(ValueError, match=r"--listen host: HOST:PORT is expected"):
        parse_address("host", "--listen")


def test_superseded_journal_writes_no_further_term_and_loses_no_record(tmp_path):
    """Open a journal a second time, as a coordinator does that starts again; this begins the journal's next term.

    The first coordinator may then write no more records, and a third one must read all complete records of both terms.
    """
    old = Journal(tmp_path)
    old.append([{"n": 1}])
    new = Journal(tmp_path)
    assert new.records == [{"n": 1}]
    with pytest.raises(SupersededError, match="term 2"):
        old.append([{"n": 2}])
    new.append([{"n": 3}])
    with (tmp_path / "coordinator" / "journal-2.jsonl").open("a") as file:
        file.write('{"n": 4')  # a crash has cut this record short
    assert Journal(tmp_path).records == [{"n": 1}, {"n": 3}]


def test_restart_on_a_full_disk_names_the_journal_and_loses_no_record(tmp_path):
    records = [{"n": n, "text": "x" * 100} for n in range(300)]
    with small_disk(tmp_path / "disk", "64k") as disk:
        Journal(disk).append(records)
        with pytest.raises(ValueError, match=r"journal-2\.jsonl cannot be written: No space left on device; free"):
            Journal(disk)
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        assert Journal(disk).records == records


def test_rows_follow_a_cut_line_and_a_failed_write_names_the_file(tmp_path):
    rows = tmp_path / "rounds.jsonl"
    rows.write_text('{"version": 1, "merg')  # a full disk has cut this row
    coordinator = Coordinator(tmp_path, HERE, SECRET, say=lambda line: None)
    began, later = time.time(), time.time() + 7200
    with coordinator._changed:
        coordinator._rounds.news.rows.append({"version": 2})
        with mock.patch.object(coordinators.time, "time", return_value=later):  # the system's clock jumps by two hours
            coordinator._advance()
        row = json.loads(rows.read_text().splitlines()[1])
        assert row["version"] == 2
        assert abs(row["time"] - began) < 60
        rows.unlink()
        rows.mkdir()
        coordinator._rounds.news.rows.append({"version": 3})
    assert coordinator.ended.wait(60)
    assert re.search(r"rounds\.jsonl cannot be written: Is a directory; free .* start the coord", coordinator.why)


def test_address_of_another_machine_is_named_with_its_flag():
    with pytest.raises(
        ValueError, match=r"^--listen 192\.0\.2\.1:7 cannot be used: Cannot assign .*; give an address of"
    ):
        AuthenticatedListener(Address("192.0.2.1", 7), SECRET, print)


DAMAGES = {
    "cut": lambda first, second, third: [first, second[:-2] + "\n", third],
    "no object": lambda first, second, third: [first, "7\n", third],
    "no text": lambda first, second, third: [first, "\udcff\n", third],
    "digit": lambda first, second, third: [first, second.replace('"n": 2', '"n": 3'), third],
    "dropped": lambda first, second, third: [first, third],
    "repeated": lambda first, second, third: [first, first, second, third],
    "swapped": lambda first, second, third: [first, third, second],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_line_of_a_journal_is_named(tmp_path, damage):
    Journal(tmp_path).append([{"n": n} for n in (1, 2, 3)])
    (tmp_path / "coordinator" / "journal-old.jsonl").touch()  # a copy that a user has made is not read as a journal
    path = tmp_path / "coordinator" / "journal-1.jsonl"
    lines = DAMAGES[damage](*path.read_text().splitlines(keepends=True))
    path.write_text("".join(lines), errors="surrogateescape")
    with pytest.raises(DamagedError, match=r"line 2 of .*journal-1\.jsonl is damaged, .* restore this file"):
        Journal(tmp_path)
