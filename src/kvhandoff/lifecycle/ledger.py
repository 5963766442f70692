# SPDX-License-Identifier: Apache-2.0
"""The desk's books: which requests the engine holds, who reads them, and when they are let go.

A request's life::

    announced --hold--> held --every reader completed--> completed
        |                |-----every read failed-------> failed
        |                |-----consumer released-------> released
        |                |-----nobody was heard of-----> unclaimed
        |                |-----lease ran out-----------> expired
        '--drop--> (forgotten)

Leaving *held* is the only thing that frees, and it happens once. What was let go leaves a
tombstone, so that late or repeated messages get a true answer: a reader that completed in time
hears ``held`` however often it asks, everybody else hears how the request ended. That is the
fence: a reader that hears ``held`` knows that the blocks were not given away before its reads
had ended.
"""

from __future__ import annotations

import hmac
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvhandoff.ids import Incarnation, PullId, RequestId
from kvhandoff.lifecycle.entries import (
    Announced,
    Held,
    Holding,
    Outcome,
    PullEntry,
    ReplyTo,
    Tombstone,
)
from kvhandoff.protocol.messages import (
    Answer,
    Complete,
    Completed,
    Done,
    HeldKey,
    Open,
    Opened,
    PullRecord,
    Refused,
    Release,
    Renew,
    Renewed,
    Verdict,
)

MAX_TOMBSTONES = 16384
MAX_PULLS = 64
MAX_PARKED = 65536
MAX_RECENT = 256

_TIMED_OUT = ("unclaimed", "expired")


@dataclass(frozen=True)
class Reply:
    """Effect: send an answer. Each message leads to exactly one of these, now or later."""

    to: ReplyTo
    answer: Answer


@dataclass(frozen=True)
class Free:
    """Effect: tell vLLM that the request's blocks may go."""

    request: RequestId
    outcome: Outcome


Effect: TypeAlias = Reply | Free


