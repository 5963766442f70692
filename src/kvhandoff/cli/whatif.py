# SPDX-License-Identifier: Apache-2.0
"""Two engines that do not exist, and what the planner makes of them.

Every answer comes from the functions that a consumer worker calls: ``cover`` for who could be
read, ``holder_order`` for who is read, ``Template`` for the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.ids import Rank
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.model.rules import CONSUMER, PRODUCER, require_engine
from kvhandoff.model.shapes import CacheShape, ModelShape, blocks_needed, engine_layouts
from kvhandoff.model.topology import Coordinate, HeadRange, ParallelSizes, TokenStripe
from kvhandoff.plan.descriptors import Descriptors, Template
from kvhandoff.plan.pairing import Span
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
class PlannedRead:
    """One part that a consumer worker reads.

    Attributes:
        holders: every producer worker that has the part, the one that is read first.
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
    nbytes: int
    descriptors: tuple[int, int]

    @property
    def source(self) -> Coordinate:
        """The worker that is read."""
        return self.holders[0]


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
    model: ModelShape, prefill: Engine, decode: Engine, prompt: Prompt
) -> Explanation:
    """Plan a request between two engines.

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
            plans = [
                _lower(part, producers[order[0]], consumer, prefill, decode, prompt, gap)
                for gap in (1, 2)
            ]
            reads.append(_describe(model, part, order, prefill.sizes, consumer, plans))
    return Explanation(model, prefill, decode, prompt, replica, tuple(reads))


def _with_room(engine: Engine, tokens: int) -> Engine:
    """The engine with blocks enough for the prompt, twice, beside the null block."""
    blocks = 2 * blocks_needed(tokens, engine.cache, engine.sizes) + 1
    return replace(engine, cache=replace(engine.cache, blocks=blocks))


def _lower(
    part: Part,
    producer: WorkerLayout,
    consumer: WorkerLayout,
    prefill: Engine,
    decode: Engine,
    prompt: Prompt,
    gap: int,
) -> Descriptors:
    """Descriptors of a part where block ids grow by ``gap``."""
    theirs, ours = (
        np.arange(blocks_needed(prompt.tokens, e.cache, e.sizes), dtype=np.int64) * gap + 1
        for e in (prefill, decode)
    )
    template = Template(part, producer, consumer)
    return template.lower({0: Span(prompt.hit, prompt.tokens)}, [theirs], [ours])


def _describe(
    model: ModelShape,
    part: Part,
    order: tuple[Rank, ...],
    sizes: ParallelSizes,
    consumer: WorkerLayout,
    plans: list[Descriptors],
) -> PlannedRead:
    index = {name: number for number, name in enumerate(model.names)}
    return PlannedRead(
        reader=consumer.at,
        layers=tuple(index[name] for name in part.layers),
        heads=part.heads,
        stripe=part.stripe,
        own_stripe=consumer.layers[0].stripe,
        holders=tuple(sizes.coordinate(rank) for rank in order),
        nbytes=plans[0].nbytes,
        descriptors=(len(plans[0]), len(plans[1])),
    )
