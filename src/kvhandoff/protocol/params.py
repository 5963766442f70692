# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what a router carries from a producer's answer to a consumer's request.

They pass through clients, so they are small, carry no block ids or addresses of memory, and are
checked like anything else that a stranger may have written. vLLM's core reads
``do_remote_prefill`` itself; routers copy the dict unchanged.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from kvhandoff.errors import ProtocolError
from kvhandoff.ids import MAX_NAME_LENGTH, Endpoint, EngineId, RequestId, Ticket, is_host
from kvhandoff.model.topology import MAX_PARALLEL_SIZE

PARAMS_VERSION = 1

_TEXT = r"^[^\ud800-\udfff]*\Z"
"""No lone surrogates: JSON can spell them, but no message and no hash can carry them."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH, pattern=_TEXT)]


class HandoffParams(msgspec.Struct, frozen=True):
    """A producer's promise: "I hold this request, ask me there".

    Attributes:
        remote_num_tokens: tokens with KV, from the start of the prompt.
        remote_replicas: complete copies to choose from.
        remote_lease: seconds for which the request is held without hearing from a consumer.
        prompt_digest: digest of the prompt that was prefilled; a consumer whose own prompt has
            another one computes locally. Empty where a prompt has no tokens (embeddings).
        mac: proves that an engine with the shared key wrote all the rest; empty without a key.
    """

    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    remote_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARALLEL_SIZE)]
    remote_lease: Annotated[float, msgspec.Meta(ge=0.1, le=86400)]
    ticket: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    prompt_digest: Annotated[str, msgspec.Meta(max_length=64, pattern=_TEXT)] = ""
    version: int = PARAMS_VERSION
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    mac: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""

    @property
    def endpoint(self) -> Endpoint:
        """The desk to ask."""
        return Endpoint(self.remote_host, self.remote_port)

    @property
    def engine(self) -> EngineId:
        """The producer engine's id."""
        return EngineId(self.remote_engine_id)

    @property
    def request(self) -> RequestId:
        """The request's id on the producer."""
        return RequestId(self.remote_request_id)

    @property
    def proof(self) -> Ticket:
        """The ticket."""
        return Ticket(self.ticket)

    def signed(self, key: bytes) -> HandoffParams:
        """The same, with the proof that somebody who has the shared key wrote it."""
        return msgspec.structs.replace(self, mac=self._mac(key))

    def is_signed(self, key: bytes) -> bool:
        """Whether somebody who has the shared key wrote this."""
        return hmac.compare_digest(self.mac, self._mac(key))

    def _mac(self, key: bytes) -> str:
        content = msgspec.msgpack.encode(msgspec.structs.replace(self, mac=""))
        derived = blake2b(key, digest_size=32, person=b"kvh:params").digest()
        return blake2b(content, digest_size=16, key=derived).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """As the producer returns them."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


def parse_params(params: Mapping[str, Any]) -> HandoffParams:
    """Check what came with a consumer's request; unknown keys (a router's own) are left alone.

    Raises:
        ProtocolError: naming the key that is missing or wrong.
    """
    try:
        parsed = msgspec.convert(dict(params), HandoffParams, strict=True)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"kv_transfer_params cannot be used: {error}; pass on what the prefill engine "
            "returned, unchanged"
        ) from None
    if parsed.version != PARAMS_VERSION:
        raise ProtocolError(
            f"kv_transfer_params of version {parsed.version}, expected {PARAMS_VERSION}; "
            "run the same kvhandoff minor version on prefill and decode engines"
        )
    if not is_host(parsed.remote_host):
        raise ProtocolError(f"remote_host {parsed.remote_host!r} is not a host name or address")
    return parsed
