# SPDX-License-Identifier: Apache-2.0
"""Which token slots of a producer row belong to which slots of a consumer row.

Both sides store the tokens of their stripe densely and in order, so a global token position alone
gives a row and a slot on either side. Block lists are indexed by position in the request: D's
prefix hit, null blocks in front of a window, and unequal block sizes need no case of their own.

A *chunk* is a run of consecutive tokens that is dense within one row on both sides. Its length is
the granule: as long as both stripes and both row sizes allow. Rows with a format of their own are
one chunk each, and are never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from kvhandoff.errors import IncompatiblePeer, ProtocolError
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


def check_formats(producer: LayerLayout, consumer: LayerLayout) -> None:
    """Refuse two layouts of which one cannot be cut the way the other one needs.

    Raises:
        IncompatiblePeer: naming what differs and the setting to change.
    """
    if not producer.format and not consumer.format:
        return
    for what, theirs, ours, change in (
        (
            "the attention backend's row format",
            producer.format or "plain cells",
            consumer.format or "plain cells",
            "use the same --attention-backend on both",
        ),
        (
            "tokens in a kernel block",
            producer.row_tokens,
            consumer.row_tokens,
            "use the same --block-size on both",
        ),
    ):
        if theirs != ours:
            raise IncompatiblePeer.because(
                f"layer {consumer.name!r} is stored in rows that can only be copied whole, and "
                f"{what} differs",
                found=f"{theirs} on the prefill engine",
                expected=f"{ours} as on the decode engine",
                change=change,
            )
    for side, layer in (("prefill", producer), ("decode", consumer)):
        if layer.token_stride != layer.content:
            raise IncompatiblePeer.because(
                f"rows of layer {layer.name!r} are stored in format {layer.format}",
                found=f"heads inside of tokens on the {side} engine",
                expected="tokens inside of heads",
                change="use a head-major KV cache layout (LBHNC) there",
            )
        if layer.stripe.count > 1 and layer.stripe.interleave % layer.row_tokens:
            raise IncompatiblePeer.because(
                f"rows of layer {layer.name!r} are stored in format {layer.format} and cannot be "
                "cut between decode context parallel ranks",
                found=f"--cp-kv-cache-interleave-size {layer.stripe.interleave} on the {side} "
                "engine",
                expected=f"a multiple of {layer.row_tokens}",
                change="set --cp-kv-cache-interleave-size to the block size",
            )


def granule(producer: LayerLayout, consumer: LayerLayout) -> int:
    """Tokens in a chunk of two layouts."""
    size = gcd(producer.row_tokens, consumer.row_tokens)
    for stripe in (producer.stripe, consumer.stripe):
        if stripe.count > 1:
            size = gcd(size, stripe.interleave)
    return size


def chunks(
    span: Span, size: int, producer: TokenStripe, consumer: TokenStripe, *, whole_rows: bool = False
) -> list[Chunks]:
    """Cut a span into the chunks that both stripes own; the first and last one may be shorter.

    Args:
        whole_rows: take the last chunk whole, though the span ends inside of it.

    Raises:
        ProtocolError: if whole rows are asked for and the span begins inside of one, whose first
            tokens belong to a prefix that others may be reading.
    """
    if span.stop <= span.start:
        return []
    grid = np.arange(span.start // size, -(-span.stop // size), dtype=np.int64) * size
    grid = grid[owned(grid, producer) & owned(grid, consumer)]
    whole = (grid >= span.start) & (grid + size <= span.stop)
    if whole_rows:
        if span.start % size:
            raise ProtocolError(f"token {span.start} is inside of a row of {size} tokens")
        whole[:] = True
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
