# SPDX-License-Identifier: Apache-2.0
"""Which token slots of a producer row belong to which slots of a consumer row.

Both sides store the tokens of their stripe densely and in order, so a global token position alone
gives a row and a slot on either side. Block lists are indexed by position in the request: D's
prefix hit, null blocks in front of a window, and unequal block sizes need no case of their own.

A *chunk* is a run of consecutive tokens that is dense within one row on both sides. Its length is
the granule: as long as both stripes and both row sizes allow. Rows with a format of their own are
one chunk each, and are never cut. Slots that hold several tokens are in or out as a whole: an entry
is stored when its last token is known. A state is one chunk, at the last token that it covers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from kvhandoff.errors import IncompatiblePeer, ProtocolError
from kvhandoff.model.layout import NULL_BLOCK, LayerLayout
from kvhandoff.plan.routing import owned


@dataclass(frozen=True)
class Span:
    """Global token positions ``[start, stop)`` of a request.

    Attributes:
        private: from here on, blocks are the request's own. Before that they are shared with other
            requests (a prefix hit), and nothing may be written to them.
    """

    start: int
    stop: int
    private: int = 0


@dataclass(frozen=True)
class Chunks:
    """Chunks of equal length: global position of the first token of each, and tokens in each."""

    first: np.ndarray
    tokens: int


def check_pair(producer: LayerLayout, consumer: LayerLayout) -> None:
    """Refuse two layouts of which one cannot be cut the way the other one needs.

    Raises:
        IncompatiblePeer: naming what differs and the setting to change.
    """
    name = consumer.name
    _same(
        "bytes of a slot and head",
        producer.content,
        consumer.content,
        name,
        "use the same --dtype, --kv-cache-dtype and number of speculative tokens on both",
    )
    _same("kinds of cache", _kind(producer), _kind(consumer), name, "serve the same model on both")
    if producer.state:
        _same(
            "slots of a state",
            producer.slots,
            consumer.slots,
            name,
            "use the same VLLM_SSM_CONV_STATE_LAYOUT and speculative settings on both",
        )
    else:
        _same(
            "tokens that share a slot",
            producer.slot_tokens,
            consumer.slot_tokens,
            name,
            "serve the same model on both",
        )
        size = granule(producer, consumer)
        if size % producer.slot_tokens:
            raise IncompatiblePeer.because(
                f"entries of layer {name!r} cover {producer.slot_tokens} tokens each and cannot be "
                "cut between decode context parallel ranks",
                found=f"runs of {size} tokens",
                expected=f"a multiple of {producer.slot_tokens}",
                change="set --cp-kv-cache-interleave-size to the block size",
            )
    if producer.format or consumer.format:
        _check_formats(producer, consumer)


def _kind(layer: LayerLayout) -> str:
    return "recurrent state" if layer.state else "slots by token"


def _same(what: str, theirs: object, ours: object, name: str, change: str) -> None:
    if theirs != ours:
        raise IncompatiblePeer.because(
            f"{what} of layer {name!r} differ",
            found=f"{theirs} on the prefill engine",
            expected=f"{ours} as on the decode engine",
            change=change,
        )


def _check_formats(producer: LayerLayout, consumer: LayerLayout) -> None:
    """Rows in a format of their own have to be whole on both sides."""
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


def chunks(span: Span, producer: LayerLayout, consumer: LayerLayout) -> list[Chunks]:
    """Cut a span into the chunks that both layers own; the first and last one may be shorter.

    Raises:
        ProtocolError: if rows have to be moved whole and the first one has tokens that belong to a
            prefix that others may be reading.
    """
    if consumer.state:
        last = np.array([span.stop - 1], dtype=np.int64)
        return [Chunks(last, 1)] if span.stop > span.start else []
    size, each = granule(producer, consumer), producer.slot_tokens
    begin, end = span.start // each * each, span.stop // each * each
    if end <= begin:
        return []
    grid = np.arange(begin // size, -(-end // size), dtype=np.int64) * size
    grid = grid[owned(grid, producer.stripe) & owned(grid, consumer.stripe)]
    whole = (grid >= begin) & (grid + size <= end)
    if producer.format:
        if grid.size and int(grid[0]) < min(span.private, begin):
            raise ProtocolError(
                f"layer {consumer.name!r}: token {span.start} is inside of a row of {size} tokens "
                "that a shared prefix ends in"
            )
        whole[:] = True
    cut = [Chunks(grid[whole], size)] if whole.any() else []
    for first in grid[~whole].tolist():
        start, stop = max(first, begin), min(first + size, end)
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
    if layer.state:
        ordinal = first // layer.block_tokens
        return _blocks(layer, blocks, ordinal, first) * layer.row_stride
    stripe = layer.stripe
    period = stripe.interleave * stripe.count
    slot = first // period * stripe.interleave + first % stripe.interleave
    ordinal, slot = np.divmod(slot, layer.block_tokens)
    block = _blocks(layer, blocks, ordinal, first)
    row, slot = np.divmod(slot, layer.row_tokens)
    row = (block * layer.rows_per_block + row) * layer.row_stride
    offset: np.ndarray = row + slot // layer.slot_tokens * layer.token_stride
    return offset


def _blocks(
    layer: LayerLayout, blocks: np.ndarray, ordinal: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Block ids by number in the request, each checked to be one that may be touched."""
    if ordinal.size and int(ordinal.max()) >= blocks.size:
        raise ProtocolError(
            f"layer {layer.name!r}: token {int(tokens[ordinal.argmax()])} is in block number "
            f"{int(ordinal.max())} of the request, which has {blocks.size} blocks"
        )
    block: np.ndarray = blocks[ordinal]
    if block.size and not NULL_BLOCK < int(block.min()) <= int(block.max()) < layer.blocks:
        raise ProtocolError(
            f"layer {layer.name!r}: block ids {int(block.min())}..{int(block.max())} are not all "
            f"in 1..{layer.blocks - 1}"
        )
    return block
