# SPDX-License-Identifier: Apache-2.0
"""Whom a decode engine believes: whose parameters it follows, and which hosts it reads from.

With a shared key, parameters are signed and the control channel is authenticated. Without one, a
list of hosts bounds what whoever writes parameters can make a decode engine do. With neither,
everybody who reaches its HTTP port is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from kvhandoff.errors import ProtocolError, UnsupportedSetup
from kvhandoff.ids import is_host
from kvhandoff.protocol.catalog import Catalog
from kvhandoff.protocol.params import HandoffParams

KEY_VARIABLE = "KVHANDOFF_SHARED_KEY"
"""The environment variable that stands for ``shared_key``, which vLLM prints into its log with the
rest of its configuration."""

MIN_KEY_LENGTH = 16

_SESSION = re.compile(r"(\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):\d{1,5}(:[A-Za-z0-9_]{1,32})?")


class Trust:
    """What an engine's settings say about its peers.

    Args:
        key: the shared key; empty for none.
        hosts: names, addresses and networks (``10.1.0.0/16``) of prefill engines; none allows all.

    Raises:
        UnsupportedSetup: for a key that can be guessed, or a host that is none.
    """

    def __init__(self, key: str = "", hosts: Iterable[str] = ()) -> None:
        if key and len(key) < MIN_KEY_LENGTH:
            raise UnsupportedSetup.because(
                "the shared_key is too short",
                found=f"{len(key)} characters",
                expected=f"at least {MIN_KEY_LENGTH}",
                change="use a random one, such as that of: openssl rand -hex 32",
            )
        self.key: bytes | None = key.encode() or None
        self._names: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for host in hosts:
            self._add(host)

    def _add(self, host: str) -> None:
        try:
            self._networks.append(ip_network(host, strict=False))
        except ValueError:
            if not is_host(host):
                raise UnsupportedSetup.because(
                    "prefill_hosts has an entry that is no host",
                    found=repr(host),
                    expected="a host name, an address or a network such as 10.1.0.0/16",
                    change="correct prefill_hosts",
                ) from None
            self._names.add(host.lower())

    @property
    def is_open(self) -> bool:
        """Whether everybody is believed."""
        return self.key is None and not self._has_hosts

    @property
    def _has_hosts(self) -> bool:
        return bool(self._names or self._networks)

    def _allows(self, host: str) -> bool:
        if not self._has_hosts or host.lower() in self._names:
            return True
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def check_params(self, params: HandoffParams) -> None:
        """Refuse parameters that nobody vouches for.

        Raises:
            ProtocolError: saying what is missing, and which setting decides about it.
        """
        if self.key is not None and not params.is_signed(self.key):
            raise ProtocolError(
                "its kv_transfer_params are not signed with this engine's shared_key"
                if params.mac
                else "its kv_transfer_params are not signed; set the same shared_key on the "
                "prefill engine"
            )
        if not self._allows(params.remote_host):
            raise ProtocolError(
                f"its kv_transfer_params name {params.remote_host}, which is not among "
                "prefill_hosts"
            )

    def check_catalog(self, catalog: Catalog) -> None:
        """Refuse a catalog that sends its readers to places which are not allowed.

        Raises:
            ProtocolError: naming the place.
        """
        for worker in catalog.workers:
            place = _SESSION.fullmatch(worker.session)
            if place is None:
                raise ProtocolError(f"{worker.session!r} is not the address of a transfer engine")
            host = place["v6"] or place["host"]
            if not self._allows(host):
                raise ProtocolError(
                    f"the catalog of {catalog.engine} leads to {host}, which is not among "
                    "prefill_hosts"
                )
