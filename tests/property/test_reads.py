# SPDX-License-Identifier: Apache-2.0
"""Reads from peers that refuse, hang, fail now and send later: nothing lands after a read's end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvhandoff.errors import TransferFailed
from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.runtime.reads import Limits, Read, Reads
from kvhandoff.transport.memory import MemoryFabric
from tests.profiles import examples

PEERS = 3
CELL = 8
PIECES = 150
"""At most in a read; more than a slice."""
SIZE = 1 << 16
LIMITS = Limits(pieces=128, nbytes=64 << 20, all_pieces=256, stall=5.0, cut=60.0)

any_of = st.integers(0, 7)


@dataclass(eq=False)
class Asked:
    """A read of this test, the cells that it fills, and what they held when it ended."""

    peer: int
    cells: np.ndarray
    ended: Read | None = None
    then: np.ndarray | None = None


class Reading(RuleBasedStateMachine):
    """One worker, some peers, and pieces that land, fail or stay under way as the test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.fabric = MemoryFabric()
        self.mine, *self.peers = (self.fabric.create() for _ in range(PEERS + 1))
        self.memory = np.zeros(SIZE, dtype=np.uint8)
        self.theirs = np.arange(SIZE, dtype=np.uint64).astype(np.uint8) | 1
        self.mine.register(Segment(int(self.memory.ctypes.data), SIZE))
        for peer in self.peers:
            peer.register(Segment(int(self.theirs.ctypes.data), SIZE))
        self.now = 0.0
        self.events: list[Callable[[], None]] = []
        self.aside: list[Callable[[], None]] = []
        self.reads = Reads(
            self.mine, LIMITS, self.events.append, lambda: self.now, self.aside.append
        )
        self.silent: set[str] = set()
        self.refused = 0
        self.numbers = itertools.count()
        self.free = SIZE // CELL
        self.asked: list[Asked] = []
        self.fabric.fault = self.fault

    def fault(self, session: str, piece: int, pieces: int) -> bool:
        if self.refused and piece % 3 == 0:
            self.refused -= 1
            raise TransferFailed("refused")
        return session in self.silent

    @precondition(lambda self: self.free > PIECES)
    @rule(peer=st.integers(0, PEERS - 1), pieces=st.integers(0, PIECES), bad=st.booleans())
    def submit(self, peer: int, pieces: int, bad: bool) -> None:
        first = SIZE // CELL - self.free
        self.free -= pieces
        asked = Asked(peer, np.arange(first, first + pieces, dtype=np.int64) * CELL)
        self.asked.append(asked)
        beyond = SIZE if bad and pieces and next(self.numbers) % 4 == 0 else 0

        def plan() -> Descriptors:
            base = int(self.theirs.ctypes.data) + beyond
            length = np.full(pieces, CELL, dtype=np.int64)
            local = asked.cells + int(self.memory.ctypes.data)
            return Descriptors(local, asked.cells + base, length)

        def ended(read: Read) -> None:
            assert asked.ended is None, "ended twice"
            asked.ended, asked.then = read, self.memory[self.places(asked)].copy()
            if read.failure is None:
                assert np.array_equal(asked.then, self.theirs[self.places(asked)])

        self.reads.submit(self.peers[peer].session, plan, ended)

    @rule(which=any_of, silent=st.booleans())
    def falls_silent(self, which: int, silent: bool) -> None:
        session = self.peers[which % PEERS].session
        (self.silent.add if silent else self.silent.discard)(session)

    @rule(pieces=st.integers(1, 5))
    def refuse(self, pieces: int) -> None:
        self.refused += pieces

    @rule()
    def connect(self) -> None:
        while self.aside:
            self.aside.pop(0)()

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 6.0, 61.0]), steps=st.integers(1, 4))
    def step(self, seconds: float, steps: int) -> None:
        self.now += seconds
        while self.events:
            self.events.pop(0)()
        for _ in range(steps):
            self.reads.step()

    @staticmethod
    def places(asked: Asked) -> np.ndarray:
        return (asked.cells[:, None] + np.arange(CELL)).ravel()

    @invariant()
    def nothing_lands_after_the_end(self) -> None:
        for asked in self.asked:
            if asked.then is not None:
                assert np.array_equal(self.memory[self.places(asked)], asked.then)

    @invariant()
    def bounds_hold(self) -> None:
        lanes = self.reads._lanes.values()
        for lane in lanes:
            assert lane.pieces == sum(flying.left for flying in lane.flying) <= LIMITS.pieces
            assert all(read.more for read in lane.waiting)
        assert sum(lane.pieces for lane in lanes) <= LIMITS.all_pieces

    def teardown(self) -> None:
        """Silence ends, sooner or later: every read is over, and nothing is under way."""
        for _ in range(200):
            self.connect()
            self.step(61.0, 3)
            if not self.reads.busy:
                break
        assert not self.reads.busy
        assert self.reads.stuck == 0
        assert all(asked.ended is not None for asked in self.asked)
        self.silent.clear()
        for flight in self.mine.flights:
            flight.poll()
        self.nothing_lands_after_the_end()


TestReads = Reading.TestCase
TestReads.settings = settings(max_examples=examples(150), stateful_step_count=30)
