# SPDX-License-Identifier: Apache-2.0
"""Whole prefill and decode engines without vLLM: caches in plain memory, the real runtimes."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvhandoff.config import HandoffConfig
from kvhandoff.ids import Endpoint, EngineId, Incarnation, PullId, Rank, Reader, RequestId, Ticket
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.plan.pairing import Span
from kvhandoff.plan.routing import replica_for_request
from kvhandoff.protocol.catalog import Catalog, Fingerprint
from kvhandoff.protocol.params import HandoffParams
from kvhandoff.runtime.desk import Desk
from kvhandoff.runtime.puller import Puller, PullJob, PullResult
from kvhandoff.transport.base import Transport
from tests.oracle import (
    MARKER,
    CacheShape,
    ModelShape,
    WorkerCache,
    blocks_needed,
    make_engine,
    stamp,
)

HOST = "127.0.0.1"
FINGERPRINT = Fingerprint("model", "tiny", "weights", "float32", "auto", "layers")
MakeTransport = Callable[[], Transport]

_numbers = itertools.count()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll, as a model thread would; fail loudly instead of hanging."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)


class PrefillEngine:
    """Workers with registered caches, a desk, and a block allocator that forgets nothing."""

    def __init__(
        self,
        model: ModelShape,
        sizes: ParallelSizes,
        shape: CacheShape,
        make_transport: MakeTransport,
        *,
        engine: str = "",
        lease: float = 30.0,
        port: int = 0,
        key: bytes | None = None,
    ) -> None:
        self.sizes, self.shape = sizes, shape
        self.engine = EngineId(engine or f"prefill-{next(_numbers)}")
        self.transports = [make_transport() for _ in range(sizes.world_size)]
        self.caches = make_engine(model, sizes, shape, [t.session for t in self.transports])
        for rank, cache in self.caches.items():
            for segment in cache.layout.segments:
                self.transports[rank].register(segment)
        self.incarnation = Incarnation(secrets.token_hex(8))
        catalog = Catalog(
            engine=self.engine,
            incarnation=self.incarnation,
            fingerprint=FINGERPRINT,
            sizes=sizes,
            lease=lease,
            workers=tuple(cache.layout for cache in self.caches.values()),
        )
        catalog.check()
        self.lease = lease
        self.desk = Desk(Endpoint(HOST, port), catalog, max_hold=900.0, key=key)
        self.free_blocks = list(range(1, shape.blocks))
        self.held: dict[RequestId, list[int]] = {}
        self.reports = {rank: [] for rank in self.caches}

    def prefill(self, tokens: int, seed: int, *, request: str = "") -> HandoffParams:
        """Compute a prompt's KV on every replica and hold it."""
        params = self.announce(tokens, seed, request=request)
        self.hold(params, seed)
        return params

    def announce(self, tokens: int, seed: int, *, request: str = "") -> HandoffParams:
        """Begin to prefill: blocks are taken, their KV is still to come."""
        request_id = RequestId(request or f"prompt-{next(_numbers)}-{seed}")
        self.desk.announce([request_id])
        count = blocks_needed(tokens, self.shape, self.sizes)
        order = np.random.default_rng(seed).permutation(self.free_blocks)[:count].tolist()
        assert len(order) == count, "the engine of this test is too small"
        self.free_blocks = [block for block in self.free_blocks if block not in set(order)]
        self.held[request_id] = order
        return HandoffParams(
            remote_engine_id=self.engine,
            remote_request_id=request_id,
            remote_host=HOST,
            remote_port=self.desk.port,
            remote_num_tokens=tokens,
            remote_replicas=self.sizes.replicas,
            remote_lease=self.lease,
            ticket=Ticket(secrets.token_hex(16)),
        )

    def hold(self, params: HandoffParams, seed: int) -> None:
        """Prefill has ended: the KV is there."""
        request_id, tokens = RequestId(params.remote_request_id), params.remote_num_tokens
        order = self.held[request_id]
        for cache in self.caches.values():
            stamp(cache, order, tokens, seed)
        self.desk.hold(Holding(request_id, params.proof, (order,), tokens))
        for rank in self.caches:
            if rank != 0:
                self.reports[rank].append(request_id)

    @property
    def waiting(self) -> int:
        """Readers that asked for a request before it was held."""
        return self.desk._ledger._parked

    def step(self) -> None:
        """What vLLM does between steps: collect reports, free what every worker reported."""
        for request in self.desk.take_free():
            self.reports[Rank(0)].append(request)
            self.free_blocks += self.held.pop(request)

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until nothing is held."""

        def nothing_held() -> bool:
            self.step()
            return not self.held

        wait_until(nothing_held, seconds)

    def close(self) -> None:
        self.desk.close()
        for transport in self.transports:
            transport.close()


class DecodeEngine:
    """Workers that pull, and the part of the scheduler that makes jobs."""

    def __init__(
        self,
        model: ModelShape,
        sizes: ParallelSizes,
        shape: CacheShape,
        make_transport: MakeTransport,
        *,
        config: HandoffConfig | None = None,
    ) -> None:
        self.sizes, self.shape = sizes, shape
        self.engine = EngineId(f"decode-{next(_numbers)}")
        self.transports = [make_transport() for _ in range(sizes.world_size)]
        self.caches = make_engine(model, sizes, shape, [t.session for t in self.transports])
        self.pullers: list[Puller] = []
        for rank, cache in self.caches.items():
            for segment in cache.layout.segments:
                self.transports[rank].register(segment)
            self.pullers.append(
                Puller(
                    cache.layout,
                    Reader(rank, sizes.world_size),
                    self.engine,
                    FINGERPRINT,
                    self.transports[rank],
                    config or HandoffConfig(),
                )
            )

    def job(self, params: HandoffParams, blocks: Sequence[int], hit: int = 0) -> PullJob:
        return PullJob(
            request=f"d-{params.remote_request_id}",
            params=params,
            pull=PullId(secrets.token_hex(8)),
            replica=replica_for_request(params.remote_request_id, params.remote_replicas),
            spans={0: Span(hit, params.remote_num_tokens)},
            blocks=(list(blocks),),
        )

    def blocks(self, tokens: int, seed: int) -> list[int]:
        count = blocks_needed(tokens, self.shape, self.sizes)
        return (
            np.random.default_rng(seed)
            .permutation(np.arange(1, self.shape.blocks))[:count]
            .tolist()
        )

    def submit(self, job: PullJob) -> None:
        for puller in self.pullers:
            puller.submit(job)

    def results(self, count: int = 1, seconds: float = 20.0) -> list[list[PullResult]]:
        """For each worker, the results of ``count`` pulls."""
        collected: list[list[PullResult]] = [[] for _ in self.pullers]

        def complete() -> bool:
            for results, puller in zip(collected, self.pullers, strict=True):
                results += puller.take_results()
            return all(len(results) >= count for results in collected)

        wait_until(complete, seconds)
        return collected

    def wipe(self) -> None:
        for cache in self.caches.values():
            cache.memory[:] = MARKER

    def cache(self, rank: int) -> WorkerCache:
        return self.caches[Rank(rank)]

    def close(self) -> None:
        for puller in self.pullers:
            puller.close()
        for transport in self.transports:
            transport.close()