class Ledger:
    """Books of one engine. Every method takes events in and gives effects out.

    Args:
        lease: seconds that a request is kept after anything was heard about it.
        first_lease: seconds that it is kept until then. Not every request is asked for: of one
            with several prompts or answers (n > 1), vLLM hands out the parameters of one only, and
            a client may leave before its router has asked a consumer.
        max_hold: seconds that it is kept at most.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        lease: float,
        max_hold: float,
        first_lease: float | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._lease = lease
        self._first_lease = lease if first_lease is None else min(first_lease, lease)
        self._max_hold = max_hold
        self._announced: dict[RequestId, Announced] = {}
        self._held: dict[RequestId, Held] = {}
        self._tombstones: OrderedDict[RequestId, Tombstone] = OrderedDict()
        self._parked = 0
        self._earliest: float | None = None
        self.counters: Counter[str] = Counter()
        self.recent: deque[PullRecord] = deque(maxlen=MAX_RECENT)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def announced(self) -> int:
        """Requests that are being prefilled."""
        return len(self._announced)

    # ---- events from the engine's scheduler ----

    def announce(self, requests: Iterable[RequestId]) -> list[Effect]:
        """Requests are being prefilled; consumers may ask for them soon."""
        for request in requests:
            if request not in self._held:
                self._announced.setdefault(request, Announced())
        return []

    def hold(self, holding: Holding, now: float) -> list[Effect]:
        """Prefill ended and the engine keeps the blocks until :class:`Free`."""
        announced = self._announced.pop(holding.request, Announced())
        self._parked -= len(announced.parked)
        held = Held(holding, now, now + min(self._first_lease, self._max_hold))
        self._held[holding.request] = held
        if announced.claimed:
            self._extend(held, now)
        self._set_deadline(held, held.deadline)
        self.counters["held"] += 1
        return [
            effect
            for message, to in announced.parked
            for effect in (
                self.open(message, to, now)
                if isinstance(message, Open)
                else self.release(message, to, now)
            )
        ]

    def drop(self, requests: Iterable[RequestId]) -> list[Effect]:
        """Announced requests ended without anything to hold (aborted, failed)."""
        effects: list[Effect] = []
        for request in requests:
            parked = self._announced.pop(request, Announced()).parked
            self._parked -= len(parked)
            ended = Refused("unknown", f"request {request} ended on the prefill engine")
            effects += [
                Reply(to, ended if isinstance(message, Open) else Done()) for message, to in parked
            ]
        return effects

    def reset(self, now: float) -> list[Effect]:
        """Let go of everything: what is held is of no use any more, whoever is reading it."""
        return [self._let_go(held, "released", now) for held in list(self._held.values())]

    def expire(self, now: float) -> list[Effect]:
        """Let go of requests whose lease has run out."""
        if self._earliest is None or now < self._earliest:
            return []
        late = [held for held in self._held.values() if held.deadline <= now]
        waiting = (held.deadline for held in self._held.values() if held.deadline > now)
        self._earliest = min(waiting, default=None)
        return [
            self._let_go(held, held.ended or ("expired" if held.claimed else "unclaimed"), now)
            for held in late
        ]

    def next_deadline(self) -> float | None:
        """When :meth:`expire` may have something to do. A little early where leases were extended
        since: deadlines are looked through once in a while, not at every message."""
        return self._earliest if self._held else None

    # ---- events from consumers ----

    def open(self, message: Open, to: ReplyTo, now: float) -> list[Effect]:
        """A reader asks for block ids. Asked too early, it is answered when prefill has ended."""
        request = RequestId(message.key.request)
        if request in self._announced:
            return self._park(message, to)
        found = self._find(message.key)
        if not isinstance(found, Held):
            return [self._refuse(to, found, _WHY[found].format(request=request))]
        problem = self._name_reader(found, message)
        if problem:
            return [self._refuse(to, "reader", problem)]
        found.ended = None
        self._extend(found, now)
        if found.first_open is None:
            found.first_open = now
        holding = found.holding
        return [Reply(to, Opened(self._incarnation, holding.blocks, holding.tokens, self._lease))]

    def renew(self, message: Renew, to: ReplyTo, now: float) -> list[Effect]:
        """Consumers still wait for these requests."""
        verdicts: list[Verdict] = []
        for key in message.keys:
            found = self._find(key)
            if isinstance(found, Held):
                self._extend(found, now)
                verdicts.append("held")
            elif (announced := self._announced.get(RequestId(key.request))) is not None:
                announced.claimed = True
                verdicts.append("held")
            else:
                verdicts.append(found if found in ("expired", "released") else "unknown")
        return [Reply(to, Renewed(verdicts))]

    def complete(self, message: Complete, to: ReplyTo, now: float) -> list[Effect]:
        """A reader's reads have ended. ``held`` means that all it read was still the request's."""
        found = self._find(message.key)
        pull_id = PullId(message.pull)
        if not isinstance(found, Held):
            return [Reply(to, Completed(self._verdict_after(message, found)))]
        pull = found.pulls.get(pull_id)
        if pull is None or message.index not in pull.opened:
            self.counters["unknown"] += 1
            return [Reply(to, Completed("unknown"))]
        pull.reports.setdefault(message.index, message.report)
        pull.failed |= not message.ok
        self._extend(found, now)
        effects: list[Effect] = [Reply(to, Completed("held"))]
        if all(each.finished for each in found.pulls.values()):
            failed = all(each.failed for each in found.pulls.values())
            found.ended = "failed" if failed else "completed"
            if message.linger == 0:
                effects.append(self._let_go(found, found.ended, now))
            else:
                self._set_deadline(found, now + min(message.linger, self._lease))
        return effects

    def release(self, message: Release, to: ReplyTo, now: float) -> list[Effect]:
        """A consumer does not read (any more). Pulls of other consumers are left alone.

        The consumer can be faster than this engine's next step: what it has in its prefix cache it
        releases as soon as it hears of the request. That waits for the hold, too.
        """
        if RequestId(message.key.request) in self._announced:
            return self._park(message, to)
        found = self._find(message.key)
        effects: list[Effect] = [Reply(to, Done())]
        if isinstance(found, Held):
            pull = found.pulls.get(PullId(message.pull))
            if pull is not None:
                pull.over = True
            if all(each.finished for each in found.pulls.values()):
                effects.append(self._let_go(found, "released", now))
        return effects

    # ---- inside ----

    def _park(self, message: Open | Release, to: ReplyTo) -> list[Effect]:
        """Keep a message about an announced request until prefill has ended."""
        if self._parked >= MAX_PARKED:
            return [self._refuse(to, "not-ready", f"{self._parked} messages are waiting")]
        self._announced[RequestId(message.key.request)].parked.append((message, to))
        self._parked += 1
        return []

    def _find(self, key: HeldKey) -> Held | Literal["unknown", "ticket", "expired", "released"]:
        """The held request, or why it cannot be had. Completed ones are called "released"."""
        request = RequestId(key.request)
        held = self._held.get(request)
        if held is not None:
            return held if _same(held.holding.ticket, key.ticket) else "ticket"
        tombstone = self._tombstones.get(request)
        if tombstone is None:
            return "unknown"
        if not _same(tombstone.ticket, key.ticket):
            return "ticket"
        return "expired" if tombstone.outcome in _TIMED_OUT else "released"

    def _verdict_after(self, message: Complete, why: str) -> Verdict:
        """The answer to a completion that finds nothing held."""
        tombstone = self._tombstones.get(RequestId(message.key.request))
        if why in ("expired", "released") and tombstone is not None:
            if (PullId(message.pull), message.index) in tombstone.completed:
                return "held"  # its first completion came in time; the answer was lost
            self.counters["late"] += 1
            return "expired" if why == "expired" else "released"
        self.counters["unknown"] += 1
        return "unknown"

    def _name_reader(self, held: Held, message: Open) -> str | None:
        """Enter a reader in the books, or say why it cannot be one."""
        pull = held.pulls.get(PullId(message.pull))
        if message.index >= message.of:
            return f"reader {message.index} of {message.of} does not exist"
        if pull is None:
            if len(held.pulls) >= MAX_PULLS:
                return f"{len(held.pulls)} pulls of this request are already under way"
            pull = held.pulls[PullId(message.pull)] = PullEntry(message.of)
        if pull.of != message.of:
            return f"the pull has {pull.of} readers, this one says {message.of}"
        pull.opened.add(message.index)
        return None

    def _extend(self, held: Held, now: float) -> None:
        held.claimed = True
        if held.ended is None:  # renewals do not make it linger longer
            self._set_deadline(held, now + self._lease)

    def _set_deadline(self, held: Held, deadline: float) -> None:
        held.deadline = min(deadline, held.since + self._max_hold)
        first = self._earliest
        self._earliest = held.deadline if first is None else min(first, held.deadline)

    def _refuse(self, to: ReplyTo, code: Any, reason: str) -> Reply:
        self.counters["refused"] += 1
        return Reply(to, Refused(code, reason))

    def _let_go(self, held: Held, outcome: Outcome, now: float) -> Free:
        holding = held.holding
        del self._held[holding.request]
        self._tombstones[holding.request] = Tombstone(
            holding.ticket,
            outcome,
            frozenset((pull, index) for pull, p in held.pulls.items() for index in p.reports),
        )
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self.counters[outcome] += 1
        self.recent.append(
            PullRecord(
                request=holding.request,
                outcome=outcome,
                tokens=holding.tokens,
                held_seconds=now - held.since,
                first_open_seconds=None
                if held.first_open is None
                else held.first_open - held.since,
                readers=[r for pull in held.pulls.values() for r in pull.reports.values()],
            )
        )
        return Free(holding.request, outcome)


_WHY = {
    "unknown": "request {request} is not held here",
    "ticket": "the ticket of request {request} does not match",
    "expired": "the lease of request {request} ran out before it was read",
    "released": "request {request} has been read or released",
}


def _same(ours: str, theirs: str) -> bool:
    return hmac.compare_digest(ours.encode(), theirs.encode())
