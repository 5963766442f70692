# SPDX-License-Identifier: Apache-2.0
"""Two engines that do not exist, and what the planner makes of them.

Every answer comes from the functions that a consumer worker calls: ``cover`` for who could be
read, ``holder_order`` for who is read, ``Slicing`` and ``cut`` for who shares a read, ``Template``
for the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.model.rules import CONSUMER, PRODUCER, require_engine
from kvhandoff.model.shapes import CacheShape, ModelShape, blocks_needed, engine_layouts
from kvhandoff.model.topology import Coordinate, HeadRange, ParallelSizes, TokenStripe
from kvhandoff.plan.descriptors import Descriptors, Template
from kvhandoff.plan.pairing import Span
from kvhandoff.plan.pieces import Slicing, cut
from kvhandoff.plan.routing import Part, cover, holder_order, replica_for_request

MAX_TOKENS = 10_000_000
MAX_WORKERS = 4096


@dataclass(frozen=True)
class Engine:
    """Sizes and cache of one engine."""

    sizes: ParallelSizes
    cache: CacheShape


@dataclass(frozen=True)
class Prompt:
    """A request: its length and D's prefix hit in tokens, and P's id of it."""

    tokens: int = 1000
    hit: int = 0
    request: str = "request-0"


@dataclass(frozen=True)
class HolderShare:
    """What one of the holders of a part serves, if all of them are equally fast."""

    holder: Coordinate
    nbytes: int
    pieces: int


@dataclass(frozen=True)
class PlannedRead:
    """One part that a consumer worker reads.

    Attributes:
        holders: every producer worker that has the part, the one that is read first.
        shares: those that are read, and what each of them serves.
        stripe: the producer's token stripe, ``own_stripe`` the consumer's.
        descriptors: their number if the request's blocks are consecutive on both sides, and if no
            two of them are neighbours.
    """

    reader: Coordinate
    layers: tuple[int, ...]
    heads: HeadRange
    stripe: TokenStripe
    own_stripe: TokenStripe
    holders: tuple[Coordinate, ...]
    shares: tuple[HolderShare, ...]
    nbytes: int
    descriptors: tuple[int, int]

    @property
    def source(self) -> Coordinate:
        """The worker that is read, or the first of several."""
        return self.holders[0]

    @property
    def sources(self) -> list[Coordinate]:
        """All workers that are read."""
        return [share.holder for share in self.shares]


@dataclass(frozen=True)
class Explanation:
    """Who reads what from whom."""

    model: ModelShape
    prefill: Engine
    decode: Engine
    prompt: Prompt
    replica: int
    reads: tuple[PlannedRead, ...]

    @property
    def nbytes(self) -> int:
        """Bytes moved for the prompt, all consumer workers together."""
        return sum(read.nbytes for read in self.reads)


def require_pairing(model: ModelShape, prefill: Engine, decode: Engine) -> None:
    """Apply the rules for each engine by itself.

    Raises:
        UnsupportedSetup: naming the engine that breaks a rule.
    """
    for name, role, engine in (("prefill", PRODUCER, prefill), ("decode", CONSUMER, decode)):
        if engine.sizes.world_size > MAX_WORKERS:
            raise UnsupportedSetup.because(
                f"{name} engine: too many workers to list",
                found=f"{engine.sizes.world_size} with {engine.sizes}",
                expected=f"at most {MAX_WORKERS}",
                change="lower its sizes",
            )
        try:
            require_engine(role, engine.sizes, model, engine.cache)
        except UnsupportedSetup as error:
            raise UnsupportedSetup(f"{name} engine: {error}") from None


def explain_pairing(
    model: ModelShape,
    prefill: Engine,
    decode: Engine,
    prompt: Prompt,
    stripe: Slicing | None = None,
) -> Explanation:
    """Plan a request between two engines.

    Args:
        stripe: spread reads over all their holders like this; by default one holder is read.

    Raises:
        UnsupportedSetup: if one engine breaks a rule or the prompt makes no sense.
        IncompatiblePeer: if the holdings of the two do not fit together.
    """
    if not 0 <= prompt.hit < prompt.tokens <= MAX_TOKENS:
        raise UnsupportedSetup.because(
            "such a prompt is not handed off",
            found=f"{prompt.tokens} tokens with a prefix hit of {prompt.hit}",
            expected=f"1..{MAX_TOKENS} tokens and a hit below that",
            change="change --tokens or --hit",
        )
    require_pairing(model, prefill, decode)
    prefill, decode = (_with_room(engine, prompt.tokens) for engine in (prefill, decode))
    producers = engine_layouts(model, prefill.sizes, prefill.cache)
    replica = replica_for_request(prompt.request, prefill.sizes.replicas)
    reads = []
    for reader, consumer in engine_layouts(model, decode.sizes, decode.cache).items():
        for part in cover(consumer, list(producers.values()), prefill.sizes):
            order = holder_order(
                part, prefill.sizes, replica=replica, request_id=prompt.request, reader=reader
            )
            template = Template(part, producers[order[0]], consumer)
            pieces = _pieces(template, prompt, len(order), stripe)
            plans = [_lower(template, pieces[1], prefill, decode, prompt, gap) for gap in (1, 2)]
            holders = tuple(prefill.sizes.coordinate(rank) for rank in order)
            shares = _shares(holders, pieces[0], plans[0])
            reads.append(_describe(model, part, holders, consumer, plans, shares))
    return Explanation(model, prefill, decode, prompt, replica, tuple(reads))


def _with_room(engine: Engine, tokens: int) -> Engine:
    """The engine with blocks enough for the prompt, twice, beside the null block."""
    blocks = 2 * blocks_needed(tokens, engine.cache, engine.sizes) + 1
    return replace(engine, cache=replace(engine.cache, blocks=blocks))


def _pieces(
    template: Template, prompt: Prompt, holders: int, stripe: Slicing | None
) -> tuple[int, list[Mapping[int, Span]]]:
    """How many holders share the read, and its pieces."""
    spans = {0: Span(prompt.hit, prompt.tokens)}
    if stripe is None:
        return 1, [spans]
    nbytes = template.nbytes(spans)
    active = stripe.holders(nbytes, holders)
    return active, cut(
        spans,
        nbytes=nbytes,
        piece_bytes=stripe.piece_bytes(nbytes, active),
        align=template.align,
    )


def _lower(
    template: Template,
    pieces: Sequence[Mapping[int, Span]],
    prefill: Engine,
    decode: Engine,
    prompt: Prompt,
    gap: int,
) -> list[Descriptors]:
    """Descriptors of each piece of a part where block ids grow by ``gap``."""
    theirs, ours = (
        np.arange(blocks_needed(prompt.tokens, e.cache, e.sizes), dtype=np.int64) * gap + 1
        for e in (prefill, decode)
    )
    return [template.lower(spans, [theirs], [ours]) for spans in pieces]


def _shares(
    order: Sequence[Coordinate], active: int, plan: Sequence[Descriptors]
) -> tuple[HolderShare, ...]:
    """Deal the pieces in turn, as equally fast holders would take them."""
    dealt = [(holder, plan[turn::active]) for turn, holder in enumerate(order[:active])]
    return tuple(
        HolderShare(holder, sum(piece.nbytes for piece in pieces), len(pieces))
        for holder, pieces in dealt
        if pieces
    )


def _describe(
    model: ModelShape,
    part: Part,
    holders: tuple[Coordinate, ...],
    consumer: WorkerLayout,
    plans: list[list[Descriptors]],
    shares: tuple[HolderShare, ...],
) -> PlannedRead:
    index = {name: number for number, name in enumerate(model.names)}
    few, many = (sum(map(len, pieces)) for pieces in plans)
    return PlannedRead(
        reader=consumer.at,
        layers=tuple(index[name] for name in part.layers),
        heads=part.heads,
        stripe=part.stripe,
        own_stripe=consumer.layers[0].stripe,
        holders=holders,
        shares=shares,
        nbytes=sum(piece.nbytes for piece in plans[0]),
        descriptors=(few, many),
    )
