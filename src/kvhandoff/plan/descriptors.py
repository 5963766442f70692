# SPDX-License-Identifier: Apache-2.0
"""From a part and two layouts to the descriptors of a read.

For a chunk of tokens and a range of heads there are four granularities, from one run of bytes to
single cells, depending on which of the two dimensions is dense on *both* sides::

    PAGE    [heads][tokens] or [tokens][heads] dense in the same order    1 run per chunk
    HEAD    tokens of one head are dense (LBHNC)                          1 run per head
    TOKEN   heads of one token are dense (LBNHC)                          1 run per token
    CELL    neither                                                       1 run per head and token

(A compressed entry counts as one token here, and so does each slot of a recurrent state.)

Offsets are computed once for all layers with equal geometry and merged where runs touch on both
sides; addresses are the outer sum with the layers' bases. Layers that touch inside a block (the
block-outermost layouts) are fused into one before that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvhandoff.model.layout import LayerLayout, WorkerLayout
from kvhandoff.plan.pairing import Chunks, Span, check_pair, chunks, locate
from kvhandoff.plan.routing import Part


@dataclass(frozen=True)
class Descriptors:
    """Parallel int64 arrays of equal length: addresses here, addresses there, bytes."""

    local: np.ndarray
    remote: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return int(self.length.size)

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return int(self.length.sum())

    @staticmethod
    def join(pieces: Sequence[Descriptors]) -> Descriptors:
        """All descriptors of ``pieces``, in order."""
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            nothing = np.empty(0, dtype=np.int64)
            return Descriptors(nothing, nothing, nothing)
        return Descriptors(
            np.concatenate([piece.local for piece in pieces]),
            np.concatenate([piece.remote for piece in pieces]),
            np.concatenate([piece.length for piece in pieces]),
        )

    def chop(self, longest: int) -> Descriptors:
        """The same bytes in pieces of at most ``longest`` bytes."""
        counts = -(-self.length // longest)
        if not len(self) or int(counts.max()) == 1:
            return self
        first = np.cumsum(counts) - counts
        offset = (np.arange(int(counts.sum())) - np.repeat(first, counts)) * longest
        return Descriptors(
            np.repeat(self.local, counts) + offset,
            np.repeat(self.remote, counts) + offset,
            np.minimum(np.repeat(self.length, counts) - offset, longest),
        )

    def slices(self, max_bytes: int, max_count: int) -> Iterable[Descriptors]:
        """Cut into consecutive slices of about ``max_bytes`` and at most ``max_count`` entries."""
        if len(self) <= max_count and self.nbytes <= max_bytes:
            yield self
            return
        ends = np.cumsum(self.length)
        start = 0
        while start < len(self):
            floor = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, floor + max_bytes, side="right"))
            stop = min(max(stop, start + 1), start + max_count)
            cut = slice(start, stop)
            yield Descriptors(self.local[cut], self.remote[cut], self.length[cut])
            start = stop


@dataclass(frozen=True)
class _Family:
    """Layers of a part that have equal geometry on either side, with the bases of each."""

    producer: LayerLayout
    consumer: LayerLayout
    remote_bases: np.ndarray
    local_bases: np.ndarray


class Template:
    """All that can be computed about reading one part from one producer worker before a request.

    Raises:
        IncompatiblePeer: if a cell has another size or an incompatible format on the two sides.
    """

    def __init__(self, part: Part, producer: WorkerLayout, consumer: WorkerLayout) -> None:
        self.part = part
        theirs = {layer.name: layer for layer in producer.layers}
        ours = {layer.name: layer for layer in consumer.layers}
        pairs: dict[object, list[tuple[LayerLayout, LayerLayout]]] = defaultdict(list)
        for name in part.layers:
            pair = theirs[name], ours[name]
            check_pair(*pair)
            pairs[pair[0].geometry, pair[1].geometry].append(pair)
        self._families = [
            _Family(
                *members[0],
                remote_bases=np.array([p.base for p, _ in members], dtype=np.int64),
                local_bases=np.array([c.base for _, c in members], dtype=np.int64),
            )
            for members in pairs.values()
        ]
        blocks = [
            layer.block_tokens * layer.stripe.count
            for family in self._families
            for layer in (family.producer, family.consumer)
            if not layer.state
        ]
        self.align = lcm(*blocks)
        """Tokens at multiples of which a read can be cut without cutting a block on either side."""

    def nbytes(self, spans: Mapping[int, Span]) -> int:
        """Bytes of these spans, on average over the token stripes."""
        total = 0
        for family in self._families:
            ours, span = family.consumer, spans.get(family.consumer.group)
            if span is None or span.stop <= span.start:
                continue
            stripes = max(family.producer.stripe.count, ours.stripe.count)
            tokens = span.stop - span.start
            slots = ours.slots if ours.state else tokens // ours.slot_tokens // stripes
            total += slots * ours.content * len(self.part.heads) * family.local_bases.size
        return total

    def lower(
        self, spans: Mapping[int, Span], remote_blocks: Sequence[np.ndarray],
        local_blocks: Sequence[np.ndarray],
    ) -> Descriptors:  # fmt: skip
        """Descriptors that read the tokens of ``spans``.

        Args:
            spans: for each of the consumer's KV groups, the tokens to read; groups that are not
                named are not read.
            remote_blocks: the producer's block ids, by its group and by position in the request.
            local_blocks: the consumer's, likewise.
        """
        pieces = []
        for family in self._families:
            span = spans.get(family.consumer.group)
            if span is None:
                continue
            remote = remote_blocks[family.producer.group]
            local = local_blocks[family.consumer.group]
            for cut in chunks(span, family.producer, family.consumer):
                pieces += _lower(family, self.part, cut, remote, local)
        return Descriptors.join(pieces)


def _lower(
    family: _Family, part: Part, cut: Chunks, remote_blocks: np.ndarray, local_blocks: np.ndarray
) -> list[Descriptors]:
    """Descriptors of equal chunks over the layers of a family."""
    theirs, ours, heads = family.producer, family.consumer, len(part.heads)
    first_remote = part.heads.start - theirs.heads.start
    first_local = part.heads.start - ours.heads.start
    remote = locate(theirs, remote_blocks, cut.first) + first_remote * theirs.head_stride
    local = locate(ours, local_blocks, cut.first) + first_local * ours.head_stride

    slots = ours.slots if ours.state else cut.tokens // ours.slot_tokens
    inner_heads, inner_slots, length = _granularity(theirs, ours, heads, slots)
    remote = _spread(remote, inner_heads, theirs.head_stride, inner_slots, theirs.token_stride)
    local = _spread(local, inner_heads, ours.head_stride, inner_slots, ours.token_stride)

    pieces = []
    for fused, remote_bases, local_bases in _fuse(family, length):
        at_remote, at_local, lengths = _merge(remote, local, fused * length)
        pieces.append(
            Descriptors(
                (local_bases[:, None] + at_local).ravel(),
                (remote_bases[:, None] + at_remote).ravel(),
                np.broadcast_to(lengths, (local_bases.size, lengths.size)).ravel(),
            )
        )
    return pieces


def _granularity(
    theirs: LayerLayout, ours: LayerLayout, heads: int, slots: int
) -> tuple[int, int, int]:
    """The coarsest way to read a chunk: runs over heads, runs over slots, bytes in each run."""
    content = theirs.content
    both = (theirs, ours)
    slots_dense = slots == 1 or all(side.token_stride == content for side in both)
    heads_dense = heads == 1 or all(side.head_stride == content for side in both)
    if slots_dense and (heads == 1 or all(s.head_stride == slots * content for s in both)):
        return 1, 1, heads * slots * content
    if heads_dense and (slots == 1 or all(s.token_stride == heads * content for s in both)):
        return 1, 1, heads * slots * content
    if slots_dense and (not heads_dense or slots >= heads):
        return heads, 1, slots * content
    if heads_dense:
        return 1, slots, heads * content
    return heads, slots, content


def _spread(
    offsets: np.ndarray, heads: int, head_stride: int, slots: int, token_stride: int
) -> np.ndarray:
    """Offsets of all runs of each chunk, in chunk, head, token order."""
    if heads == slots == 1:
        return offsets
    inner = np.add.outer(np.arange(heads) * head_stride, np.arange(slots) * token_stride)
    spread: np.ndarray = np.add.outer(offsets, inner.ravel()).ravel()
    return spread


def _merge(
    remote: np.ndarray, local: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge neighbouring runs that touch on both sides."""
    touching = (np.diff(remote) == length) & (np.diff(local) == length)
    starts = np.concatenate(([0], np.flatnonzero(~touching) + 1))
    counts = np.diff(np.concatenate((starts, [remote.size])))
    return remote[starts], local[starts], counts * length


def _fuse(family: _Family, length: int) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    """Group layers that touch on both sides at every run into one longer run.

    Yields the number of layers in a run and the bases of the first layer of each such run.
    """
    order = np.argsort(family.local_bases, kind="stable")
    remote, local = family.remote_bases[order], family.local_bases[order]
    touching = (np.diff(remote) == length) & (np.diff(local) == length)
    starts = np.concatenate(([0], np.flatnonzero(~touching) + 1))
    counts = np.diff(np.concatenate((starts, [remote.size])))
    for count in np.unique(counts).tolist():
        chosen = starts[counts == count]
        yield count, remote[chosen], local[chosen]
