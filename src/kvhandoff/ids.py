# SPDX-License-Identifier: Apache-2.0
"""Names of things that cross a process border, and the limits on them."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple, NewType

EngineId = NewType("EngineId", str)
"""vLLM's ``engine_id``: one data-parallel rank of a deployment. May survive a restart."""

Incarnation = NewType("Incarnation", str)
"""One life of an engine's process group; never reused, so it never survives a restart."""

RequestId = NewType("RequestId", str)
"""A request's internal id on the producer. Consumers have ids of their own."""

Ticket = NewType("Ticket", str)
"""128 random bits (hex) that prove that a consumer was sent by the producer's answer."""

PullId = NewType("PullId", str)
"""One consumer request's attempt to read; all ranks of that consumer share it."""

Rank = NewType("Rank", int)
"""Worker index within an engine: ``(pp * PCP + pcp) * TP + tp``."""

MAX_NAME_LENGTH = 512


def short_name(request: str) -> RequestId:
    """A name that fits into messages: the id itself, or of a longer one (clients may choose theirs)
    its beginning and a digest."""
    if len(request) <= MAX_NAME_LENGTH:
        return RequestId(request)
    digest = blake2b(request.encode(errors="replace"), digest_size=16).hexdigest()
    return RequestId(f"{request[: MAX_NAME_LENGTH // 2]}~{digest}")


MAX_READERS = 4096


class Reader(NamedTuple):
    """A consumer worker that reads a held request: number ``number`` of ``of``."""

    number: int
    of: int


class Endpoint(NamedTuple):
    """Where a desk listens. ``str()`` gives a URL-style authority, with brackets for IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The ZMQ address."""
        return f"tcp://{self}"


_HOST = re.compile(r"[A-Za-z0-9_.\-]{1,253}|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.\-]{1,32})?")


def is_host(text: str) -> bool:
    """Whether ``text`` can be a host name or an IP address (it is never resolved here)."""
    return _HOST.fullmatch(text) is not None
