# SPDX-License-Identifier: Apache-2.0
"""What a decode engine reads of each kind of KV group, against a token that looks around itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.plan.needs import Need, margins, spans
from kvhandoff.plan.pairing import Span

tokens = st.integers(0, 200)


def visible(need: Need, position: int) -> set[int]:
    """Positions before ``position`` that the token there attends to."""
    if need.window:
        return {p for p in range(position) if p > position - need.window}
    if need.chunk:
        return {p for p in range(position) if p // need.chunk == position // need.chunk}
    return set(range(position))


@given(
    st.sampled_from(
        [Need(), Need(window=1), Need(window=7), Need(window=40), Need(chunk=8), Need(chunk=33)]
    ),
    tokens,
    tokens,
)
def test_all_later_tokens_find_what_they_look_back_at(need: Need, computed: int, held: int) -> None:
    """What they see of the prompt is here already or is read, and nothing beyond it is read."""
    computed = min(computed, held)
    span = need.span(computed, held)
    read = set(range(span.start, span.stop))
    here = set(range(computed))
    assert visible(need, held) <= read | here
    assert read <= visible(need, held)
    assert not read & here
    for later in range(held, held + 10):
        assert visible(need, later) & set(range(held)) <= read | here
    assert span.private == computed


@given(tokens, st.integers(1, 200))
def test_a_state_is_read_after_its_last_token(computed: int, held: int) -> None:
    """Unless the consumer has the whole of it."""
    span = Need(state=True, block=16).span(computed, held)
    expected = (held - 1, held) if computed < held else (held, held)
    assert (span.start, span.stop) == expected


@given(
    st.sampled_from([Need(block=4), Need(window=7, block=4), Need(chunk=8, block=8)]),
    tokens,
    tokens,
)
def test_span_and_margins_fill_the_blocks_that_are_private(
    need: Need, blocks: int, held: int
) -> None:
    """Each position of a touched block is read, or cleared, or of a prefix that is shared."""
    computed = min(blocks * need.block, held // need.block * need.block)
    span = need.span(computed, held)
    around = need.margins(span)
    if span.stop <= span.start:
        assert around == ()
        return
    parts = [range(each.start, each.stop) for each in (span, *around)]
    covered = [position for part in parts for position in part]
    first, last = span.start // need.block, (span.stop - 1) // need.block
    touched = range(max(first * need.block, computed), (last + 1) * need.block)
    assert sorted(covered) == list(touched)
    assert all(each.private == computed for each in around)


def test_groups_that_need_nothing_are_left_out() -> None:
    """A full hit, and a state that covers it: nothing to read, nothing to clear."""
    needs = (Need(block=4), Need(window=3, block=4), Need(state=True, block=64))
    assert spans(needs, 8, 8) == {}
    assert margins(needs, {}) == {}
    found = spans(needs, 4, 10)
    assert found == {0: Span(4, 10, 4), 1: Span(8, 10, 4), 2: Span(9, 10, 4)}
    assert margins(needs, found) == {0: (Span(10, 12, 4),), 1: (Span(10, 12, 4),)}
