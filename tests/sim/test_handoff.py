# SPDX-License-Identifier: Apache-2.0
"""Whole runtimes on both sides, every worker registered separately, over a real transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from kvhandoff.model.topology import ParallelSizes
from kvhandoff.transport.memory import MemoryFabric
from tests.engines import DecodeEngine, MakeTransport, PrefillEngine
from tests.oracle import CacheShape, ModelShape, assert_holds

LENGTHS = (1, 15, 16, 17, 64, 65, 100)


@pytest.fixture(
    params=["memory", pytest.param("mooncake", marks=pytest.mark.mooncake)], scope="module"
)
def make_transport(request: pytest.FixtureRequest) -> Iterator[MakeTransport]:
    if request.param == "memory":
        yield MemoryFabric().create
        return
    yield request.getfixturevalue("mooncake_pool").lend


@pytest.mark.parametrize("heads", [1, 4], ids=["mla", "gqa"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (ParallelSizes(), ParallelSizes()),
        (ParallelSizes(pcp=2), ParallelSizes()),
        (ParallelSizes(pcp=4), ParallelSizes()),
        (ParallelSizes(tp=2, pcp=2), ParallelSizes(tp=2)),
    ],
    ids=str,
)
def test_all_bytes_arrive_and_all_blocks_return(
    heads: int, prefill: ParallelSizes, decode: ParallelSizes, make_transport: MakeTransport
) -> None:
    model = ModelShape(layers=3, heads=heads, content=64)
    shape = CacheShape(blocks=64, block_tokens=16)
    p = PrefillEngine(model, prefill, shape, make_transport)
    d = DecodeEngine(model, decode, shape, make_transport)
    try:
        replicas: Counter[int] = Counter()
        for seed, tokens in enumerate(LENGTHS * 2, start=1):
            params = p.prefill(tokens, seed, request=f"cmpl-{seed}")
            blocks = d.blocks(tokens, seed)
            job = d.job(params, blocks)
            d.submit(job)
            for rank, (result,) in enumerate(d.results()):
                assert result.failure is None
                sources = {prefill.coordinate(source) for source in result.report.sources}
                assert {at.pcp for at in sources} == {job.replica}
                assert_holds(d.cache(rank), blocks, 0, tokens, seed)
                replicas[job.replica] += 1
            d.wipe()
            p.settle()
        assert set(replicas) == set(range(prefill.pcp))
        assert sorted(p.free_blocks) == list(range(1, shape.blocks))
        for reports in p.reports.values():
            assert max(Counter(reports).values()) == 1
            assert len(reports) == len(LENGTHS) * 2
        assert p.desk.counters["completed"] == len(LENGTHS) * 2
        assert p.desk.counters.get("expired", 0) == 0
    finally:
        d.close()
        p.close()
