# SPDX-License-Identifier: Apache-2.0
"""Pairs of whole engines with all kinds of parallel sizes and layouts, over the TransferEngine.

Each pair hands off prompts whose lengths lie around the borders of blocks and token stripes, some
with a prefix hit on D. On every D worker each cell is compared with the oracle, and every byte
outside of the request with what was there before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kvhandoff.cli.matrix import DECODE, PREFILL, family, refusal
from kvhandoff.model.rules import CONSUMER, PRODUCER, require_engine
from kvhandoff.model.shapes import CacheShape, ModelShape, blocks_needed, engine_layouts
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.plan.routing import cover, holder_order, replica_for_request
from tests.engines import DecodeEngine, MakeTransport, PrefillEngine
from tests.oracle import assert_holds
from tests.sim.pool import MooncakePool

GQA2 = ModelShape(layers=3, heads=2, content=16, query_heads=16)
GQA8 = ModelShape(layers=3, heads=8, content=16, query_heads=32)
MLA3 = ModelShape(layers=3, heads=1, content=40, mla=True)
PLAIN = CacheShape(block_tokens=4)
STRIPED = replace(PLAIN, interleave=4)
WIDE = replace(PLAIN, block_tokens=8)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine of one model."""

    model: ModelShape
    p: ParallelSizes
    p_cache: CacheShape
    d: ParallelSizes
    d_cache: CacheShape


def _p(**sizes: int) -> ParallelSizes:
    return ParallelSizes(**sizes)


def matrix_pairs() -> dict[str, Pair]:
    """What docs/support-matrix.md calls supported."""
    pairs = {}
    for title, (model, rows) in PREFILL.items():
        for row in rows:
            for column in DECODE:
                if not refusal(model, row, column):
                    name = f"{family(title)}-{row.key}-to-{column.key}"
                    pairs[name] = Pair(model, row.sizes, row.cache, column.sizes, column.cache)
    return pairs


def layout_pairs() -> dict[str, Pair]:
    """Unequal layouts, kernel blocks, padding and block sizes where sizes are unequal too."""
    caches = {
        "plain": PLAIN,
        "rows2": replace(WIDE, rows_per_block=2),
        "padded": replace(PLAIN, padding=64),
        "token-first": replace(PLAIN, order="LBNH"),
        "head-first": replace(WIDE, order="LHBN", padding=8),
        "block-first": replace(PLAIN, order="BLHN", rows_per_block=2),
        "block-token": replace(WIDE, order="BLNH", padding=8),
        "block-head": replace(PLAIN, order="BHLN"),
    }
    names = list(caches)
    pairs = {}
    for turn, (p_name, p_cache) in enumerate(caches.items()):
        for step in (1, 3):
            d_name = names[(turn + step) % len(names)]
            p, d = [
                (_p(tp=4), _p(tp=2)), (_p(tp=2, pcp=2), _p(tp=4)), (_p(pp=2), _p(tp=2)),
            ][(turn + step) % 3]  # fmt: skip
            pairs[f"gqa8-{p_name}-to-{d_name}"] = Pair(GQA8, p, p_cache, d, caches[d_name])
    return pairs


