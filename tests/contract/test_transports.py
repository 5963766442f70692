# SPDX-License-Identifier: Apache-2.0
"""What every transport has to do, checked on each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvhandoff.errors import TransferFailed
from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.transport.base import Flight, Transport
from kvhandoff.transport.memory import MemoryFabric

SIZE = 1 << 16
PATIENCE = 60.0


@dataclass
class Side:
    """One end: a transport with one registered buffer."""

    transport: Transport
    memory: np.ndarray

    @property
    def base(self) -> int:
        return int(self.memory.ctypes.data)


@dataclass
class Kit:
    """Two ends, and the address of a peer that has gone."""

    here: Side
    there: Side
    gone: str

    def begin(self, *pieces: tuple[int, int, int], session: str = "") -> Flight:
        """Begin to read pieces ``(offset here, offset there, length)``."""
        columns = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        found = Descriptors(columns[0] + self.here.base, columns[1] + self.there.base, columns[2])
        session = session or self.there.transport.session
        return self.here.transport.begin(session, found)

    def read(self, *pieces: tuple[int, int, int], session: str = "") -> None:
        """Read pieces to the end, or raise why they did not arrive."""
        session = session or self.there.transport.session
        self.here.transport.connect(session)
        finish(self.begin(*pieces, session=session))


def finish(*flights: Flight) -> None:
    """Poll until all flights are final; raise what failed."""
    deadline = time.monotonic() + PATIENCE
    while any(flight.left for flight in flights):
        for flight in flights:
            flight.poll()
        assert time.monotonic() < deadline, "a flight does not become final"
        time.sleep(0.0002)
    for flight in flights:
        if flight.failure is not None:
            raise TransferFailed(flight.failure)


def make_kit(create: Callable[[], Transport], gone: str) -> Kit:
    sides = []
    for _ in range(2):
        side = Side(create(), np.zeros(SIZE, dtype=np.uint8))
        side.transport.register(Segment(side.base, SIZE))
        sides.append(side)
    return Kit(*sides, gone)


@pytest.fixture(
    params=["memory", pytest.param("mooncake", marks=pytest.mark.mooncake)], scope="module"
)
def shared_kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """Engines are started once for all tests: ending one takes about a second."""
    if request.param == "memory":
        fabric = MemoryFabric()
        passed = fabric.create()
        kit = make_kit(fabric.create, passed.session)
        passed.close()
    else:
        pytest.importorskip("mooncake.engine", reason="Mooncake's TransferEngine is not installed")
        from kvhandoff.transport.mooncake import MooncakeTransport

        kit = make_kit(lambda: MooncakeTransport("127.0.0.1", "tcp"), "127.0.0.1:1")
    yield kit
    kit.here.transport.close()
    kit.there.transport.close()


@pytest.fixture
def kit(shared_kit: Kit) -> Kit:
    """Nothing has been read yet, and every byte to read is told from its neighbours."""
    shared_kit.here.memory[:] = 0xA5
    shared_kit.there.memory[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    return shared_kit


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 0, SIZE)],
        [(0, 100, 1)],
        [(7, 13, 101), (300, 5, 33)],
        [(SIZE - 1, 0, 1), (0, SIZE - 1, 1)],
        [(n * 128, (511 - n) * 128, 64) for n in range(512)],
    ],
    ids=["all", "one byte", "unaligned", "both ends", "many"],
)
def test_bytes_arrive_where_they_belong(kit: Kit, pieces: list[tuple[int, int, int]]) -> None:
    """Exactly the bytes of each piece, and not one beside them; the peer's stay as they were."""
    before = kit.there.memory.copy()
    expected = kit.here.memory.copy()
    for local, remote, length in pieces:
        expected[local : local + length] = before[remote : remote + length]
    kit.read(*pieces)
    assert np.array_equal(kit.here.memory, expected)
    assert np.array_equal(kit.there.memory, before)


def test_reading_nothing_is_fine(kit: Kit) -> None:
    """A worker may have nothing to read, even from nobody."""
    kit.read()
    finish(kit.begin(session=kit.gone))
    assert (kit.here.memory == 0xA5).all()


