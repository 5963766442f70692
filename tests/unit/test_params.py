# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what a producer wrote is read, what a stranger wrote is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhandoff.errors import ProtocolError
from kvhandoff.ids import MAX_NAME_LENGTH, Endpoint, is_host
from kvhandoff.protocol.params import PARAMS_VERSION, HandoffParams, parse_params

GOOD: dict[str, Any] = {
    "remote_engine_id": "engine",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5555,
    "remote_num_tokens": 17,
    "remote_replicas": 2,
    "remote_lease": 30.0,
    "ticket": "0123456789abcdef" * 2,
}


def test_params_survive_json() -> None:
    """Routers carry them as JSON and may add keys of their own."""
    params = parse_params(GOOD)
    carried = json.loads(json.dumps(params.to_dict()))
    assert parse_params(carried | {"router_hint": [1]}) == params
    assert carried["do_remote_prefill"] is True
    assert carried["do_remote_decode"] is False
    assert carried["version"] == PARAMS_VERSION


def test_params_name_the_desk() -> None:
    """The parts that are used together come together."""
    params = parse_params(GOOD)
    assert params.endpoint == Endpoint("10.0.0.1", 5555)
    assert (params.engine, params.request) == ("engine", "cmpl-1")
    assert params.proof == GOOD["ticket"]


@pytest.mark.parametrize("key", GOOD)
def test_each_key_is_needed(key: str) -> None:
    """A missing one is named, with the advice to pass on everything."""
    with pytest.raises(ProtocolError, match=rf"`{key}`.*unchanged"):
        parse_params({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_engine_id", ""),
        ("remote_request_id", "r" * (MAX_NAME_LENGTH + 1)),
        ("remote_request_id", 7),
        ("remote_host", ""),
        ("remote_host", "h" * 254),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", "5555"),
        ("remote_port", True),
        ("remote_num_tokens", 0),
        ("remote_num_tokens", 17.5),
        ("remote_replicas", 0),
        ("remote_replicas", 1 << 40),
        ("remote_lease", 0),
        ("remote_lease", float("nan")),
        ("remote_lease", float("inf")),
        ("ticket", "0" * 31),
        ("ticket", "0" * 33),
        ("ticket", "G" * 32),
        ("ticket", "0" * 32 + "\n"),
        ("prompt_digest", "d" * 65),
        ("do_remote_prefill", 1),
        ("version", "1"),
    ],
)
def test_wrong_values_are_refused_by_key(key: str, value: object) -> None:
    """The refusal names the key."""
    with pytest.raises(ProtocolError, match=rf"\$\.{key}"):
        parse_params(GOOD | {key: value})


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_request_id", "prompt_digest"])
def test_text_that_cannot_be_sent_is_refused(key: str) -> None:
    """JSON can spell half of a surrogate pair, which no message can carry."""
    stranger = json.loads(json.dumps(GOOD | {key: "\ud800"}))
    with pytest.raises(ProtocolError, match="kv_transfer_params"):
        parse_params(stranger)


@pytest.mark.parametrize("version", [0, 2])
def test_other_versions_are_refused_with_both_numbers(version: int) -> None:
    """Versions of the parameters are told apart before anybody connects."""
    with pytest.raises(ProtocolError, match=rf"version {version}, expected {PARAMS_VERSION}"):
        parse_params(GOOD | {"version": version})


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "node-3.cluster.local", "a_b", "::1", "fe80::1%eth0", "2001:db8::7"]
)
def test_hosts_that_can_be_connected_to(host: str) -> None:
    """Names, IPv4 and IPv6 addresses, with a zone where there is one."""
    assert is_host(host)
    assert parse_params(GOOD | {"remote_host": host}).endpoint.host == host


@pytest.mark.parametrize(
    "host", ["a b", "host:80", "tcp://host", "*", "host\n", "[::1]", "a/b", "ipc:///tmp/x", "@x"]
)
def test_hosts_that_are_something_else_are_refused(host: str) -> None:
    """A host never smuggles a port, another ZMQ transport or a path in."""
    assert not is_host(host)
    with pytest.raises(ProtocolError, match="not a host name or address"):
        parse_params(GOOD | {"remote_host": host})


def test_params_hold_no_addresses_or_blocks() -> None:
    """They pass through clients: the fields are these, and a change here is thought about."""
    assert set(HandoffParams.__struct_fields__) == set(GOOD) | {
        "prompt_digest", "version", "do_remote_prefill", "do_remote_decode", "mac",
    }  # fmt: skip
