# SPDX-License-Identifier: Apache-2.0
"""Which producer workers a consumer worker reads from.

There is one question, whatever the parallel sizes are: which holdings of the producer tile this
worker's holding exactly? :func:`cover` answers it once per peer. PCP replicas, TP copies of an
MLA latent and TP copies of a replicated GQA head then are the same thing, *equivalent holders* of
a part, and choosing among them is a question of load that :func:`holder_order` answers per request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd

import numpy as np

from kvhandoff.errors import IncompatiblePeer
from kvhandoff.ids import Rank
from kvhandoff.model.layout import LayerLayout, WorkerLayout
from kvhandoff.model.topology import HeadRange, ParallelSizes, TokenStripe


@dataclass(frozen=True)
class Part:
    """One piece of a consumer worker's holding, and every producer worker that holds all of it.

    Attributes:
        layers: names of the layers, in the consumer's order.
        heads: heads to read, counted over the whole model.
        stripe: the producer's token stripe; what is read is its tokens that the consumer's has too.
        holders: producer ranks, equivalent to each other for this part.
    """

    layers: tuple[str, ...]
    heads: HeadRange
    stripe: TokenStripe
    holders: tuple[Rank, ...]


def stable_hash(text: str, purpose: str) -> int:
    """A 64-bit hash that is the same in every process, independent for each ``purpose``."""
    digest = blake2b(text.encode(), digest_size=8, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little")


def replica_for_request(request_id: str, replicas: int) -> int:
    """The PCP replica that serves a request, from the producer's request id alone."""
    return stable_hash(request_id, "kvh-replica") % replicas


def cover(
    consumer: WorkerLayout, producers: Sequence[WorkerLayout], sizes: ParallelSizes
) -> tuple[Part, ...]:
    """Tile the consumer worker's holding with producer holdings: nothing missing, nothing twice.

    Args:
        producers: every worker of the producer engine, in any order.
        sizes: the producer's parallel sizes, which turn coordinates into ranks.

    Raises:
        IncompatiblePeer: if a layer, head or token has no holder, naming it.
    """
    holders_of: dict[str, list[tuple[Rank, LayerLayout]]] = defaultdict(list)
    for worker in producers:
        for layer in worker.layers:
            holders_of[layer.name].append((sizes.rank(worker.at), layer))

    layers_of: dict[tuple[HeadRange, TokenStripe, tuple[Rank, ...]], list[str]] = defaultdict(list)
    for wanted in consumer.layers:
        for heads, stripe, ranks in _tile(wanted, holders_of.get(wanted.name, [])):
            layers_of[heads, stripe, ranks].append(wanted.name)
    return tuple(
        Part(tuple(names), heads, stripe, ranks)
        for (heads, stripe, ranks), names in layers_of.items()
    )


def _tile(
    wanted: LayerLayout, holders: Sequence[tuple[Rank, LayerLayout]]
) -> list[tuple[HeadRange, TokenStripe, tuple[Rank, ...]]]:
    """Tile one layer: for each token stripe that matters, sweep over the heads."""
    if not holders:
        raise IncompatiblePeer.because(
            f"the prefill engine does not hold layer {wanted.name!r}",
            found="no worker with it",
            expected="the same layers on both sides",
            change="serve the same model with the same speculative decoding settings on both",
        )
    totals = {layer.total_heads for _, layer in holders}
    if totals != {wanted.total_heads}:
        raise IncompatiblePeer.because(
            f"KV heads of layer {wanted.name!r} differ",
            found=f"{sorted(totals)} on the prefill engine",
            expected=f"{wanted.total_heads} as on the decode engine",
            change="serve the same model on both",
        )
    ranks_of: dict[tuple[TokenStripe, HeadRange], list[Rank]] = defaultdict(list)
    for rank, layer in holders:
        ranks_of[layer.stripe, layer.heads].append(rank)
    tiles = []
    for stripe in _stripes(wanted, {stripe for stripe, _ in ranks_of}):
        ranges = sorted(heads for of, heads in ranks_of if of == stripe)
        cursor = wanted.heads.start
        for heads in ranges:
            if heads.start <= cursor < min(heads.stop, wanted.heads.stop):
                stop = min(heads.stop, wanted.heads.stop)
                tiles.append(
                    (HeadRange(cursor, stop), stripe, tuple(sorted(ranks_of[stripe, heads])))
                )
                cursor = stop
        if cursor < wanted.heads.stop:
            raise IncompatiblePeer(
                f"head {cursor} of layer {wanted.name!r}, token stripe {stripe.index} of "
                f"{stripe.count}, has no holder on the prefill engine (heads there: {ranges})"
            )
    return tiles


def _stripes(wanted: LayerLayout, held: set[TokenStripe]) -> list[TokenStripe]:
    """The producer's stripes that share tokens with the consumer's, checked to be complete."""
    shapes = {(stripe.count, stripe.interleave) for stripe in held}
    if len(shapes) != 1 or {s.index for s in held} != set(range(next(iter(shapes))[0])):
        raise IncompatiblePeer(
            f"token stripes of layer {wanted.name!r} on the prefill engine are not one complete "
            f"set: {sorted(held)}"
        )
    return [stripe for stripe in sorted(held) if stripes_meet(stripe, wanted.stripe)]


def stripes_meet(one: TokenStripe, other: TokenStripe) -> bool:
    """Whether any token is in both stripes.

    Runs of the two begin ``apart`` plus any multiple of ``step`` tokens from each other; they
    meet if the smallest such distance that can overlap does. (Numbers may come from the network:
    this costs the same for all of them.)
    """
    step = gcd(one.count * one.interleave, other.count * other.interleave)
    apart = one.index * one.interleave - other.index * other.interleave
    nearest = (apart + one.interleave - 1) % step - (one.interleave - 1)
    return nearest < other.interleave


def owned(tokens: np.ndarray, stripe: TokenStripe) -> np.ndarray:
    """Mask of the token positions that belong to the stripe."""
    mask: np.ndarray = tokens // stripe.interleave % stripe.count == stripe.index
    return mask


def holder_order(
    part: Part, sizes: ParallelSizes, *, replica: int, request_id: str, reader: int
) -> tuple[Rank, ...]:
    """All holders of a part, the one to read first, then those to fail over to.

    The replica (PCP rank) comes first and is the same for every reader of the request. Among the
    TP copies inside it the request and the reader decide, so that load spreads; the two draws are
    independent.
    """
    by_pcp: dict[int, list[Rank]] = defaultdict(list)
    for rank in part.holders:
        by_pcp[sizes.coordinate(rank).pcp].append(rank)
    replicas = [by_pcp[pcp] for pcp in sorted(by_pcp)]
    copy = stable_hash(request_id, "kvh-copy") + reader
    first = replica % len(replicas)
    order: list[Rank] = []
    for copies in replicas[first:] + replicas[:first]:
        turn = copy % len(copies)
        order += copies[turn:] + copies[:turn]
    return tuple(order)