@pytest.mark.parametrize(
    "piece", [(0, SIZE, 64), (0, SIZE - 32, 64), (0, -64, 64), (0, 1 << 40, 64)],
    ids=["behind", "across the end", "before", "far away"],
)  # fmt: skip
def test_reading_what_the_peer_has_not_registered_fails(
    kit: Kit, piece: tuple[int, int, int]
) -> None:
    """Nothing but registered memory is reached, and the failure is an error of ours."""
    with pytest.raises(TransferFailed):
        kit.read(piece)


def test_one_bad_piece_fails_the_read(kit: Kit) -> None:
    """A read is not reported as done when a part of it was not."""
    with pytest.raises(TransferFailed):
        kit.read((0, 0, 64), (64, SIZE, 64), (128, 64, 64))


def test_a_peer_that_has_gone_fails_the_read(kit: Kit) -> None:
    """Whoever is not there is named, and those who are can still be read."""
    with pytest.raises(TransferFailed, match=kit.gone):
        kit.read((0, 0, 64), session=kit.gone)
    kit.read((0, 0, 64))
    assert np.array_equal(kit.here.memory[:64], kit.there.memory[:64])


def test_many_reads_at_once(kit: Kit) -> None:
    """Reads do not disturb each other."""
    share = SIZE // 64
    finish(*(kit.begin((n * share, n * share, share)) for n in range(64)))
    assert np.array_equal(kit.here.memory, kit.there.memory)


def test_both_ends_may_read(kit: Kit) -> None:
    """Every worker's memory can be a source and a target."""
    length = np.array([64], dtype=np.int64)
    kit.there.transport.connect(kit.here.transport.session)
    there, here = length * 0 + kit.there.base, length * 0 + kit.here.base
    finish(kit.there.transport.begin(kit.here.transport.session, Descriptors(there, here, length)))
    assert (kit.there.memory[:64] == 0xA5).all()


def test_memory_transport_checks_its_own_side() -> None:
    """The in-process transport also refuses targets that are not registered."""
    kit = make_kit(MemoryFabric().create, "nobody")
    with pytest.raises(TransferFailed, match="not registered"):
        kit.read((SIZE, 0, 8))


def test_memory_transport_fails_on_demand() -> None:
    """A fault stops a read between two pieces; what had landed has landed."""
    fabric = MemoryFabric()
    kit = make_kit(fabric.create, "nobody")
    kit.there.memory[:] = 1

    def fault(session: str, piece: int, pieces: int) -> None:
        if piece == pieces - 1:
            raise TransferFailed(f"{session} was cut off")

    fabric.fault = fault
    with pytest.raises(TransferFailed, match="cut off"):
        kit.read((0, 0, 8), (8, 8, 8))
    assert kit.here.memory[:16].tolist() == [1] * 8 + [0] * 8


def test_after_a_cut_others_can_be_read_as_before(kit: Kit) -> None:
    """A cut ends what is under way, and nothing else."""
    kit.here.transport.cut()
    kit.read((0, 0, SIZE))
    assert np.array_equal(kit.here.memory, kit.there.memory)


def test_memory_transport_fails_now_and_lands_later() -> None:
    """What is under way lands although the read has failed, unless it is cut."""
    fabric = MemoryFabric()
    kit = make_kit(fabric.create, "nobody")
    kit.there.memory[:] = 1
    waits = True

    def fault(session: str, piece: int, pieces: int) -> bool:
        if piece == 0:
            raise TransferFailed("the cable")
        return waits

    fabric.fault = fault
    late, cut = kit.begin((0, 0, 8), (8, 8, 8)), kit.begin((16, 16, 8), (24, 24, 8))
    for flight in (late, cut):
        flight.poll()
        assert (flight.left, flight.failure) == (1, "the cable")
    assert not kit.here.memory.any()
    cut.cut()
    waits = False
    late.poll()
    cut.poll()
    assert late.left == cut.left == 0
    assert kit.here.memory[:32].tolist() == [0] * 8 + [1] * 8 + [0] * 16


def test_a_closed_memory_transport_is_gone() -> None:
    """Its peers find nobody under its address any more."""
    kit = make_kit(MemoryFabric().create, "nobody")
    kit.there.transport.close()
    with pytest.raises(TransferFailed, match="has gone"):
        kit.read((0, 0, 8))
    with pytest.raises(TransferFailed, match="has gone"):
        finish(kit.begin((0, 0, 8)))
