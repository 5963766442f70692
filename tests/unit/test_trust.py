# SPDX-License-Identifier: Apache-2.0
"""Whom a decode engine believes: signed parameters, and hosts that are allowed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvhandoff.errors import ProtocolError, UnsupportedSetup
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.model.topology import Coordinate, ParallelSizes
from kvhandoff.protocol.catalog import Catalog, Fingerprint
from kvhandoff.protocol.params import HandoffParams, parse_params
from kvhandoff.protocol.trust import Trust
from tests.unit.test_params import GOOD

KEY = "a key that both sides know"
OTHER = "a key that is another one"
SIGNED = parse_params(GOOD | {"prompt_digest": "d"}).signed(KEY.encode())


def test_what_an_engine_has_signed_is_believed() -> None:
    """After it went through a router as JSON."""
    carried = parse_params(json.loads(json.dumps(SIGNED.to_dict())))
    Trust(KEY).check_params(carried)
    Trust("").check_params(carried)


CHANGES: dict[str, Any] = {
    "remote_engine_id": "another", "remote_request_id": "cmpl-2", "remote_host": "10.0.0.2",
    "remote_port": 5556, "remote_num_tokens": 16, "remote_replicas": 1, "remote_lease": 31.0,
    "ticket": "f" * 32, "prompt_digest": "e", "do_remote_prefill": False,
    "do_remote_decode": True, "version": 2, "mac": "0" * 32,
}  # fmt: skip


@pytest.mark.parametrize("field", HandoffParams.__struct_fields__)
def test_a_change_in_any_field_is_noticed(field: str) -> None:
    """There is no field that a client could turn to its own use."""
    changed = msgspec.structs.replace(SIGNED, **{field: CHANGES[field]})
    with pytest.raises(ProtocolError, match="not signed with this engine's shared_key"):
        Trust(KEY).check_params(changed)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (parse_params(GOOD), "are not signed; set the same shared_key on the prefill engine"),
        (parse_params(GOOD).signed(OTHER.encode()), "not signed with this engine's shared_key"),
    ],
)
def test_what_others_have_written_is_not_believed(params: HandoffParams, told: str) -> None:
    """The message tells a missing key from another one."""
    with pytest.raises(ProtocolError, match=told):
        Trust(KEY).check_params(params)


@pytest.mark.parametrize(
    ("hosts", "host", "allowed"),
    [
        ((), "anything", True),
        (("p1",), "P1", True),
        (("p1",), "p2", False),
        (("p1", "10.0.0.0/24"), "10.0.0.77", True),
        (("p1", "10.0.0.0/24"), "10.0.1.77", False),
        (("10.0.0.1",), "10.0.0.1", True),
        (("10.0.0.1",), "10.0.0.1.example.org", False),
        (("fd00::/8",), "fd12::1", True),
        (("fd00::/8",), "fe80::1%eth0", False),
        (("fe80::/10",), "fe80::1%eth0", True),
        (("10.0.0.0/24",), "fd12::1", False),
    ],
)
def test_hosts_are_names_addresses_and_networks(
    hosts: tuple[str, ...], host: str, allowed: bool
) -> None:
    """For the desk that parameters name, and for the workers that its catalog leads to."""
    trust = Trust("", hosts)
    params = parse_params(GOOD | {"remote_host": host})
    session = f"[{host}]:1" if ":" in host else f"{host}:15000"
    if allowed:
        trust.check_params(params)
        trust.check_catalog(catalog(session))
    else:
        with pytest.raises(ProtocolError, match="not among prefill_hosts"):
            trust.check_params(params)
        with pytest.raises(ProtocolError, match="not among prefill_hosts"):
            trust.check_catalog(catalog(session))


def catalog(session: str) -> Catalog:
    workers = (WorkerLayout(Coordinate(0, 0, 0), session, (), ()),)
    fingerprint = Fingerprint("m", "m", "w", "d", "c", "l")
    return Catalog("p", "life", fingerprint, ParallelSizes(), 30.0, workers)


@pytest.mark.parametrize("session", ["", "host", "host:", "host:port", "host:1:npu_1", "a:1 "])
def test_a_session_is_an_address(session: str) -> None:
    """The transfer engine parses it; nothing but host and port (and an NPU) gets that far."""
    if session == "host:1:npu_1":
        Trust().check_catalog(catalog(session))
        return
    with pytest.raises(ProtocolError, match="not the address of a transfer engine"):
        Trust().check_catalog(catalog(session))


@pytest.mark.parametrize(
    ("key", "hosts", "told"),
    [
        ("short", (), "found 5 characters, expected at least 16"),
        (KEY, ("10.0.0.0/33",), "'10.0.0.0/33', expected a host name"),
        (KEY, ("a host",), "correct prefill_hosts"),
    ],
)
def test_bad_settings_are_refused(key: str, hosts: tuple[str, ...], told: str) -> None:
    """At start, by setting."""
    with pytest.raises(UnsupportedSetup, match=told):
        Trust(key, hosts)


@pytest.mark.parametrize(
    ("trust", "is_open"),
    [
        (Trust(), True),
        (Trust(KEY), False),
        (Trust("", ("p1",)), False),
        (Trust(KEY, ("p1",)), False),
    ],
)
def test_an_engine_that_believes_everybody_says_so(trust: Trust, is_open: bool) -> None:
    """It is warned about at start."""
    assert trust.is_open is is_open
