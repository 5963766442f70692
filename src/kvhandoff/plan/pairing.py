# SPDX-License-Identifier: Apache-2.0
"""Which token slots of a producer row belong to which slots of a consumer row.

Both sides store the tokens of their stripe densely and in order, so a global token position alone
gives a row and a slot on either side. Block lists are indexed by position in the request: D's
prefix hit, null blocks in front of a window, and unequal block sizes need no case of their own.

A *chunk* is a run of consecutive tokens that is dense within one row on both sides. Its length is
the granule: as long as both stripes and both row sizes allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from kvhandoff.errors import ProtocolError
from kvhandoff.model.layout import NULL_BLOCK, LayerLayout
from kvhandoff.model.topology import TokenStripe
from kvhandoff.plan.routing import owned


@dataclass(frozen=True)
class Span:
    """Global token positions ``[start, stop)`` of a request."""

    start: int
    stop: int


@dataclass(frozen=True)
class Chunks:
    """Chunks of equal length: global position of the first token of each, and tokens in each."""

    first: np.ndarray
    tokens: int


def granule(producer: LayerLayout, consumer: LayerLayout) -> int:
    """Tokens in a chunk of two layouts."""
    size = gcd(producer.row_tokens, consumer.row_tokens)
    for stripe in (producer.stripe, consumer.stripe):
        if stripe.count > 1:
            size = gcd(size, stripe.interleave)
    return size


def chunks(span: Span, size: int, producer: TokenStripe, consumer: TokenStripe) -> list[Chunks]:
    """Cut a span into the chunks that both stripes own; the first and last one may be shorter."""
    if span.stop <= span.start:
        return []
    grid = np.arange(span.start // size, -(-span.stop // size), dtype=np.int64) * size
    grid = grid[owned(grid, producer) & owned(grid, consumer)]
    whole = (grid >= span.start) & (grid + size <= span.stop)
    cut = [Chunks(grid[whole], size)] if whole.any() else []
    for first in grid[~whole].tolist():
        start, stop = max(first, span.start), min(first + size, span.stop)
        cut.append(Chunks(np.array([start], dtype=np.int64), stop - start))
    return cut


def locate(layer: LayerLayout, blocks: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Byte offset from the layer's base to the first token of each chunk (head slot 0).

    Args:
        blocks: block ids of the request, by position: entry ``j`` holds the tokens
            ``[j, j + 1) * block_tokens * stripe.count``.
        first: global positions.

    Raises:
        ProtocolError: if a position has no block, a null block or one outside of the cache.
    """
    stripe = layer.stripe
    period = stripe.interleave * stripe.count
    slot = first // period * stripe.interleave + first % stripe.interleave
    ordinal, slot = np.divmod(slot, layer.block_tokens)
    if ordinal.size and int(ordinal.max()) >= blocks.size:
        raise ProtocolError(
            f"layer {layer.name!r}: token {int(first[ordinal.argmax()])} is in block number "
            f"{int(ordinal.max())} of the request, which has {blocks.size} blocks"
        )
    block = blocks[ordinal]
    if block.size and not NULL_BLOCK < int(block.min()) <= int(block.max()) < layer.blocks:
        raise ProtocolError(
            f"layer {layer.name!r}: block ids {int(block.min())}..{int(block.max())} are not all "
            f"in 1..{layer.blocks - 1}"
        )
    row, slot = np.divmod(slot, layer.row_tokens)
    offset: np.ndarray = (
        block * layer.rows_per_block + row
    ) * layer.row_stride + slot * layer.token_stride
    return offset
