# SPDX-License-Identifier: Apache-2.0
"""Things go wrong between whole engines: either every byte is right, or the pull fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from kvhandoff.config import HandoffConfig
from kvhandoff.errors import TransferFailed
from kvhandoff.ids import RequestId
from kvhandoff.model.layout import Segment
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.plan.routing import replica_for_request
from kvhandoff.runtime.puller import PullResult
from kvhandoff.transport.base import Flight, Transport
from kvhandoff.transport.memory import MemoryFabric
from tests.engines import DecodeEngine, MakeTransport, PrefillEngine, wait_until
from tests.oracle import MARKER, CacheShape, ModelShape, assert_holds, stamp
from tests.sim.pool import MooncakePool

MLA = ModelShape(layers=2, heads=1, content=64)
SHAPE = CacheShape(blocks=200, block_tokens=16)
BYTES_PER_TOKEN = 2 * 64
PATIENCE = 20.0
STRIPE = HandoffConfig(replica_policy="stripe", stripe_min_bytes=4096, slice_bytes=4096)


@contextmanager
def engines(
    make_transport: MakeTransport,
    p_sizes: ParallelSizes,
    d_sizes: ParallelSizes | None = None,
    *,
    config: HandoffConfig | None = None,
    shape: CacheShape = SHAPE,
    lease: float = 30.0,
    d_transport: MakeTransport | None = None,
) -> Iterator[tuple[PrefillEngine, DecodeEngine]]:
    p = PrefillEngine(MLA, p_sizes, shape, make_transport, lease=lease)
    d = DecodeEngine(
        MLA, d_sizes or ParallelSizes(tp=2), SHAPE, d_transport or make_transport, config=config
    )
    try:
        yield p, d
    finally:
        d.close()
        p.close()


def hand_off(p: PrefillEngine, d: DecodeEngine, tokens: int, seed: int) -> list[PullResult]:
    """One prompt that arrives, on every rank; their results."""
    params = p.prefill(tokens, seed)
    blocks = d.blocks(tokens, seed)
    d.submit(d.job(params, blocks))
    results = [result for (result,) in d.results()]
    for rank, result in enumerate(results):
        assert result.failure is None
        assert_holds(d.cache(rank), blocks, 0, tokens, seed)
    d.wipe()
    return results


def failures(d: DecodeEngine) -> list[str]:
    """Why the one pull under way failed, on every rank."""
    found = [result.failure for (result,) in d.results()]
    assert None not in found
    return [failure for failure in found if failure is not None]


class Watched:
    """A transport of D; ``before`` is told whom it is about to read, and may send it elsewhere."""

    def __init__(self, inner: Transport, before: Callable[[str], str]) -> None:
        self._inner, self._before = inner, before

    @property
    def session(self) -> str:
        return self._inner.session

    def register(self, segment: Segment) -> None:
        self._inner.register(segment)

    def connect(self, session: str) -> None:
        self._inner.connect(session)

    def begin(self, session: str, descriptors: Descriptors) -> Flight:
        return self._inner.begin(self._before(session), descriptors)

    def cut(self) -> None:
        self._inner.cut()

    def close(self) -> None:
        self._inner.close()


def pull_fifty(p: PrefillEngine, d: DecodeEngine) -> None:
    """Fifty prompts at once, all of them exact, and some of them after a holder had failed."""
    prompts = []
    for seed in range(1, 51):
        blocks = list(range(3 * seed - 2, 3 * seed + 1))
        prompts.append((p.prefill(40, seed), blocks, seed))
    for params, blocks, _ in prompts:
        d.submit(d.job(params, blocks))
    collected = d.results(50)
    for rank, results in enumerate(collected):
        assert [result.failure for result in results] == [None] * 50
        cache = d.cache(rank)
        found = cache.memory.copy()
        cache.memory[:] = MARKER
        for _, blocks, seed in prompts:
            stamp(cache, blocks, 40, seed)
        assert (found == cache.memory).all()
    everything = [result.report for results in collected for result in results]
    assert sum(report.failovers for report in everything) > 0
    assert {source for report in everything for source in report.sources} == {0, 1}
    p.settle()
    assert sorted(p.free_blocks) == list(range(1, SHAPE.blocks))


def test_a_replica_that_goes_in_the_middle_costs_no_request() -> None:
    """Its data plane is gone for good after a few reads; the other replica serves the rest."""
    fabric = MemoryFabric()
    lock = threading.Lock()
    begun = 0
    with engines(fabric.create, ParallelSizes(pcp=2)) as (p, d):
        doomed = p.transports[0]

        def fault(session: str, piece: int, pieces: int) -> None:
            nonlocal begun
            with lock:
                begun += session == doomed.session
                if begun == 20:
                    doomed.close()

        fabric.fault = fault
        pull_fifty(p, d)
        assert begun > 20


@pytest.mark.mooncake
def test_the_same_over_the_transfer_engine(mooncake_pool: MooncakePool) -> None:
    """From the tenth read on, nobody listens any more where the replica was."""
    lock = threading.Lock()
    begun = 0
    doomed = ""

    def before(session: str) -> str:
        nonlocal begun
        with lock:
            begun += session == doomed
            return "127.0.0.1:1" if session == doomed and begun > 10 else session

    def watched() -> Watched:
        return Watched(mooncake_pool.lend(), before)

    with engines(mooncake_pool.lend, ParallelSizes(pcp=2), d_transport=watched) as (p, d):
        doomed = p.transports[0].session
        pull_fifty(p, d)
        assert begun > 10
    assert mooncake_pool.lent == 0


def test_a_read_that_fails_half_way_is_read_again() -> None:
    """What the first holder wrote is overwritten by the second one, completely."""
    fabric = MemoryFabric()
    with engines(fabric.create, ParallelSizes(pcp=2)) as (p, d):
        params = p.prefill(100, 1)
        blocks = d.blocks(100, 1)
        job = d.job(params, blocks)
        first = p.transports[job.replica].session

        def fault(session: str, piece: int, pieces: int) -> None:
            if session == first and piece == pieces // 2:
                raise TransferFailed("the cable")

        fabric.fault = fault
        d.submit(job)
        for rank, (result,) in enumerate(d.results()):
            assert result.failure is None
            assert result.report.failovers == 1
            assert result.report.sources == [1 - job.replica]
            assert_holds(d.cache(rank), blocks, 0, 100, 1)


def test_when_every_holder_is_gone_only_that_request_fails() -> None:
    """On every rank; a request of another engine, under way at the same time, arrives."""
    fabric = MemoryFabric()
    with engines(fabric.create, ParallelSizes(pcp=2)) as (p, d):
        other = PrefillEngine(MLA, ParallelSizes(), SHAPE, fabric.create)
        try:
            lost, found = p.prefill(40, 1), other.prefill(40, 2)
            for transport in p.transports:
                transport.close()
            d.submit(d.job(lost, [1, 2, 3]))
            d.submit(d.job(found, [4, 5, 6]))
            for rank, results in enumerate(d.results(2)):
                failed = {result.request: result.failure for result in results}
                assert "has gone" in (failed[f"d-{lost.remote_request_id}"] or "")
                assert failed[f"d-{found.remote_request_id}"] is None
                assert_holds(d.cache(rank), [4, 5, 6], 0, 40, 2)
            p.settle()
            other.settle()
        finally:
            other.close()


def test_what_expired_before_it_was_read_never_arrives() -> None:
    """P gave the blocks to another prompt while the read hung; the bytes are not used."""
    fabric = MemoryFabric()
    go, reading = threading.Event(), threading.Event()
    small = replace(SHAPE, blocks=4)
    with engines(fabric.create, ParallelSizes(), shape=small, lease=0.2) as (p, d):

        def fault(session: str, piece: int, pieces: int) -> bool:
            reading.set()
            return not go.is_set()

        fabric.fault = fault
        params = p.prefill(40, 1)
        taken = list(p.held[RequestId(params.remote_request_id)])
        d.submit(d.job(params, [1, 2, 3]))
        assert reading.wait(PATIENCE)
        p.settle()
        again = p.prefill(40, 2)
        assert set(p.held[RequestId(again.remote_request_id)]) == set(taken)
        go.set()
        assert all("expired" in failure for failure in failures(d))
        assert p.desk.counters.get("completed", 0) == 0


def test_a_restarted_engine_is_recognized() -> None:
    """Same name, same port, other addresses: D notices before it reads, and asks anew."""
    fabric = MemoryFabric()
    with engines(fabric.create, ParallelSizes(pcp=2)) as (p, d):
        hand_off(p, d, 40, 1)
        p.close()
        next_life = PrefillEngine(
            MLA, ParallelSizes(tp=2), SHAPE, fabric.create, engine=p.engine, port=p.desk.port
        )
        try:
            assert next_life.incarnation != p.incarnation
            hand_off(next_life, d, 40, 2)
            hand_off(next_life, d, 40, 3)
        finally:
            next_life.close()


def test_a_holder_unlike_the_others_fails_its_requests_only() -> None:
    """A catalog that says so of one replica: reads from it are refused, others go on."""
    with engines(MemoryFabric().create, ParallelSizes(pcp=2)) as (p, d):
        catalog = p.desk._catalog
        odd = catalog.workers[1]
        layers = tuple(msgspec.structs.replace(each, format="packed/1") for each in odd.layers)
        odd = msgspec.structs.replace(odd, layers=layers)
        p.desk._catalog = msgspec.structs.replace(catalog, workers=(catalog.workers[0], odd))
        names = {replica_for_request(f"r{n}", 2): f"r{n}" for n in range(20)}
        d.submit(d.job(p.prefill(40, 1, request=names[1]), [1, 2, 3]))
        assert all("found packed/1 on the prefill" in failure for failure in failures(d))
        params = p.prefill(40, 2, request=names[0])
        d.submit(d.job(params, [1, 2, 3]))
        for rank, (result,) in enumerate(d.results()):
            assert result.failure is None
            assert_holds(d.cache(rank), [1, 2, 3], 0, 40, 2)


def test_asking_before_prefill_has_ended_waits_for_it() -> None:
    """Every rank has asked when the KV comes to be held."""
    fabric = MemoryFabric()
    with engines(fabric.create, ParallelSizes(pcp=2)) as (p, d):
        params = p.announce(40, 1)
        d.submit(d.job(params, [1, 2, 3]))
        wait_until(lambda: p.waiting == len(d.pullers))
        p.hold(params, 1)
        for rank, (result,) in enumerate(d.results()):
            assert result.failure is None
            assert_holds(d.cache(rank), [1, 2, 3], 0, 40, 1)
        p.settle()


@pytest.mark.parametrize("known", [False, True], ids=["at first contact", "later"])
def test_a_desk_that_cannot_be_reached_fails_the_pull_soon(known: bool) -> None:
    """The failure names the desk, on every rank; nothing is written."""
    with engines(MemoryFabric().create, ParallelSizes()) as (p, d):
        if known:
            hand_off(p, d, 40, 1)
        params = p.prefill(40, 2)
        p.desk.close()
        d.submit(d.job(params, [1, 2, 3]))
        for rank, (result,) in enumerate(d.results()):
            assert f"127.0.0.1:{p.desk.port} cannot be reached" in (result.failure or "")
            assert result.seconds < 5
            assert (d.cache(rank).memory == MARKER).all()


def test_a_completed_request_is_not_read_again() -> None:
    """The blocks are somebody else's by now; the second pull is refused and says why."""
    with engines(MemoryFabric().create, ParallelSizes(pcp=2)) as (p, d):
        params = p.prefill(40, 1)
        d.submit(d.job(params, [1, 2, 3]))
        assert [result.failure for (result,) in d.results()] == [None, None]
        p.settle()
        d.wipe()
        d.submit(d.job(params, [1, 2, 3]))
        assert all("has been read or released (released)" in each for each in failures(d))
        assert (d.cache(0).memory == MARKER).all()


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(pcp=2),
        ParallelSizes(pcp=4),
        ParallelSizes(tp=4),
        ParallelSizes(tp=2, pcp=2),
        ParallelSizes(tp=2, pp=2, pcp=2),
    ],
    ids=str,
)
def test_striping_reads_from_every_holder(sizes: ParallelSizes) -> None:
    """PCP replicas and TP copies alike, each byte once."""
    with engines(MemoryFabric().create, sizes, config=STRIPE) as (p, d):
        for seed, tokens in enumerate((700, 513, 640), start=1):
            for result in hand_off(p, d, tokens, seed):
                assert result.report.sources == list(range(sizes.world_size))
                assert result.report.nbytes == tokens * BYTES_PER_TOKEN
            p.settle()


