# SPDX-License-Identifier: Apache-2.0
"""A replica falls silent while it is read, and is heard of again when nobody waits for it."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from kvhandoff.config import HandoffConfig
from kvhandoff.ids import Endpoint, EngineId, PullId, Reader, RequestId, Ticket
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.model.shapes import strides_of, worker_layout
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.plan.pairing import Span
from kvhandoff.plan.routing import replica_for_request
from kvhandoff.protocol.catalog import Catalog
from kvhandoff.protocol.params import HandoffParams
from kvhandoff.runtime.desk import Desk
from kvhandoff.runtime.puller import Puller, PullJob, PullResult
from tests.engines import FINGERPRINT, HOST, wait_until
from tests.oracle import CacheShape, ModelShape, make_worker
from tests.peer import Peer
from tests.sim.pool import MooncakePool

pytestmark = pytest.mark.mooncake

MODEL = ModelShape(layers=1, heads=1, content=1 << 16)
SHAPE = CacheShape(blocks=16, block_tokens=4)
SIZE = strides_of(1, 1, SHAPE, MODEL.content)["total"]
SIZES = ParallelSizes(pcp=2)
BLOCKS = [1, 2, 3, 4, 5, 6, 7, 8]
TOKENS = 32
CONFIG = HandoffConfig(stall_after=0.3, cut_after=1.0)


def test_nothing_of_a_silent_replica_lands_after_its_pull(mooncake_pool: MooncakePool) -> None:
    """The pull ends well through the other replica, P reuses the blocks, and then packets flow
    again: what they would bring is another prompt's KV."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(Peer(SIZE)) for _ in range(2)]
        workers = tuple(
            worker_layout(MODEL, SIZES, rank, SHAPE, base=each.base, session=each.session)
            for rank, each in enumerate(replicas)
        )
        catalog = Catalog(EngineId("p"), "life", FINGERPRINT, SIZES, 60.0, workers)
        desk = Desk(Endpoint(HOST, 0), catalog, max_hold=600)
        stack.callback(desk.close)
        transport = mooncake_pool.lend()
        cache = make_worker(MODEL, ParallelSizes(), 0, SHAPE, transport.session)
        transport.register(cache.layout.segments[0])
        stack.callback(transport.close)
        puller = Puller(cache.layout, Reader(0, 1), EngineId("d"), FINGERPRINT, transport, CONFIG)
        stack.callback(puller.close)

        def pull(name: str) -> PullResult:
            ticket = Ticket("0" * 32)
            desk.hold(Holding(RequestId(name), ticket, (BLOCKS,), TOKENS))
            params = HandoffParams("p", name, HOST, desk.port, TOKENS, 2, 60.0, ticket)
            replica = replica_for_request(name, 2)
            spans = {0: Span(0, TOKENS)}
            puller.submit(PullJob(name, params, PullId(name), replica, spans, (BLOCKS,)))
            found: list[PullResult] = []

            def has_ended() -> bool:
                found.extend(puller.take_results())
                return bool(found)

            wait_until(has_ended)
            return found.pop()

        for replica in replicas:
            replica.memory[:] = 7
        for warm in ("a", "b", "c", "d"):
            assert pull(warm).failure is None
        silent = replicas[replica_for_request("request", 2)]
        silent.stop()
        cache.memory[:] = 0
        result = pull("request")
        assert (result.failure, result.report.failovers) == (None, 1)
        live = cache.memory.reshape(SHAPE.blocks, -1)[BLOCKS]
        assert (live == 7).all()
        wait_until(lambda: RequestId("request") in desk.take_free())
        for replica in replicas:
            replica.memory[:] = 238
        silent.go_on()
        time.sleep(1.0)
        assert (cache.memory.reshape(SHAPE.blocks, -1)[BLOCKS] == 7).all()
