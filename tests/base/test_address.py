"""Test the parsing of TCP addresses with IPv4, IPv6 and host names, and listening at them."""

import socket

import pytest
from helpers.refusals import not_refused

from megazpp.base.address import Address, is_loopback, listen, parse_address, parse_host, parse_port, store_address

ADDRESSES = {
    "10.8.0.1:29700": ("10.8.0.1", 29700),
    "alpha:1": ("alpha", 1),
    "[::1]:29700": ("::1", 29700),
    "[fd00::a]:65535": ("fd00::a", 65535),
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_address_is_parsed_and_printed_as_it_was_written(text):
    found = parse_address(text, "--listen")
    assert found == ADDRESSES[text]
    assert str(found) == text


def test_program_that_listens_may_ask_for_a_free_port():
    assert parse_address("127.0.0.1:0", "--listen", any_port=True) == ("127.0.0.1", 0)


REFUSED = [
    ("address", "host", "--flag host: HOST:PORT is expected"),
    ("address", "[::1]", "--flag [::1]: HOST:PORT is expected"),
    ("address", ":7", "--flag :7: HOST:PORT is expected"),
    ("address", "::1:29700", "with an IPv6 address in brackets"),
    ("address", "[host]:7:8", "is not the name or the IP address of a host"),
    ("address", "alpha:65536", "--flag alpha:65536: the port 65536 is not a TCP port: give a number from 1 to 65535"),
    ("address", "alpha:x", "the port x is not a TCP port"),
    ("host", "alpha:29500", "--flag alpha:29500 is not the name or the IP address of a host"),
    ("host", "[fd00::1]:29500", "--flag [fd00::1]:29500 is not the name"),
    ("host", "http://alpha", "--flag http://alpha is not the name"),
    ("host", "", "is not the name or the IP address of a host"),
    ("address", "alpha:0", "--flag alpha:0: the port 0 is not a TCP port: give a number from 1 to 65535"),
    ("port", "0", "--flag 0 is not a TCP port"),
    ("port", "-1", "--flag -1 is not a TCP port"),
    ("port", "\u00b2", "is not a TCP port"),
]


def test_text_that_is_no_address_is_refused_with_the_flag():
    parsers = {"address": parse_address, "host": parse_host, "port": parse_port}
    assert not_refused(REFUSED, lambda kind, text: parsers[kind](text, "--flag")) == []


def test_host_loses_the_brackets_of_an_ipv6_address():
    assert [parse_host(text, "--flag") for text in ("[fd00::1]", "fd00::1", "alpha", "10.0.0.1")] == [
        "fd00::1",
        "fd00::1",
        "alpha",
        "10.0.0.1",
    ]


def test_loopback_addresses_of_both_protocols_are_known():
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "fd00::1", "alpha", "")))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_socket_listens_at_an_address_of_either_protocol(host):
    try:
        server = listen(Address(host, 0))
    except OSError:
        if host == "127.0.0.1":
            raise
        pytest.skip("this machine has no IPv6")
    with server, socket.create_connection(server.getsockname()[:2], 5):
        assert server.getsockname()[0] == host


def test_address_of_the_store_is_shown_with_brackets_for_ipv6():
    assert store_address({"MASTER_ADDR": "fd00::1", "MASTER_PORT": "7"}) == "[fd00::1]:7"
    assert store_address({"MASTER_ADDR": "alpha"}) == "alpha:?"
