# SPDX-License-Identifier: Apache-2.0
"""Where the KV cache of a worker lies in memory.

vLLM gives a connector one view ``[B, H, N, C]`` for each layer: block rows, head slots, token
slots, content (K and V of one token and head side by side). Whatever the physical order is, the
address of a cell is affine::

    base + row * row_stride + head * head_stride + token * token_stride      (+ content bytes)

A *block* is what the scheduler counts; a *row* is what the attention kernel counts. One block is
``block_tokens / row_tokens`` rows (both in tokens of this rank, before DCP multiplies them). A row
has ``slots``: one for each token, or one for several (compressed attention stores an entry for
each ``row_tokens / slots`` tokens).

Recurrent layers keep one *state* for each block, not one slot for each token. Convolution and
recurrent part, and within them what belongs to queries, keys and values, are cut by head, each in
its own way; each such piece is a layer of its own here, with a name of its own.

Some attention backends keep to this only from the outside: within one row and head they store the
bytes in an order of their own (vLLM's CPU attention packs keys for its vector units). Such a layer
names its ``format``, and its rows are moved whole, between caches of the same format.
"""

from __future__ import annotations

import msgspec

from kvhandoff.errors import ProtocolError
from kvhandoff.ids import MAX_NAME_LENGTH
from kvhandoff.model.topology import EVERY_TOKEN, Coordinate, HeadRange, TokenStripe

NULL_BLOCK = 0
"""vLLM's placeholder in block tables (``NULL_BLOCK_ID``): nobody's KV, never read."""

_MAX_ADDRESS = 1 << 63


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A registered range of memory, in bytes."""

    base: int
    length: int


class LayerLayout(msgspec.Struct, frozen=True, array_like=True):
    """One layer's cache on one worker; lengths and strides in bytes.

    Attributes:
        name: vLLM's layer name; layers of two engines are paired by it.
        group: index of the KV cache group whose block table addresses the layer.
        heads: KV heads held here, of ``total_heads`` in the model.
        stripe: tokens held here.
        block_tokens: tokens of a scheduler block on this rank.
        row_tokens: tokens of a tensor row; divides ``block_tokens``.
        slots: slots of a tensor row; divides ``row_tokens`` unless the layer keeps states.
        rows: rows of the tensor.
        token_stride: from a slot to the next one.
        content: bytes of one slot and head.
        format: empty if each cell lies where the strides say; else the name of the row format.
        state: whether a block holds one state, after its last computed token, in all of its slots.
    """

    name: str
    group: int
    heads: HeadRange
    total_heads: int
    block_tokens: int
    row_tokens: int
    slots: int
    rows: int
    base: int
    row_stride: int
    head_stride: int
    token_stride: int
    content: int
    stripe: TokenStripe = EVERY_TOKEN
    format: str = ""
    state: bool = False

    @property
    def slot_tokens(self) -> int:
        """Tokens that share a slot; a state's slots belong together and count as one token's."""
        return 1 if self.state else self.row_tokens // self.slots

    @property
    def rows_per_block(self) -> int:
        """Tensor rows that make up one scheduler block."""
        return self.block_tokens // self.row_tokens

    @property
    def blocks(self) -> int:
        """Scheduler blocks in the tensor."""
        return self.rows // self.rows_per_block

    @property
    def geometry(self) -> tuple[object, ...]:
        """Everything but name and base: layers with equal geometry are planned together."""
        return (
            self.group, self.heads, self.stripe, self.block_tokens, self.row_tokens, self.slots,
            self.rows, self.row_stride, self.head_stride, self.token_stride, self.content,
            self.format, self.state,
        )  # fmt: skip

    @property
    def end(self) -> int:
        """First address behind the last cell."""
        return (
            self.base
            + (self.rows - 1) * self.row_stride
            + (len(self.heads) - 1) * self.head_stride
            + (self.slots - 1) * self.token_stride
            + self.content
        )


class WorkerLayout(msgspec.Struct, frozen=True, array_like=True):
    """One worker: its place, its transport address, its registered memory and its layers."""

    at: Coordinate
    session: str
    segments: tuple[Segment, ...]
    layers: tuple[LayerLayout, ...]

    def check(self) -> None:
        """Refuse a layout (it may come from the network) that reaches outside its own memory.

        Raises:
            ProtocolError: with the layer and the numbers that do not fit.
        """
        for layer in self.layers:
            numbers = (
                layer.row_stride, layer.head_stride, layer.token_stride,
                layer.content, layer.block_tokens, layer.row_tokens, layer.slots, layer.rows,
            )  # fmt: skip
            if (
                len(layer.name) > MAX_NAME_LENGTH
                or len(layer.format) > MAX_NAME_LENGTH
                or min(numbers) < 1
                or max(numbers) >= _MAX_ADDRESS
                or layer.block_tokens % layer.row_tokens
                or (layer.state and layer.block_tokens != layer.row_tokens)
                or (not layer.state and layer.row_tokens % layer.slots)
                or layer.rows % layer.rows_per_block
                or layer.heads.stop > layer.total_heads
                or layer.group < 0
                or layer.base < 0
            ):
                raise ProtocolError(f"layer {layer.name[:80]!r} has an impossible layout: {layer}")
            if not any(
                s.base <= layer.base and layer.end <= s.base + s.length < _MAX_ADDRESS
                for s in self.segments
            ):
                raise ProtocolError(
                    f"layer {layer.name!r} spans [{layer.base:#x}, {layer.end:#x}), "
                    f"outside of the registered segments {list(self.segments)}"
                )