def test_a_short_prompt_is_not_striped() -> None:
    """No holder would have enough to do."""
    with engines(MemoryFabric().create, ParallelSizes(pcp=4), config=STRIPE) as (p, d):
        for result in hand_off(p, d, 40, 1):
            assert len(result.report.sources) == 1


@pytest.mark.parametrize("gone", [0, 1])
def test_striping_goes_on_without_a_holder(gone: int) -> None:
    """The three others share what it has not served."""
    fabric = MemoryFabric()
    with engines(fabric.create, ParallelSizes(pcp=4), config=STRIPE) as (p, d):
        doomed = p.transports[gone].session

        def fault(session: str, piece: int, pieces: int) -> None:
            if session == doomed:
                raise TransferFailed("the cable")

        fabric.fault = fault
        for result in hand_off(p, d, 640, 1):
            assert result.report.sources == [rank for rank in range(4) if rank != gone]
            assert result.report.failovers > 0
        p.settle()


def test_a_slow_holder_serves_fewer_bytes() -> None:
    """One that returns nothing until the other one is through serves its two pieces only."""
    fabric = MemoryFabric()
    with engines(fabric.create, ParallelSizes(pcp=2), ParallelSizes(), config=STRIPE) as (p, d):
        slow, quick = (transport.session for transport in p.transports)
        served: Counter[str] = Counter()

        def fault(session: str, piece: int, pieces: int) -> bool:
            if session == slow and served[quick] < 8:
                return True
            served[session] += piece == pieces - 1
            return False

        fabric.fault = fault
        (result,) = hand_off(p, d, 320, 1)
        assert result.report.sources == [0, 1]
        assert served == {slow: 2, quick: 8}
        p.settle()


