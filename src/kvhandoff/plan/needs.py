# SPDX-License-Identifier: Apache-2.0
"""What a consumer has to read of each KV group to go on after the producer's last token.

Full attention needs every token that is not in the consumer's prefix cache. A window needs its
last tokens, a chunk the tokens since it began, a recurrent layer the state after the last token.
Both sides keep block lists by position (vLLM pads them with null blocks), so that a need is
nothing but a span of positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvhandoff.plan.pairing import Span


@dataclass(frozen=True)
class Need:
    """What the layers of a group look back at.

    Attributes:
        window: tokens that the next token attends to, itself included; 0 for all.
        chunk: tokens of a local attention chunk; 0 for no chunks.
        state: whether the layers keep one state instead of tokens.
        block: tokens of a block of this group, over all DCP ranks.
    """

    window: int = 0
    chunk: int = 0
    state: bool = False
    block: int = 1

    def span(self, computed: int, stop: int) -> Span:
        """Positions to read if ``computed`` tokens are here already and ``stop`` are held there."""
        first = 0
        if self.state:
            first = stop - 1
        elif self.window:
            first = stop - self.window + 1
        elif self.chunk:
            first = stop // self.chunk * self.chunk
        return Span(min(max(first, computed), stop), stop, private=computed)

    def margins(self, span: Span) -> tuple[Span, ...]:
        """Positions around a span that share its first or last block, in blocks that are private.

        They are not read, and what they held before must not be seen by a kernel that loads whole
        blocks, or by anybody.
        """
        if self.state or span.stop <= span.start:
            return ()
        begin, end = span.start // self.block * self.block, -(-span.stop // self.block) * self.block
        before = Span(max(begin, span.private), span.start, span.private)
        behind = Span(span.stop, end, span.private)
        return tuple(each for each in (before, behind) if each.stop > each.start)


def spans(needs: Sequence[Need], computed: int, stop: int) -> dict[int, Span]:
    """The span of each group; groups that need nothing are left out."""
    by_group = {group: need.span(computed, stop) for group, need in enumerate(needs)}
    return {group: span for group, span in by_group.items() if span.stop > span.start}


def margins(needs: Sequence[Need], spans: Mapping[int, Span]) -> dict[int, tuple[Span, ...]]:
    """The margins of each group's span; groups without any are left out."""
    found = {group: needs[group].margins(span) for group, span in spans.items()}
    return {group: around for group, around in found.items() if around}
