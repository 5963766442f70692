# SPDX-License-Identifier: Apache-2.0
"""Any pairing of topologies and layouts that can work moves exactly the right bytes."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhandoff.ids import Rank
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.plan.descriptors import Descriptors, Template
from kvhandoff.plan.pairing import Span
from kvhandoff.plan.pieces import cut
from kvhandoff.plan.routing import cover, holder_order
from tests.oracle import (
    CacheShape,
    ModelShape,
    WorkerCache,
    assert_holds,
    blocks_needed,
    make_engine,
    stamp,
)
from tests.profiles import examples

ORDERS = ("LBHN", "LBNH", "LHBN", "BLHN", "BLNH", "BHLN")
HEAD_MAJOR = ("LBHN", "LHBN", "BLHN")
"""Orders in which a head's tokens of a row lie beside each other, as packed rows need it."""

FORMAT = "packed/test"


@st.composite
def sizes(draw: st.DrawFn, heads: int, *, producer: bool) -> ParallelSizes:
    tp = draw(st.sampled_from([t for t in (1, 2, 4) if heads % t == 0 or t % heads == 0]))
    pcp = draw(st.sampled_from((1, 2, 4))) if producer else 1
    allowed = {d for d in ParallelSizes.allowed_dcp(tp, pcp) if _dcp_fits(heads, tp, pcp, d)}
    return ParallelSizes(
        tp=tp,
        pp=draw(st.sampled_from((1, 2))),
        pcp=pcp,
        dcp=draw(st.sampled_from(sorted(allowed))),
    )