def stripe_pairs() -> dict[str, Pair]:
    """Token stripes on both sides with unequal counts, interleaves and block sizes."""
    mla = [
        ("dcp4x1-to-dcp2x4", _p(tp=4, dcp=4), PLAIN, _p(tp=2, dcp=2), STRIPED),
        ("dcp2x4-to-dcp4x1", _p(tp=2, dcp=2), STRIPED, _p(tp=4, dcp=4), PLAIN),
        ("dcp3x1-to-dcp2x1", _p(tp=3, dcp=3), PLAIN, _p(tp=2, dcp=2), PLAIN),
        ("dcp2x8-to-dcp4x4", _p(tp=2, dcp=2), replace(WIDE, interleave=8),
         _p(tp=4, dcp=4), STRIPED),
        ("dcp2x2-rows2-to-tp2", _p(tp=4, dcp=2), replace(WIDE, interleave=2, rows_per_block=2),
         _p(tp=2), replace(PLAIN, order="BLHN")),
        ("pcp4dcp4-to-dcp2", _p(pcp=4, dcp=4), PLAIN, _p(tp=2, dcp=2), PLAIN),
        ("pcp2dcp2-tp2-to-dcp2x4", _p(tp=2, pcp=2, dcp=2), PLAIN, _p(tp=2, dcp=2), STRIPED),
        ("pcp2dcp4-tp2-to-dcp4x4", _p(tp=2, pcp=2, dcp=4), STRIPED, _p(tp=4, dcp=4), STRIPED),
        ("pcp2dcp2x8-to-pp2", _p(pcp=2, dcp=2), replace(WIDE, interleave=8), _p(pp=2), PLAIN),
        ("pp2pcp2dcp2-to-tp2pp2", _p(pp=2, pcp=2, dcp=2), STRIPED, _p(tp=2, pp=2), WIDE),
        ("pcp2-to-dcp4x1", _p(tp=2, pcp=2), PLAIN, _p(tp=4, dcp=4), PLAIN),
    ]  # fmt: skip
    gqa = [
        ("tp4dcp2-to-tp2", _p(tp=4, dcp=2), PLAIN, _p(tp=2), PLAIN),
        ("tp8dcp4x4-to-tp4dcp2x1", _p(tp=8, dcp=4), STRIPED, _p(tp=4, dcp=2), PLAIN),
        ("pcp2-to-tp4dcp2x4", _p(tp=2, pcp=2), PLAIN, _p(tp=4, dcp=2), STRIPED),
        ("tp4dcp2x4-to-tp8dcp4x1", _p(tp=4, dcp=2), STRIPED, _p(tp=8, dcp=4), WIDE),
        ("tp8pcp2dcp2-to-tp1", _p(tp=4, pcp=2, dcp=2), PLAIN, _p(), WIDE),
    ]
    return {f"mla3-{name}": Pair(MLA3, *rest) for name, *rest in mla} | {
        f"gqa2-{name}": Pair(GQA2, *rest) for name, *rest in gqa
    }


def stage_pairs() -> dict[str, Pair]:
    """Pipeline stages that are cut elsewhere on the other side."""
    first, last = replace(PLAIN, partition=(1, 2)), replace(PLAIN, partition=(2, 1))
    return {
        "gqa8-pp2-1-2-to-pp2-2-1": Pair(GQA8, _p(pp=2), first, _p(pp=2), last),
        "gqa8-pp3-to-pp2": Pair(GQA8, _p(tp=2, pp=3), PLAIN, _p(pp=2), first),
        "gqa8-pp2pcp2-to-pp3": Pair(GQA8, _p(pp=2, pcp=2), last, _p(tp=2, pp=3), PLAIN),
        "mla3-pp3pcp2-to-tp2pp2": Pair(MLA3, _p(pp=3, pcp=2), PLAIN, _p(tp=2, pp=2), last),
        "mla3-pp2pcp4-to-tp2": Pair(MLA3, _p(pp=2, pcp=4), first, _p(tp=2), PLAIN),
        "mla3-tp2pp2pcp2-to-pp3": Pair(MLA3, _p(tp=2, pp=2, pcp=2), first, _p(pp=3), PLAIN),
    }


PAIRS = matrix_pairs() | layout_pairs() | stripe_pairs() | stage_pairs()


def prompts(pair: Pair) -> list[tuple[int, int]]:
    """``(tokens, hit)`` around the borders of blocks, which with DCP are borders of stripes."""
    p_block = pair.p_cache.block_tokens * pair.p.dcp
    d_block = pair.d_cache.block_tokens * pair.d.dcp
    return [
        (1, 0),
        (p_block - 1, 0),
        (p_block + 1, 0),
        (2 * d_block, 0),
        (2 * d_block + pair.d_cache.interleave + 1, d_block),
        (3 * d_block - 1, 2 * d_block),
    ]


@pytest.fixture
def make_transport(mooncake_pool: MooncakePool) -> Iterator[MakeTransport]:
    yield mooncake_pool.lend
    assert mooncake_pool.lent == 0, "a transport was not given back"


