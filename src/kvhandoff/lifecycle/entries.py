# SPDX-License-Identifier: Apache-2.0
"""What the ledger's books consist of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kvhandoff.ids import PullId, RequestId, Ticket
from kvhandoff.protocol.messages import Open, PullReport, Release

Outcome: TypeAlias = Literal["completed", "failed", "released", "unclaimed", "expired"]
ReplyTo: TypeAlias = Any
"""Opaque to the ledger: whatever the desk needs to find the asker again."""


@dataclass(frozen=True)
class Holding:
    """A request as the scheduler hands it over.

    Attributes:
        blocks: block ids by KV group and by position in the request.
        tokens: tokens with KV, from position 0.
        finishes: what the engine itself calls the request, which need not fit into messages.
    """

    request: RequestId
    ticket: Ticket
    blocks: tuple[list[int], ...]
    tokens: int
    finishes: str = ""


@dataclass
class Announced:
    parked: list[tuple[Open | Release, ReplyTo]] = field(default_factory=list)
    claimed: bool = False


@dataclass
class PullEntry:
    of: int
    opened: set[int] = field(default_factory=set)
    reports: dict[int, PullReport] = field(default_factory=dict)
    failed: bool = False
    over: bool = False

    @property
    def finished(self) -> bool:
        return self.over or len(self.reports) == self.of


@dataclass
class Held:
    holding: Holding
    since: float
    deadline: float
    claimed: bool = False
    ended: Literal["completed", "failed"] | None = None  # while it lingers
    first_open: float | None = None
    pulls: dict[PullId, PullEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class Tombstone:
    ticket: Ticket
    outcome: Outcome
    completed: frozenset[tuple[PullId, int]]
