# SPDX-License-Identifier: Apache-2.0
"""Cutting spans into pieces, and how many holders share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.plan.pairing import Span
from kvhandoff.plan.pieces import Slicing, cut

MIB = 1 << 20


def put_together(pieces: Sequence[Mapping[int, Span]]) -> dict[int, Span]:
    """The spans that pieces make up, which must follow on each other in every group."""
    whole: dict[int, Span] = {}
    for piece in pieces:
        for group, span in piece.items():
            before = whole.get(group, Span(span.start, span.start))
            assert before.stop == span.start, f"group {group}: {before} then {span}"
            whole[group] = Span(before.start, span.stop)
    return whole


def test_a_small_read_is_one_piece() -> None:
    """Exactly the spans, however they lie."""
    spans = {0: Span(3, 19), 1: Span(8, 19)}
    assert cut(spans, nbytes=160, piece_bytes=160, align=16) == [spans]


def test_pieces_end_at_multiples_of_the_alignment() -> None:
    """The first and the last one may be shorter."""
    pieces = cut({0: Span(5, 70)}, nbytes=650, piece_bytes=320, align=16)
    assert pieces == [{0: Span(5, 32)}, {0: Span(32, 64)}, {0: Span(64, 70)}]


def test_a_piece_is_at_least_one_alignment_long() -> None:
    """Blocks are not cut, however small the pieces are meant to be."""
    pieces = cut({0: Span(0, 12)}, nbytes=12000, piece_bytes=1, align=4)
    assert pieces == [{0: Span(0, 4)}, {0: Span(4, 8)}, {0: Span(8, 12)}]


def test_groups_are_cut_at_the_same_tokens() -> None:
    """A window that begins late is in the later pieces only."""
    pieces = cut({0: Span(0, 32), 1: Span(20, 32)}, nbytes=32, piece_bytes=8, align=8)
    assert pieces == [
        {0: Span(0, 8)},
        {0: Span(8, 16)},
        {0: Span(16, 24), 1: Span(20, 24)},
        {0: Span(24, 32), 1: Span(24, 32)},
    ]


def test_a_gap_between_groups_makes_no_empty_piece() -> None:
    """A piece without anything to read would keep a holder for nothing."""
    pieces = cut({0: Span(0, 4), 1: Span(60, 64, 60)}, nbytes=64, piece_bytes=4, align=4)
    assert pieces == [{0: Span(0, 4)}, {1: Span(60, 64, 60)}]


@pytest.mark.parametrize("spans", [{}, {0: Span(7, 7)}])
def test_nothing_to_read_is_one_piece(spans: dict[int, Span]) -> None:
    """It is read like any other, so that the pull takes the same way."""
    assert cut(spans, nbytes=0, piece_bytes=4096, align=4) == [spans]


@given(
    spans=st.dictionaries(
        st.integers(0, 3),
        st.tuples(st.integers(0, 300), st.integers(1, 300)).map(lambda s: Span(s[0], sum(s))),
        max_size=4,
    ),
    nbytes=st.integers(0, 1 << 25),
    piece_bytes=st.integers(1, 1 << 24),
    align=st.sampled_from((1, 4, 12, 16, 64)),
)
def test_pieces_together_are_the_spans(
    spans: dict[int, Span], nbytes: int, piece_bytes: int, align: int
) -> None:
    """Nothing missing, nothing twice, no cut inside of a block, no piece far too large."""
    pieces = cut(spans, nbytes=nbytes, piece_bytes=piece_bytes, align=align)
    assert put_together(pieces) == spans
    borders = defaultdict(set)
    starts, stops = [s.start for s in spans.values()], [s.stop for s in spans.values()]
    whole = max(stops, default=1) - min(starts, default=0)
    for piece in pieces:
        assert piece or not spans
        for group, span in piece.items():
            assert span.start < span.stop
            borders[group] |= {span.start, span.stop}
            if len(pieces) > 1:
                length = span.stop - span.start
                assert length <= align or length * max(nbytes / whole, 1) <= piece_bytes
    for group, span in spans.items():
        assert all(border % align == 0 for border in borders[group] - {span.start, span.stop})


@pytest.mark.parametrize(
    ("nbytes", "available", "holders"),
    [(0, 4, 1), (MIB, 4, 1), (2 * MIB - 1, 4, 1), (2 * MIB, 4, 2), (100 * MIB, 4, 4), (9, 1, 1)],
)
def test_as_many_holders_as_have_enough_to_do(nbytes: int, available: int, holders: int) -> None:
    """Each of them gets the smallest share at least."""
    assert Slicing().holders(nbytes, available) == holders


def test_sizes_of_pieces() -> None:
    """One holder: the largest. Several: some for each, within the bounds."""
    slicing = Slicing(largest=64 * MIB, smallest=MIB, per_holder=4)
    assert slicing.piece_bytes(10 * MIB, 1) == 64 * MIB
    assert slicing.piece_bytes(80 * MIB, 2) == 10 * MIB
    assert slicing.piece_bytes(2 * MIB, 2) == MIB // 4
    assert slicing.piece_bytes(4096 * MIB, 2) == 64 * MIB
