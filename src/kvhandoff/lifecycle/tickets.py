# SPDX-License-Identifier: Apache-2.0
"""A consumer scheduler's tickets: which of its requests fetches what one ticket stands for.

Several requests can come with the same ticket: children of one request (n > 1), a client's retry
while the first attempt is still there, prompts of one batch. One of them pulls, and the others
wait for what it brings into the prefix cache. Whoever pulls is decided when a request is
admitted, not when it arrives, so that a request that ends early leaves the ticket to the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

from kvhandoff.ids import Ticket

MAX_SPENT = 16384


class Turn(Enum):
    """What a request can do about its ticket at the moment."""

    PULL = auto()
    WAIT = auto()  # somebody else pulls
    COMPUTE = auto()  # it has been read or released: there is nothing left to fetch


@dataclass
class _Party:
    waiting: dict[str, None] = field(default_factory=dict)
    puller: str | None = None


class Tickets:
    """Requests by ticket. A ticket that was read or released is never pulled again."""

    def __init__(self) -> None:
        self._parties: dict[Ticket, _Party] = {}
        self._spent: OrderedDict[Ticket, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parties)

    def join(self, ticket: Ticket, request: str) -> bool:
        """A request has come with this ticket. Whether that is the first one that still can use
        it."""
        if ticket in self._spent:
            return False
        party = self._parties.setdefault(ticket, _Party())
        party.waiting[request] = None
        return party.puller is None and len(party.waiting) == 1

    def turn(self, ticket: Ticket, request: str) -> Turn:
        """What this request can do now."""
        party = self._parties.get(ticket)
        if party is None or request not in party.waiting:
            return Turn.COMPUTE
        return Turn.PULL if party.puller is None else Turn.WAIT

    def pull(self, ticket: Ticket, request: str) -> None:
        """This request begins to pull."""
        party = self._parties[ticket]
        party.waiting.pop(request, None)
        party.puller = request

    def leave(self, ticket: Ticket, request: str) -> bool:
        """This request wants nothing (any more), or its pull has failed. Whether nobody is left who
        could use the ticket, so that it has to be released."""
        party = self._parties.get(ticket)
        if party is None:
            return False
        party.waiting.pop(request, None)
        if party.puller == request:
            party.puller = None
        if party.waiting or party.puller is not None:
            return False
        self._spend(ticket)
        return True

    def read(self, ticket: Ticket) -> None:
        """A pull ended well: what the ticket stood for is gone."""
        self._spend(ticket)

    def _spend(self, ticket: Ticket) -> None:
        self._parties.pop(ticket, None)
        self._spent[ticket] = None
        if len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)