def _dcp_fits(heads: int, tp: int, pcp: int, dcp: int) -> bool:
    """Every head has all of its stripes: the ranks that hold a head are whole DCP groups."""
    copies = max(1, tp // heads) * pcp
    return dcp == 1 or copies % dcp == 0


@st.composite
def shapes(draw: st.DrawFn, sizes: ParallelSizes, tokens: int, layers: int) -> CacheShape:
    block = draw(st.sampled_from((4, 8, 16)))
    rows = draw(st.sampled_from((1, 2)))
    partition: tuple[int, ...] = ()
    if sizes.pp == 2 and draw(st.booleans()):
        first = draw(st.integers(1, layers - 1))
        partition = (first, layers - first)
    shape = CacheShape(
        block_tokens=block,
        rows_per_block=rows,
        order=draw(st.sampled_from(ORDERS)),
        padding=draw(st.sampled_from((0, 8, 64))),
        interleave=draw(st.sampled_from((1, 4, block))),
        partition=partition,
    )
    spare = draw(st.integers(1, 4))
    return CacheShape(**(shape.__dict__ | {"blocks": blocks_needed(tokens, shape, sizes) + spare}))


@st.composite
def cases(draw: st.DrawFn):
    heads = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    model = ModelShape(
        layers=draw(st.integers(2, 3)), heads=heads, content=8 * draw(st.integers(1, 2))
    )
    p_sizes, d_sizes = draw(sizes(heads, producer=True)), draw(sizes(heads, producer=False))
    tokens = draw(st.integers(1, 70))
    p_shape = draw(shapes(p_sizes, tokens, model.layers))
    d_shape = draw(shapes(d_sizes, tokens, model.layers))
    hit = draw(st.integers(0, (tokens - 1) // d_shape.block_tokens)) * d_shape.block_tokens
    seed = draw(st.integers(1, 1 << 20))
    return model, p_sizes, p_shape, d_sizes, d_shape, tokens, hit, seed


@st.composite
def packed_cases(draw: st.DrawFn):
    """Like :func:`cases`, with rows of equal length on both sides that are copied whole."""
    model, p_sizes, p_shape, d_sizes, d_shape, tokens, _, seed = draw(cases())
    row = draw(st.sampled_from((4, 8)))
    shapes = []
    for shape, sizes in ((p_shape, p_sizes), (d_shape, d_sizes)):
        rows = draw(st.sampled_from((1, 2)))
        packed = replace(
            shape,
            block_tokens=row * rows,
            rows_per_block=rows,
            order=draw(st.sampled_from(HEAD_MAJOR)),
            interleave=row * draw(st.sampled_from((1, rows))),
        )
        shapes.append(replace(packed, blocks=blocks_needed(tokens, packed, sizes) + 2))
    hit = draw(st.integers(0, (tokens - 1) // row)) * row
    return model, p_sizes, shapes[0], d_sizes, shapes[1], tokens, hit, seed


def pack(caches: dict[Rank, WorkerCache]) -> None:
    """Say of every layer that its rows have a format of their own."""
    for cache in caches.values():
        layers = tuple(msgspec.structs.replace(x, format=FORMAT) for x in cache.layout.layers)
        cache.layout = msgspec.structs.replace(cache.layout, layers=layers)


def scattered(rng: np.random.Generator, tokens: int, shape: CacheShape, sizes: ParallelSizes):
    """Block ids of a request, in any order."""
    return rng.permutation(np.arange(1, shape.blocks))[: blocks_needed(tokens, shape, sizes)]


def lower_in_pieces(
    template: Template, span: Span, pieces: int, p_blocks: np.ndarray, d_blocks: np.ndarray
) -> list[Descriptors]:
    """Plan a span cut into about this many pieces."""
    nbytes = template.nbytes({0: span})
    return [
        template.lower(spans, [p_blocks], [d_blocks])
        for spans in cut(
            {0: span},
            nbytes=nbytes,
            piece_bytes=max(1, nbytes // pieces),
            align=template.align,
        )
    ]


def execute(descriptors: Descriptors, source: WorkerCache, target: WorkerCache) -> None:
    """Copy, refusing addresses outside of either memory."""
    for local, remote, length in zip(
        descriptors.local.tolist(),
        descriptors.remote.tolist(),
        descriptors.length.tolist(),
        strict=True,
    ):
        for address, cache in ((remote, source), (local, target)):
            segment = cache.layout.segments[0]
            assert segment.base <= address
            assert address + length <= segment.base + segment.length
        ctypes.memmove(local, remote, length)


@settings(max_examples=examples(300))
@given(case=cases(), replica=st.integers(0, 3), pieces=st.sampled_from((1, 1, 2, 3, 8)))
def test_every_cell_arrives_and_nothing_else(case, replica: int, pieces: int) -> None:
    model, p_sizes, p_shape, d_sizes, d_shape, tokens, hit, seed = case
    rng = np.random.default_rng(seed)
    producers = make_engine(model, p_sizes, p_shape)
    consumers = make_engine(model, d_sizes, d_shape)
    p_blocks = scattered(rng, tokens, p_shape, p_sizes)
    d_blocks = scattered(rng, tokens, d_shape, d_sizes)
    for cache in producers.values():
        cache.layout.check()
        stamp(cache, p_blocks.tolist(), tokens, seed)
    layouts = [cache.layout for cache in producers.values()]
    for reader, target in consumers.items():
        moved = 0
        for part in cover(target.layout, layouts, p_sizes):
            order = holder_order(
                part, p_sizes, replica=replica, request_id=f"r{seed}", reader=reader
            )
            assert sorted(order) == sorted(part.holders)
            source = producers[order[0]]
            assert source.layout.at.pp < p_sizes.pp
            template = Template(part, source.layout, target.layout)
            span = Span(hit, tokens)
            for descriptors in lower_in_pieces(template, span, pieces, p_blocks, d_blocks):
                execute(descriptors, source, target)
                moved += descriptors.nbytes
        assert_holds(target, d_blocks.tolist(), hit, tokens, seed)
        cells = sum(
            target.owned_tokens(layer.name, hit, tokens).size * len(layer.heads)
            for layer in target.layout.layers
        )
        assert moved == cells * model.content, "a byte was read twice"


@settings(max_examples=examples(100))
@given(case=packed_cases(), replica=st.integers(0, 3), pieces=st.sampled_from((1, 2, 5)))
def test_packed_rows_arrive_whole(case, replica: int, pieces: int) -> None:
    """The rest of the last row comes along as P has it; every other byte stays as it was."""
    model, p_sizes, p_shape, d_sizes, d_shape, tokens, hit, seed = case
    rng = np.random.default_rng(seed)
    producers = make_engine(model, p_sizes, p_shape)
    consumers = make_engine(model, d_sizes, d_shape)
    pack(producers)
    pack(consumers)
    p_blocks = scattered(rng, tokens, p_shape, p_sizes)
    d_blocks = scattered(rng, tokens, d_shape, d_sizes)
    whole = -(-tokens // p_shape.row_tokens) * p_shape.row_tokens
    for cache in producers.values():
        cache.layout.check()
        stamp(cache, p_blocks.tolist(), whole, seed)
    layouts = [cache.layout for cache in producers.values()]
    for reader, target in consumers.items():
        for part in cover(target.layout, layouts, p_sizes):
            order = holder_order(
                part, p_sizes, replica=replica, request_id=f"r{seed}", reader=reader
            )
            source = producers[order[0]]
            template = Template(part, source.layout, target.layout)
            span = Span(hit, tokens)
            for descriptors in lower_in_pieces(template, span, pieces, p_blocks, d_blocks):
                execute(descriptors, source, target)
        assert_holds(target, d_blocks.tolist(), hit, whole, seed)
