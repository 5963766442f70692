# SPDX-License-Identifier: Apache-2.0
"""Policies by which a consumer chooses the replica of a request, once for all of its ranks."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

from kvhandoff.ids import EngineId
from kvhandoff.plan.routing import replica_for_request

Policy: TypeAlias = Literal["request", "least-loaded", "stripe"]


class ReplicaChooser:
    """Chooses among PCP replicas.

    ``request`` and ``stripe`` follow the producer's request id (with ``stripe`` that replica is
    merely the first of those that are read). ``least-loaded`` takes the replica with the fewest
    tokens that *this* consumer is reading, the request id deciding between equals.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._tokens: Counter[tuple[EngineId, int]] = Counter()

    def __len__(self) -> int:
        return len(self._tokens)

    def choose(self, engine: EngineId, request_id: str, replicas: int, tokens: int) -> int:
        """The replica to read; its load grows by ``tokens`` until :meth:`done`."""
        first = replica_for_request(request_id, replicas)
        if self._policy != "least-loaded":
            return first
        order = [(first + offset) % replicas for offset in range(replicas)]
        chosen = min(order, key=lambda replica: self._tokens[engine, replica])
        self._tokens[engine, chosen] += tokens
        return chosen

    def done(self, engine: EngineId, replica: int, tokens: int) -> None:
        """The request chosen for has been read, or has failed."""
        if self._policy == "least-loaded":
            self._tokens[engine, replica] -= tokens
            if self._tokens[engine, replica] <= 0:
                del self._tokens[engine, replica]
