# SPDX-License-Identifier: Apache-2.0
"""Who is read: the replica of a request, the order of holders, and covers that cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections import Counter
from random import Random

import numpy as np
import pytest

from kvhandoff.errors import IncompatiblePeer
from kvhandoff.ids import Rank
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.model.topology import EVERY_TOKEN, HeadRange, ParallelSizes, TokenStripe
from kvhandoff.plan.routing import (
    Part,
    cover,
    holder_order,
    owned,
    replica_for_request,
    stripes_meet,
)
from tests.oracle import CacheShape, ModelShape, make_engine

COUNT = 10_000
_random = Random(7)

SHAPES = {
    "uuid": [str(uuid.UUID(int=_random.getrandbits(128), version=4)) for _ in range(COUNT)],
    "sequential": [str(n) for n in range(COUNT)],
    "same prefix": [f"cmpl-chat-completion-prefill-0-{n:08d}-0" for n in range(COUNT)],
    "0_ prefix": [f"0_{n}" for n in range(COUNT)],
    "1_ prefix": [f"1_{n}" for n in range(COUNT)],
}

# Upper 0.1 % points of the chi-square distribution, by degrees of freedom.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 7: 24.32}


@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_replicas_share_requests_evenly(shape: str, replicas: int) -> None:
    """Whatever request ids look like, each replica serves its share of them."""
    shares = Counter(replica_for_request(request, replicas) for request in SHAPES[shape])
    assert set(shares) == set(range(replicas))
    for share in shares.values():
        assert abs(share / COUNT - 1 / replicas) < 0.03
    even = COUNT / replicas
    chi_square = sum((share - even) ** 2 / even for share in shares.values())
    assert chi_square < CHI_SQUARE[replicas - 1]


def test_all_processes_choose_the_same_replica() -> None:
    """The choice does not depend on Python's hash seed, so separate processes agree."""
    requests = SHAPES["uuid"][:200]
    here = [replica_for_request(request, 8) for request in requests]
    code = (
        "import sys; from kvhandoff.plan.routing import replica_for_request as choose\n"
        "print([choose(request, 8) for request in sys.stdin.read().split()])"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input="\n".join(requests),
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        assert done.stdout.strip() == str(here), done.stderr


def part_of(sizes: ParallelSizes) -> Part:
    """A part that every worker of a one-stage engine holds, as with MLA."""
    return Part(("layer",), HeadRange(0, 1), EVERY_TOKEN, tuple(map(Rank, range(sizes.world_size))))


@pytest.mark.parametrize("replica", range(4))
def test_every_reader_reads_the_chosen_replica(replica: int) -> None:
    """All readers of a request begin with the same PCP rank, and know all holders to fail over."""
    sizes = ParallelSizes(tp=4, pcp=4)
    part = part_of(sizes)
    for request in SHAPES["uuid"][:50]:
        for reader in range(8):
            order = holder_order(part, sizes, replica=replica, request_id=request, reader=reader)
            assert sizes.coordinate(order[0]).pcp == replica
            assert sorted(order) == list(part.holders)
            # The whole replica is tried before another one is.
            pcps = [sizes.coordinate(rank).pcp for rank in order]
            assert pcps == sorted(pcps, key=lambda pcp: (pcp - replica) % 4)


def test_copies_rotate_with_reader_and_request() -> None:
    """Readers of one request start at different TP copies, and requests shift them."""
    sizes = ParallelSizes(tp=4, pcp=2)
    part = part_of(sizes)

    def first(request: str, reader: int) -> int:
        order = holder_order(part, sizes, replica=1, request_id=request, reader=reader)
        return sizes.coordinate(order[0]).tp

    for request in SHAPES["sequential"][:20]:
        assert {first(request, reader) for reader in range(4)} == set(range(4))
    starts = Counter(first(request, 0) for request in SHAPES["sequential"][:2000])
    assert min(starts.values()) > 400


def test_replica_beyond_the_holders_wraps() -> None:
    """A part held by fewer PCP ranks than there are replicas is read from one of them."""
    sizes = ParallelSizes(pcp=4)
    part = Part(("layer",), HeadRange(0, 1), EVERY_TOKEN, (Rank(1), Rank(3)))
    order = holder_order(part, sizes, replica=3, request_id="r", reader=0)
    assert order == (Rank(3), Rank(1))


STRIPES = [
    TokenStripe(index, count, interleave)
    for count in (1, 2, 3, 4)
    for index in range(count)
    for interleave in (1, 2, 3, 16)
]


def test_stripes_meet_where_they_share_a_token() -> None:
    """The answer is that of trying every token of a common period."""
    tokens = np.arange(4 * 3 * 16 * 9)
    for one in STRIPES:
        for other in STRIPES:
            tried = bool(np.any(owned(tokens, one) & owned(tokens, other)))
            assert stripes_meet(one, other) == tried, (one, other)


def test_stripes_from_the_network_cost_no_memory() -> None:
    """A period as long as numbers allow is decided like any other."""
    huge = TokenStripe(1, 4096, (1 << 62) + 1)
    assert stripes_meet(huge, EVERY_TOKEN)
    assert stripes_meet(huge, TokenStripe(4095, 4096, 1))
    assert not stripes_meet(huge, TokenStripe(0, 4096, (1 << 62) + 1))


def layouts(model: ModelShape, sizes: ParallelSizes) -> list[WorkerLayout]:
    return [cache.layout for cache in make_engine(model, sizes, CacheShape()).values()]


def test_cover_groups_layers_and_finds_all_holders() -> None:
    """MLA layers of two stages: one part for each stage, held by every rank of it."""
    sizes = ParallelSizes(tp=2, pp=2, pcp=2)
    (consumer,) = layouts(ModelShape(layers=4), ParallelSizes())
    parts = cover(consumer, layouts(ModelShape(layers=4), sizes), sizes)
    assert [part.holders for part in parts] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [len(part.layers) for part in parts] == [2, 2]


def test_cover_refuses_missing_layers() -> None:
    """The refusal names the layer and the settings that decide which layers exist."""
    (consumer,) = layouts(ModelShape(layers=3), ParallelSizes())
    with pytest.raises(IncompatiblePeer) as refusal:
        cover(consumer, layouts(ModelShape(layers=2), ParallelSizes()), ParallelSizes())
    assert "'model.layers.2.self_attn.attn'" in str(refusal.value)
    assert "found no worker with it, expected the same layers" in str(refusal.value)
    assert "speculative decoding" in str(refusal.value)


def test_cover_refuses_other_head_counts() -> None:
    """The refusal names both numbers and whose they are."""
    (consumer,) = layouts(ModelShape(heads=4), ParallelSizes())
    with pytest.raises(IncompatiblePeer) as refusal:
        cover(consumer, layouts(ModelShape(heads=8), ParallelSizes()), ParallelSizes())
    text = str(refusal.value)
    assert "found [8] on the prefill engine" in text
    assert "expected 4 as on the decode engine" in text
    assert "serve the same model on both" in text


def test_cover_refuses_heads_without_holder() -> None:
    """A producer that describes only some of its workers leaves heads uncovered."""
    sizes = ParallelSizes(tp=2)
    (consumer,) = layouts(ModelShape(heads=4), ParallelSizes())
    with pytest.raises(IncompatiblePeer, match=r"head 2 of layer .* has no holder"):
        cover(consumer, layouts(ModelShape(heads=4), sizes)[:1], sizes)


def test_cover_refuses_incomplete_stripes() -> None:
    """Token shards that are not all there are named."""
    sizes = ParallelSizes(tp=2, dcp=2)
    (consumer,) = layouts(ModelShape(), ParallelSizes())
    with pytest.raises(IncompatiblePeer, match=r"not one complete set: .*index=1"):
        cover(consumer, layouts(ModelShape(), sizes)[1:], sizes)