LATE = HandoffConfig(stall_after=0.2, cut_after=0.6)


def test_a_pull_waits_for_the_reads_that_it_has_given_up() -> None:
    """One piece of the first replica fails at once, another one is under way; the second replica
    serves both. The pull ends when the piece has landed, not before."""
    fabric = MemoryFabric()
    with engines(fabric.create, ParallelSizes(pcp=2), ParallelSizes()) as (p, d):
        params = p.prefill(100, 1)
        blocks = d.blocks(100, 1)
        job = d.job(params, blocks)
        first = p.transports[job.replica].session
        go = threading.Event()
        asked: Counter[str] = Counter()

        def fault(session: str, piece: int, pieces: int) -> bool:
            asked[session] += 1
            if session != first:
                return False
            if piece == 0:
                raise TransferFailed("the cable")
            return piece == 1 and not go.is_set()

        fabric.fault = fault
        d.submit(job)
        wait_until(lambda: asked[first] > 100)
        assert d.pullers[0].take_results() == []
        go.set()
        ((result,),) = d.results()
        assert (result.failure, result.report.failovers) == (None, 1)
        assert_holds(d.cache(0), blocks, 0, 100, 1)


def test_a_holder_that_hangs_is_cut_and_another_one_read() -> None:
    """Its pieces can land no more; what is read from others at the time is begun again."""
    fabric = MemoryFabric()
    with engines(fabric.create, ParallelSizes(pcp=2), ParallelSizes(), config=LATE) as (p, d):
        params = p.prefill(100, 1)
        blocks = d.blocks(100, 1)
        job = d.job(params, blocks)
        first = p.transports[job.replica].session
        hangs = True
        fabric.fault = lambda session, piece, pieces: session == first and hangs
        d.submit(job)
        ((result,),) = d.results()
        assert (result.failure, result.report.failovers) == (None, 1)
        assert result.report.sources == [1 - job.replica]
        assert_holds(d.cache(0), blocks, 0, 100, 1)
        p.settle()
        d.wipe()
        hangs = False
        hand_off(p, d, 40, 2)


