# SPDX-License-Identifier: Apache-2.0
"""A desk that is no friend: it may cost the pull that came to it, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvhandoff.channel import Server
from kvhandoff.config import HandoffConfig
from kvhandoff.ids import Endpoint
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.protocol.catalog import Catalog
from kvhandoff.protocol.messages import Completed, Hello, Open, Opened
from kvhandoff.transport.memory import MemoryFabric
from tests.engines import HOST, DecodeEngine, PrefillEngine
from tests.oracle import MARKER, CacheShape, ModelShape, assert_holds

MLA = ModelShape(layers=2, heads=1, content=64)
SHAPE = CacheShape(blocks=64, block_tokens=16)
KEY = "a key that both sides know"


class Stranger:
    """A desk that shows an honest engine's catalog, and answers an ``Open`` as it is told."""

    def __init__(self, catalog: Catalog, opened: Callable[[], Opened]) -> None:
        self._catalog, self._opened = catalog, opened
        self._server = Server(Endpoint(HOST, 0))
        self.port = self._server.port
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            for to, request in self._server.receive(0.2):
                if isinstance(request, Hello):
                    self._server.reply(to, self._catalog)
                elif isinstance(request, Open):
                    self._server.reply(to, self._opened())
                else:
                    self._server.reply(to, Completed("held"))
        self._server.close()

    def close(self) -> None:
        self._stopping = True
        self._thread.join(20)


@pytest.fixture
def pair() -> Iterator[tuple[PrefillEngine, DecodeEngine]]:
    fabric = MemoryFabric()
    p = PrefillEngine(MLA, ParallelSizes(), SHAPE, fabric.create)
    d = DecodeEngine(MLA, ParallelSizes(), SHAPE, fabric.create)
    yield p, d
    d.close()
    p.close()


def check_that_others_are_served(p: PrefillEngine, d: DecodeEngine) -> None:
    d.submit(d.job(p.prefill(40, 2), [4, 5, 6]))
    ((result,),) = d.results()
    assert result.failure is None
    assert_holds(d.cache(0), [4, 5, 6], 0, 40, 2)


def ids(*numbers: int) -> Opened:
    return Opened("life", (list(numbers),), 40, 30.0)


@pytest.mark.parametrize(
    ("opened", "told"),
    [
        (ids(2**64 - 1, 1, 2), ""),
        (ids(-1, 1, 2), ""),
        (ids(2**31 - 1, 1, 2), "are not all in 1..63"),
        (ids(0, 1, 2), "are not all in 1..63"),
        (ids(1), "which has 1 blocks"),
        (Opened("life", (), 40, 30.0), "IndexError"),
        (Opened("life", ([1, 2, 3],), 39, 30.0), "holds 39 tokens"),
        (Opened("life", ([1, 2, 3],), 40, float("nan")), ""),
    ],
)
def test_an_answer_that_cannot_be_used_fails_its_pull_only(
    pair: tuple[PrefillEngine, DecodeEngine], opened: Opened, told: str
) -> None:
    """Numbers that no array takes, blocks that do not exist, too few groups."""
    p, d = pair
    catalog = msgspec.structs.replace(p.desk._catalog, incarnation="life")
    stranger = Stranger(catalog, lambda: opened)
    try:
        params = msgspec.structs.replace(p.prefill(40, 1), remote_port=stranger.port)
        d.submit(d.job(params, [1, 2, 3]))
        ((result,),) = d.results()
        assert result.failure is not None
        assert told in result.failure
        assert (d.cache(0).memory == MARKER).all()
        check_that_others_are_served(p, d)
    finally:
        stranger.close()


def test_a_catalog_that_leads_elsewhere_is_refused() -> None:
    """The desk is on a host that is allowed, the workers that it names are not."""
    fabric = MemoryFabric()
    p = PrefillEngine(MLA, ParallelSizes(), SHAPE, fabric.create)
    config = HandoffConfig(prefill_hosts=(HOST,))
    d = DecodeEngine(MLA, ParallelSizes(), SHAPE, fabric.create, config=config)
    try:
        d.submit(d.job(p.prefill(40, 1), [1, 2, 3]))
        ((result,),) = d.results()
        assert "leads to memory, which is not among prefill_hosts" in (result.failure or "")
        assert (d.cache(0).memory == MARKER).all()
    finally:
        d.close()
        p.close()


@pytest.mark.parametrize(("ours", "works"), [(KEY, True), ("", False), ("x" * 16, False)])
def test_a_desk_with_a_key_serves_who_has_it(ours: str, works: bool) -> None:
    """Others get no catalog and no block id, and are told why."""
    fabric = MemoryFabric()
    p = PrefillEngine(MLA, ParallelSizes(), SHAPE, fabric.create, key=KEY.encode())
    d = DecodeEngine(
        MLA, ParallelSizes(), SHAPE, fabric.create, config=HandoffConfig(shared_key=ours)
    )
    try:
        if works:
            check_that_others_are_served(p, d)
            return
        d.submit(d.job(p.prefill(40, 1), [1, 2, 3]))
        ((result,),) = d.results()
        assert "has another shared_key" in (result.failure or "")
    finally:
        d.close()
        p.close()
