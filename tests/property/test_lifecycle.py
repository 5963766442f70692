# SPDX-License-Identifier: Apache-2.0
"""One ledger, many pulls and a channel that loses, repeats and reorders: nothing bad happens.

The producer's memory is a generation number for each request, which changes when the request is
freed or the producer dies. A read that ended in a later generation than the request's first may
have seen somebody else's bytes; no pull that had one may end well.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvhandoff.ids import Incarnation, Rank, RequestId, Ticket
from kvhandoff.lifecycle import pull as pulling
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.lifecycle.ledger import Effect, Free, Ledger, Reply
from kvhandoff.lifecycle.pull import (
    Ask,
    Connect,
    Ended,
    Finish,
    Pull,
    Read,
    Share,
    State,
)
from kvhandoff.protocol.messages import (
    Answer,
    Complete,
    Completed,
    HeldKey,
    Open,
    Opened,
    Refused,
    Release,
    Renew,
    Request,
)
from tests.profiles import examples

LEASE = 10.0
MAX_HOLD = 25.0
FIRST_LEASE = 5.0
SHARES = (Share((Rank(0), Rank(2), Rank(3)), pieces=3, active=2), Share((Rank(1),)))
PIECES = sorted((part, piece) for part, s in enumerate(SHARES) for piece in range(s.pieces))

any_of = st.integers(0, 7)
"""An index into whatever there is at the moment, taken modulo its length."""

STEPS = ("to desk", "to reader", "read", "read", "read") * 3 + (
    "to desk, repeated", "to reader, repeated", "read, repeated", "read fails", "lose", "wait",
    "wait",
)  # fmt: skip


@dataclass
class Reader:
    """One rank of a consumer: a pull machine, and the reads that it has out."""

    key: HeldKey
    pull: str
    index: int
    of: int
    machine: Pull = field(default_factory=Pull)
    catalog: str = ""
    reads: list[Read] = field(default_factory=list)
    returned: list[Read] = field(default_factory=list)
    landed: list[tuple[int, int]] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    ended: list[str | None] = field(default_factory=list)

    def message(self) -> Request | None:
        """What this reader is waiting for an answer to."""
        if self.machine.state is State.OPEN:
            return Open(self.key, self.pull, self.index, self.of)
        if self.machine.state is State.COMPLETE:
            ok = self.machine.failure is None
            linger = 2.0 if self.pull.endswith(("3", "7")) else 0.0
            return Complete(self.key, self.pull, self.index, ok, linger)
        return None


@dataclass
class Books:
    """What this test knows about one request on the producer."""

    generation: int = 0
    held: bool = False
    frees: int = 0
    died: bool = False
    reading: set[tuple[str, int]] = field(default_factory=set)
    completed: set[tuple[str, int]] = field(default_factory=set)
    released: set[str] = field(default_factory=set)


class Handoffs(RuleBasedStateMachine):
    """All interleavings of what producers, consumers, networks and clocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.now = 0.0
        self.lives = 0
        self.announced: set[RequestId] = set()
        self.requests: dict[RequestId, Books] = {}
        self.readers: list[Reader] = []
        self.to_desk: list[tuple[Reader | None, Request]] = []
        self.to_reader: list[tuple[Reader, Answer]] = []
        self.unanswered: dict[int, tuple[Reader | None, Request]] = {}
        self.start_producer()
        self.cached = self.incarnation

    def start_producer(self) -> None:
        self.lives += 1
        self.incarnation = Incarnation(f"life {self.lives}")
        self.ledger = Ledger(
            self.incarnation, lease=LEASE, max_hold=MAX_HOLD, first_lease=FIRST_LEASE
        )

    # ---- the producer's engine ----

    @rule(at_once=st.booleans())
    def prefill(self, at_once: bool) -> None:
        request = RequestId(f"r{next(self.numbers)}")
        self.requests[request] = Books()
        self.announced.add(request)
        self.at_desk(self.ledger.announce([request]))
        if at_once:
            self.hold(-1)

    @precondition(lambda self: self.announced)
    @rule(which=any_of)
    def hold(self, which: int) -> None:
        request = self.pick(sorted(self.announced), which)
        self.announced.remove(request)
        self.requests[request].held = True
        holding = Holding(request, Ticket(f"ticket of {request}"), ([1],), 4)
        self.at_desk(self.ledger.hold(holding, self.now))

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, 4.0, LEASE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.at_desk(self.ledger.expire(self.now))

    @rule(which=any_of, restart=st.sampled_from([False, False, False, True]))
    def mishap(self, which: int, restart: bool) -> None:
        """A prefill is aborted; or the producer dies, and comes back as somebody new."""
        if self.announced and not restart:
            request = self.pick(sorted(self.announced), which)
            self.announced.remove(request)
            self.at_desk(self.ledger.drop([request]))
        elif restart and self.lives < 3:
            for books in self.requests.values():
                books.generation += 1
                books.died |= books.held
                books.held = False
            self.announced.clear()
            self.unanswered.clear()
            self.start_producer()

    # ---- consumers ----

    @precondition(lambda self: self.requests)
    @rule(which=any_of, ranks=st.integers(1, 2), forged=st.sampled_from([False] * 7 + [True]))
    def pull(self, which: int, ranks: int, forged: bool) -> None:
        """A consumer begins to pull with all its ranks, mostly what can be had."""
        live = sorted(self.announced) + [r for r, books in self.requests.items() if books.held]
        request = self.pick(live if which and live else sorted(self.requests), which)
        ticket = "forged" if forged else f"ticket of {request}"
        name = f"pull {next(self.numbers)}"
        for index in range(ranks):
            reader = Reader(HeldKey(request, ticket), name, index, ranks)
            self.readers.append(reader)
            self.at_reader(reader, reader.machine.start())

    @precondition(lambda self: self.readers)
    @rule(which=any_of, act=st.sampled_from(["ask again", "give up", "release", "pass", "renew"]))
    def insist(self, which: int, act: str) -> None:
        """A deadline passed, a consumer lets go or still waits, a router reads nothing."""
        reader = self.pick(self.readers, which)
        message = reader.message()
        ranks = [each for each in self.readers if each.pull == reader.pull]
        if act == "ask again" and message is not None:
            self.to_desk.append((reader, message))
        elif act == "give up":
            self.at_reader(reader, reader.machine.failed("no answer"))
        elif act == "release" and all(each.ended for each in ranks):
            self.to_desk.append((None, Release(reader.key, reader.pull)))
        elif act == "pass":
            self.to_desk.append((None, Release(reader.key, "")))
        elif act == "renew":
            self.to_desk.append((None, Renew([reader.key])))

    # ---- the network, and time going by on it ----

    @rule(steps=st.lists(st.tuples(st.sampled_from(STEPS), any_of), min_size=8, max_size=30))
    def go_on(self, steps: list[tuple[str, int]]) -> None:
        """Messages arrive, mostly once, in any order; reads end, mostly well."""
        for step, which in steps:
            reading = [reader for reader in self.readers if reader.reads]
            if step.startswith("to desk") and self.to_desk:
                self.arrive_at_desk(*self.take(self.to_desk, which, "repeated" in step))
            elif step.startswith("to reader") and self.to_reader:
                self.arrive_at_reader(*self.take(self.to_reader, which, "repeated" in step))
            elif step == "read, repeated":
                self.repeat_read(which)
            elif step.startswith("read") and reading:
                self.end_read(self.pick(reading, which), which, step == "read fails")
            elif step == "lose" and (self.to_desk or self.to_reader):
                self.take(self.to_desk or self.to_reader, which, False)
            elif step == "wait":
                self.wait(float(which))

    def arrive_at_desk(self, reader: Reader | None, message: Request) -> None:
        to = next(self.numbers)
        self.unanswered[to] = (reader, message)
        match message:
            case Open():
                effects = self.ledger.open(message, to, self.now)
            case Complete():
                effects = self.ledger.complete(message, to, self.now)
            case Renew():
                effects = self.ledger.renew(message, to, self.now)
            case Release():
                self.note_release(message)
                effects = self.ledger.release(message, to, self.now)
        self.at_desk(effects)

    def arrive_at_reader(self, reader: Reader, answer: Answer) -> None:
        match answer:
            case Opened():
                self.at_reader(reader, reader.machine.answered(answer))
            case Completed(verdict):
                self.at_reader(reader, reader.machine.completed(verdict))
            case Refused(code):
                self.at_reader(reader, reader.machine.failed(code))

    def end_read(self, reader: Reader, which: int, fails: bool) -> None:
        read = reader.reads.pop(which % len(reader.reads))
        reader.returned.append(read)
        if not fails:
            reader.landed.append((read.part, read.piece))
            reader.generations.append(self.requests[RequestId(reader.key.request)].generation)
        failure = "read failed" if fails else None
        self.at_reader(reader, reader.machine.read(read.part, read.piece, read.source, failure))

    def repeat_read(self, which: int) -> None:
        """What is known already changes nothing, whoever says it again and whatever it says."""
        for reader in self.readers:
            if reader.returned:
                read = self.pick(reader.returned, which)
                for failure in (None, "read failed"):
                    assert reader.machine.read(read.part, read.piece, read.source, failure) == []

    # ---- effects ----

    def at_desk(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                assert effect.to in self.unanswered, "answered twice"
                reader, message = self.unanswered.pop(effect.to)
                self.note_answer(message, effect.answer)
                if reader is not None:
                    self.to_reader.append((reader, effect.answer))
            elif isinstance(effect, Free):
                books = self.requests[effect.request]
                assert books.held, "freed what was not held"
                books.held = False
                books.frees += 1
                books.generation += 1
                if effect.outcome != "expired":
                    assert not books.reading, "freed under a reader that was let in"

    def note_answer(self, message: Request, answer: Answer) -> None:
        """Keep account of who was let in to read.

        A repeated ``Open`` can arrive after the reader has completed. It is answered like the
        first one, but nobody listens any more: a reader that has ended reads no more.
        """
        if isinstance(message, Open) and isinstance(answer, Opened):
            books, reader = self.books_of(message)
            if message.pull not in books.released and reader not in books.completed:
                books.reading.add(reader)
        if isinstance(message, Complete):
            books, reader = self.books_of(message)
            books.reading.discard(reader)
            books.completed.add(reader)

    def books_of(self, message: Open | Complete) -> tuple[Books, tuple[str, int]]:
        return self.requests[RequestId(message.key.request)], (message.pull, message.index)

    def note_release(self, message: Release) -> None:
        books = self.requests[RequestId(message.key.request)]
        if message.key.ticket == f"ticket of {message.key.request}" and message.pull:
            books.released.add(message.pull)
            books.reading = {each for each in books.reading if each[0] != message.pull}

    def at_reader(self, reader: Reader, effects: list[pulling.Effect]) -> None:
        for effect in effects:
            match effect:
                case Connect(fresh):
                    if fresh:
                        self.cached = self.incarnation
                    reader.catalog = self.cached
                    self.at_reader(reader, reader.machine.connected(reader.catalog, SHARES))
                case Ask() | Finish():
                    message = reader.message()
                    assert message is not None
                    assert not reader.reads, "completed while it reads"
                    self.to_desk.append((reader, message))
                case Read():
                    assert reader.machine.opened is not None
                    assert reader.machine.opened.incarnation == reader.catalog, "stale addresses"
                    reader.reads.append(effect)
                case Ended(failure):
                    assert not reader.reads, "ended while it reads"
                    reader.ended.append(failure)
                    if failure is None:
                        assert sorted(reader.landed) == PIECES
                        assert set(reader.generations) == {0}, "received what may be another's"
                        assert reader.key.ticket != "forged"

    @staticmethod
    def pick(choices: list, which: int):
        return choices[which % len(choices)]

    @staticmethod
    def take(messages: list, which: int, keep: bool):
        index = which % len(messages)
        return messages[index] if keep else messages.pop(index)

    # ---- what holds always ----

    @invariant()
    def books_agree(self) -> None:
        assert len(self.ledger) == sum(books.held for books in self.requests.values())
        assert self.ledger.announced == len(self.announced)

    @invariant()
    def who_is_not_answered_waits_for_prefill(self) -> None:
        for _, message in self.unanswered.values():
            assert isinstance(message, Open | Release)
            assert message.key.request in self.announced

    @invariant()
    def pulls_end_once(self) -> None:
        for reader in self.readers:
            assert len(reader.ended) == (reader.machine.state is State.ENDED)

    def teardown(self) -> None:
        """All messages arrive and time passes: no block, no waiter and no pull is left."""
        while self.to_desk or self.to_reader or any(reader.reads for reader in self.readers):
            self.go_on([("to desk", 0), ("to reader", 0), ("read", 0)])
        self.at_desk(self.ledger.drop(sorted(self.announced)))
        self.announced.clear()
        self.now += MAX_HOLD
        self.at_desk(self.ledger.expire(self.now))
        assert len(self.ledger) == self.ledger.announced == self.ledger._parked == 0
        assert self.ledger.next_deadline() is None
        assert not self.unanswered
        for request, books in self.requests.items():
            assert books.frees <= 1, request
            assert not books.held
            assert not (books.frees and books.died)
        for reader in self.readers:
            while reader.reads:
                self.end_read(reader, 0, True)
            self.at_reader(reader, reader.machine.failed("shutting down"))
            assert len(reader.ended) == 1


def test_an_open_that_arrives_after_its_reader_has_completed() -> None:
    """Found by the search below: what it lets in reads nothing, and bars nobody from freeing."""
    run = Handoffs()
    run.prefill(at_once=True)
    run.pull(which=0, ranks=2, forged=False)
    run.insist(which=0, act="ask again")
    first, second = run.readers
    run.go_on([("to desk", 0), ("to reader", 0)])
    assert first.reads
    while first.machine.state is State.READ:
        run.end_read(first, 0, False)
    completion = next(m for m in run.to_desk if m[0] is first and isinstance(m[1], Complete))
    run.to_desk.remove(completion)
    run.arrive_at_desk(*completion)
    run.go_on([("to reader", 0)])
    assert first.ended == [None]
    repeated = next(m for m in run.to_desk if m[0] is first)
    assert isinstance(repeated[1], Open)
    run.to_desk.remove(repeated)
    run.arrive_at_desk(*repeated)
    run.teardown()
    assert second.ended == [None]
    assert [books.frees for books in run.requests.values()] == [1]


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(max_examples=examples(300), stateful_step_count=30)