def test_a_holder_that_hangs_keeps_nobody_else_waiting() -> None:
    """64 requests wait for a peer that is silent; one for another peer goes right through, and
    those that have not begun fail as soon as the peer counts as stalled."""
    fabric = MemoryFabric()
    config = HandoffConfig(stall_after=0.5, cut_after=60.0, pieces_in_flight=64)
    with engines(fabric.create, ParallelSizes(), ParallelSizes(), config=config) as (p, d):
        other = PrefillEngine(MLA, ParallelSizes(), SHAPE, fabric.create)
        hung, hangs = p.transports[0].session, True
        fabric.fault = lambda session, piece, pieces: session == hung and hangs
        try:
            for seed in range(1, 65):
                d.submit(d.job(p.prefill(40, seed), [1, 2, 3]))
            good = other.prefill(40, 99)
            d.submit(d.job(good, [4, 5, 6]))
            first = d.results(1)[0][0]
            assert (first.request, first.failure) == (f"d-{good.remote_request_id}", None)
            failed = d.results(63)[0]
            assert all("has sent nothing for" in (result.failure or "") for result in failed)
            assert d.pullers[0].stuck == 1
            hangs = False
            assert [result.failure for result in d.results(1)[0]] == [None]
            assert d.pullers[0].stuck == 0
        finally:
            other.close()
