# SPDX-License-Identifier: Apache-2.0
"""Settings under ``kv_connector_extra_config``, checked when an engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.plan.replicas import Policy

_Positive = Annotated[float, msgspec.Meta(gt=0, le=86400)]
_Bytes = Annotated[int, msgspec.Meta(ge=4096, le=1 << 40)]
_Pieces = Annotated[int, msgspec.Meta(ge=64, le=65536)]

FOREIGN_KEYS = frozenset({"prefill", "decode", "use_ascend_direct"})
"""Keys that configurations written for vllm-ascend's connectors carry; both sides tell each other
those sizes here, so the keys are accepted and not used."""


class HandoffConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings, with their defaults; times in seconds, sizes in bytes.

    Attributes:
        mooncake_protocol: Mooncake TransferEngine protocol: ``tcp``, ``rdma``, ``ascend``, ...
        device_name: network devices for the TransferEngine, e.g. ``mlx5_0,mlx5_1``; empty: all.
        bind_host: address the desk listens on; default: the advertised one.
        advertise_host: address that others reach this host by; default: ``VLLM_HOST_IP``, else
            the address of the default route.
        lease: how long a producer keeps a request without hearing from a consumer.
        first_lease: how long it keeps one that no consumer has been heard of about.
        max_hold: how long it does so at the longest, renewals or not.
        sibling_grace: how long a producer keeps what a data-parallel consumer has read, for
            siblings of the request on other engines of it.
        replica_policy: how a consumer chooses the PCP replica. ``request``: by request id;
            ``least-loaded``: the one it is reading the fewest tokens from; ``stripe``: it reads
            from all of them, and from all TP copies, at the same time.
        stripe_min_bytes: a read is striped over as many holders as get this much each.
        slice_bytes: larger reads are cut into slices of this size.
        pieces_in_flight: runs of memory that a consumer worker asks of one peer at a time.
        bytes_in_flight: bytes, likewise.
        stall_after: a peer that has sent nothing for so long gets no new reads.
        cut_after: a peer that has sent nothing for so long has its reads cut off.
        shared_key: known to prefill and decode engines only; authenticates and encrypts the control
            channel and signs what passes through routers and clients.
        prefill_hosts: hosts (names, addresses, networks) that a consumer takes KV from; none: any.
        handshake_timeout: for the first contact with a producer.
        answer_timeout: for each later question to a desk.
    """

    mooncake_protocol: str = "tcp"
    device_name: str = ""
    bind_host: str = ""
    advertise_host: str = ""
    lease: Annotated[float, msgspec.Meta(ge=0.1, le=86400)] = 30.0
    first_lease: _Positive = 8.0
    max_hold: _Positive = 900.0
    sibling_grace: Annotated[float, msgspec.Meta(ge=0, le=60)] = 1.0
    replica_policy: Policy = "request"
    stripe_min_bytes: _Bytes = 1 << 20
    slice_bytes: _Bytes = 64 << 20
    pieces_in_flight: _Pieces = 512
    bytes_in_flight: _Bytes = 64 << 20
    stall_after: _Positive = 5.0
    cut_after: _Positive = 60.0
    shared_key: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    prefill_hosts: Annotated[tuple[str, ...], msgspec.Meta(max_length=4096)] = ()
    handshake_timeout: _Positive = 5.0
    answer_timeout: _Positive = 5.0


def parse_config(extra: Mapping[str, Any] | None) -> HandoffConfig:
    """Settings from ``kv_connector_extra_config``.

    Raises:
        UnsupportedSetup: naming the key, what was expected and the keys that exist.
    """
    wanted = {key: value for key, value in (extra or {}).items() if key not in FOREIGN_KEYS}
    try:
        return msgspec.convert(wanted, HandoffConfig, strict=True)
    except msgspec.ValidationError as error:
        raise UnsupportedSetup(
            f"kv_connector_extra_config: {error}; settings are "
            f"{', '.join(HandoffConfig.__struct_fields__)}"
        ) from None