def with_room(cache: CacheShape, sizes: ParallelSizes, tokens: int) -> CacheShape:
    return replace(cache, blocks=blocks_needed(tokens, cache, sizes) + 4)


def hand_off(pair: Pair, p: PrefillEngine, d: DecodeEngine, seed: int) -> None:
    """One prompt from P to D, with the oracle on every D worker."""
    tokens, hit = prompts(pair)[seed - 1]
    params = p.prefill(tokens, seed)
    blocks = d.blocks(tokens, seed)
    job = d.job(params, blocks, hit)
    d.submit(job)
    for rank, (result,) in enumerate(d.results()):
        assert result.failure is None
        sources = {pair.p.coordinate(source) for source in result.report.sources}
        assert all(at.pp < pair.p.pp for at in sources)
        if pair.p.replicas > 1:
            assert {at.pcp for at in sources} <= {job.replica}
        assert_holds(d.cache(rank), blocks, hit, tokens, seed)
    d.wipe()
    p.settle()


@pytest.mark.mooncake
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_every_cell_arrives_on_every_decode_worker(
    pair: Pair, make_transport: MakeTransport
) -> None:
    require_engine(PRODUCER, pair.p, pair.model, pair.p_cache)
    require_engine(CONSUMER, pair.d, pair.model, pair.d_cache)
    longest = max(tokens for tokens, _ in prompts(pair))
    p_cache = with_room(pair.p_cache, pair.p, longest)
    d_cache = with_room(pair.d_cache, pair.d, longest)
    count = len(prompts(pair))
    p = PrefillEngine(pair.model, pair.p, p_cache, make_transport)
    d = DecodeEngine(pair.model, pair.d, d_cache, make_transport)
    try:
        for seed in range(1, count + 1):
            hand_off(pair, p, d, seed)
        p.step()  # a second report of a request would come now, and fail here
        assert sorted(p.free_blocks) == list(range(1, p_cache.blocks))
        assert len(p.reports) == pair.p.world_size
        for reports in p.reports.values():
            assert len(reports) == count
            assert max(Counter(reports).values()) == 1
        assert p.desk.counters["completed"] == count
    finally:
        d.close()
        p.close()


def test_there_are_enough_pairs_of_each_kind() -> None:
    assert len(PAIRS) >= 150
    pairs = PAIRS.values()
    assert any(pair.p.tp > pair.d.tp for pair in pairs)
    assert any(pair.p.tp < pair.d.tp for pair in pairs)
    assert {pair.p.pcp for pair in pairs} >= {1, 2, 4}
    assert any(pair.p.dcp > 1 and pair.d.dcp > 1 and pair.p.dcp != pair.d.dcp for pair in pairs)
    assert any(pair.p.pcp > 1 and pair.p.dcp > 1 for pair in pairs)


@pytest.mark.parametrize(
    ("model", "p"),
    [(MLA3, _p(tp=2, pcp=4)), (MLA3, _p(tp=4, pp=3, pcp=2)), (GQA8, _p(tp=2, pp=2, pcp=2))],
    ids=str,
)
def test_all_decode_workers_choose_one_replica_inside_the_stages(
    model: ModelShape, p: ParallelSizes
) -> None:
    producers = list(engine_layouts(model, p, PLAIN).values())
    d = _p(tp=4, pp=2)
    parts = {
        rank: cover(layout, producers, p)
        for rank, layout in engine_layouts(model, d, PLAIN).items()
    }
    chosen: Counter[int] = Counter()
    for number in range(10_000):
        request = f"cmpl-{number:x}-0"
        replica = replica_for_request(request, p.replicas)
        first = [
            p.coordinate(
                holder_order(part, p, replica=replica, request_id=request, reader=reader)[0]
            )
            for reader, parts_of in parts.items()
            for part in parts_of
        ]
        assert {at.pcp for at in first} == {replica}
        assert max(at.pp for at in first) < p.pp
        chosen[replica] += 1
    assert min(chosen.values()) > 10_000 / p.replicas * 0.9
