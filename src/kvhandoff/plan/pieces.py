# SPDX-License-Identifier: Apache-2.0
"""Cutting a read into pieces, and deciding how many holders share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from kvhandoff.plan.pairing import Span


@dataclass(frozen=True)
class Slicing:
    """How large pieces are, in bytes.

    Attributes:
        largest: no piece is (much) larger, so that planning overlaps reading and no request
            keeps the reading threads to itself.
        smallest: a read is not spread over more holders than gives each this much.
        per_holder: pieces for each of several holders, so that a slow one can take fewer.
    """

    largest: int = 64 << 20
    smallest: int = 1 << 20
    per_holder: int = 4

    def holders(self, nbytes: int, available: int) -> int:
        """How many of ``available`` holders are worth reading from."""
        return max(1, min(available, nbytes // self.smallest))

    def piece_bytes(self, nbytes: int, holders: int) -> int:
        """Size of a piece of a read that ``holders`` share."""
        if holders == 1:
            return self.largest
        even = -(-nbytes // (holders * self.per_holder))
        return min(self.largest, max(self.smallest // self.per_holder, even))


def cut(
    spans: Mapping[int, Span], *, nbytes: int, piece_bytes: int, align: int
) -> list[Mapping[int, Span]]:
    """Cut spans (by KV group) into pieces of about ``piece_bytes``, at multiples of ``align``.

    The groups are cut at the same token positions. Together the pieces are the spans.

    Args:
        nbytes: what all spans together come to.
        align: no cut is made but at multiples of this many tokens.
    """
    begin = min((span.start for span in spans.values()), default=0)
    end = max((span.stop for span in spans.values()), default=0)
    step = max(1, int(piece_bytes / max(nbytes / max(end - begin, 1), 1)) // align) * align
    if end - begin <= step:
        return [spans]
    pieces: list[Mapping[int, Span]] = []
    borders = [begin, *range((begin // align) * align + step, end, step), end]
    for start, stop in pairwise(borders):
        piece = {
            group: Span(max(span.start, start), min(span.stop, stop), span.private)
            for group, span in spans.items()
            if span.start < stop and start < span.stop
        }
        if piece:
            pieces.append(piece)
    return pieces
