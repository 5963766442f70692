# SPDX-License-Identifier: Apache-2.0
"""Mooncake's TransferEngine and a peer that hangs: nothing lands after a read is final."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvhandoff.errors import TransferFailed
from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.runtime.reads import Limits, Read, Reads
from kvhandoff.transport.mooncake import MooncakeTransport
from tests.contract.test_transports import finish
from tests.peer import HOST, Peer

pytest.importorskip("mooncake.engine", reason="Mooncake's TransferEngine is not installed")
pytestmark = pytest.mark.mooncake

SIZE = 64 << 20
PAGE = 4096


class Here:
    """This process's side: a transport, and memory to read into."""

    def __init__(self) -> None:
        self.transport = MooncakeTransport(HOST, "tcp")
        self.memory = np.zeros(SIZE, dtype=np.uint8)
        self.transport.register(Segment(int(self.memory.ctypes.data), SIZE))

    def pieces(self, peer: Peer, offsets: np.ndarray, length: int) -> Descriptors:
        """Pieces at the same offsets here and there."""
        at = offsets.astype(np.int64)
        return Descriptors(
            at + int(self.memory.ctypes.data), at + peer.base, np.full(at.size, length, np.int64)
        )


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    side = Here()
    yield side
    side.transport.close()


@pytest.fixture
def peer(here: Here) -> Iterator[Peer]:
    here.memory[:] = 0
    with Peer(SIZE) as peer:
        peer.memory[:] = 7
        here.transport.connect(peer.session)
        finish(here.transport.begin(peer.session, here.pieces(peer, np.arange(1), 1)))
        yield peer


def unchanged(memory: np.ndarray, during: Callable[[], None]) -> bool:
    before = memory.copy()
    during()
    return bool(np.array_equal(memory, before))


def test_a_failed_read_is_final_when_nothing_can_land_any_more(here: Here, peer: Peer) -> None:
    """One piece that the peer refuses, and others which it sends once it is heard of again."""
    for _ in range(20):
        peer.stop()
        good = here.pieces(peer, np.arange(1, 5) * PAGE * 256, PAGE * 256)
        bad = Descriptors(good.local[:1], good.remote[:1] + 16 * SIZE, good.length[:1])
        flight = here.transport.begin(peer.session, Descriptors.join([bad, good]))
        time.sleep(0.02)
        flight.poll()
        assert flight.left > 0
        peer.go_on()
        with pytest.raises(TransferFailed):
            finish(flight)
        here.memory[:] = 0
        peer.memory[:] = 8
        assert unchanged(here.memory, lambda: time.sleep(0.05))


def test_nothing_lands_after_a_cut(here: Here, peer: Peer) -> None:
    """A peer that hangs while it is read, and comes back when its reader has gone on."""
    for _ in range(20):
        peer.stop()
        flight = here.transport.begin(
            peer.session, here.pieces(peer, np.arange(16) * (1 << 20), 1 << 20)
        )
        time.sleep(0.02)
        here.transport.cut()
        flight.poll()
        assert flight.left == 0
        assert "was cut" in (flight.failure or "")
        here.memory[:] = 0
        peer.go_on()
        assert unchanged(here.memory, lambda: time.sleep(0.05))
        here.transport.connect(peer.session)
        finish(here.transport.begin(peer.session, here.pieces(peer, np.arange(1), PAGE)))
        assert (here.memory[:PAGE] == 7).all()


def test_reads_of_many_pieces(here: Here, peer: Peer) -> None:
    """100,000 pieces in one read, then eight reads of 20,000 at a time, all from one peer."""
    events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    reads = Reads(here.transport, Limits(), events.put)
    ended: list[Read] = []
    peer.memory[:] = np.random.default_rng(1).integers(1, 256, SIZE, dtype=np.uint8)

    def read_all(parts: list[np.ndarray]) -> None:
        ended.clear()
        for part in parts:
            reads.submit(peer.session, lambda part=part: here.pieces(peer, part, 256), ended.append)
        deadline = time.monotonic() + 120
        while len(ended) < len(parts):
            assert time.monotonic() < deadline
            while not events.empty():
                events.get()()
            if not reads.step():
                time.sleep(0.0002)
        assert [read.failure for read in ended] == [None] * len(parts)
        assert sum(read.pieces for read in ended) == sum(part.size for part in parts)
        expected = np.zeros(SIZE, dtype=np.uint8)
        for part in parts:
            rows = (part[:, None] + np.arange(256)).ravel()
            expected[rows] = peer.memory[rows]
        assert np.array_equal(here.memory, expected)

    scattered = np.random.default_rng(2).permutation(SIZE // 384) * 384
    read_all([scattered[:100_000]])
    here.memory[:] = 0
    read_all([scattered[n * 20_000 : (n + 1) * 20_000] for n in range(8)])


def test_a_peer_that_dies_ends_its_reads_at_once(here: Here, peer: Peer) -> None:
    """Nobody waits for a time limit."""
    peer.stop()
    flight = here.transport.begin(peer.session, here.pieces(peer, np.arange(64) << 19, 1 << 19))
    peer.signal(9)
    began = time.monotonic()
    with pytest.raises(TransferFailed):
        finish(flight)
    assert time.monotonic() - began < 20  # a second or two, on a machine with nothing else to do
