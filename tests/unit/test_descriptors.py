# SPDX-License-Identifier: Apache-2.0
"""Descriptors: as few and as long as both layouts allow, and never a byte too many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvhandoff.errors import IncompatiblePeer
from kvhandoff.ids import Rank
from kvhandoff.model.layout import LayerLayout
from kvhandoff.model.topology import EVERY_TOKEN, HeadRange
from kvhandoff.plan.descriptors import Descriptors, Template
from kvhandoff.plan.pairing import Span
from kvhandoff.plan.routing import Part
from tests.unit.layers import BLOCK, CONTENT, layer, worker

PAGE = BLOCK * CONTENT


def plan(
    producers: Sequence[LayerLayout],
    consumers: Sequence[LayerLayout],
    tokens: int,
    remote: list[int],
    local: list[int],
) -> list[tuple[int, int, int]]:
    """Descriptors ``(local, remote, length)``, sorted."""
    names = tuple(each.name for each in consumers)
    part = Part(names, consumers[0].heads, EVERY_TOKEN, (Rank(0),))
    found = Template(part, worker(*producers), worker(*consumers)).lower(
        {0: Span(0, tokens)}, [np.array(remote)], [np.array(local)]
    )
    columns = (found.local, found.remote, found.length)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def block_outermost(count: int, base: int, *, gap: int = 0) -> list[LayerLayout]:
    """Layers that lie beside each other inside every block, ``gap`` bytes apart."""
    stride = PAGE + gap
    return [layer(f"layer{i}", base + i * stride, row_stride=count * stride) for i in range(count)]


def test_neighbouring_blocks_merge() -> None:
    """Blocks that follow each other on both sides are one descriptor."""
    assert plan([layer()], [layer(base=4096)], 12, [1, 2, 3], [4, 5, 6]) == [
        (4096 + 4 * PAGE, PAGE, 3 * PAGE)
    ]


@pytest.mark.parametrize(
    ("remote", "local"), [([1, 3], [4, 5]), ([1, 2], [4, 6]), ([2, 1], [5, 4]), ([1, 2], [5, 4])]
)
def test_blocks_apart_on_one_side_do_not_merge(remote: list[int], local: list[int]) -> None:
    """A run has to go on at both ends, in the same direction."""
    assert plan([layer()], [layer(base=4096)], 8, remote, local) == sorted(
        (4096 + there * PAGE, here * PAGE, PAGE) for here, there in zip(remote, local, strict=True)
    )


def test_a_partial_block_moves_only_its_tokens() -> None:
    """The last block of five tokens gives one token."""
    assert plan([layer()], [layer()], 5, [1, 3], [4, 6]) == [
        (4 * PAGE, PAGE, PAGE),
        (6 * PAGE, 3 * PAGE, CONTENT),
    ]


def test_layers_of_a_block_fuse() -> None:
    """Layers that touch inside a block on both sides are one run per block ..."""
    ours, theirs = block_outermost(3, 8192), block_outermost(3, 0)
    assert plan(theirs, ours, 8, [1, 5], [2, 4]) == [
        (8192 + 2 * 3 * PAGE, 1 * 3 * PAGE, 3 * PAGE),
        (8192 + 4 * 3 * PAGE, 5 * 3 * PAGE, 3 * PAGE),
    ]


def test_fused_layers_of_neighbouring_blocks_merge() -> None:
    """... and one run altogether where the blocks touch, too."""
    ours, theirs = block_outermost(3, 8192), block_outermost(3, 0)
    assert plan(theirs, ours, 8, [1, 2], [4, 5]) == [(8192 + 4 * 3 * PAGE, 3 * PAGE, 6 * PAGE)]


def other_order() -> list[LayerLayout]:
    """Two layers inside each block, the second one first."""
    return [layer("layer0", PAGE, row_stride=2 * PAGE), layer("layer1", 0, row_stride=2 * PAGE)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (block_outermost(2, 8192, gap=8), block_outermost(2, 0)),
        (block_outermost(2, 8192), block_outermost(2, 0, gap=8)),
        (block_outermost(2, 8192), other_order()),
        (block_outermost(2, 8192), [layer("layer0", 0), layer("layer1", 4096)]),
    ],
    ids=["gap here", "gap there", "other order", "layer-outermost there"],
)
def test_layers_apart_on_one_side_do_not_fuse(
    ours: list[LayerLayout], theirs: list[LayerLayout]
) -> None:
    """Each layer is read by itself then, and lands in its own place."""
    assert plan(theirs, ours, 4, [1], [2]) == sorted(
        (mine.base + 2 * mine.row_stride, yours.base + yours.row_stride, PAGE)
        for mine, yours in zip(ours, theirs, strict=True)
    )


def test_a_partial_block_does_not_fuse() -> None:
    """Layers touch only where the whole page moves: two tokens of each are apart."""
    ours, theirs = block_outermost(2, 8192), block_outermost(2, 0)
    found = plan(theirs, ours, 2, [1], [1])
    assert [length for _, _, length in found] == [2 * CONTENT, 2 * CONTENT]


HEAD_OUTER = {"head_stride": PAGE, "token_stride": CONTENT}
TOKEN_OUTER = {"head_stride": CONTENT, "token_stride": 2 * CONTENT}


@pytest.mark.parametrize(
    ("theirs", "ours", "lengths"),
    [
        (HEAD_OUTER, HEAD_OUTER, [2 * PAGE]),
        (TOKEN_OUTER, TOKEN_OUTER, [2 * PAGE]),
        (HEAD_OUTER, TOKEN_OUTER, [CONTENT] * 8),
        (HEAD_OUTER | {"head_stride": 100}, HEAD_OUTER, [PAGE] * 2),
        (TOKEN_OUTER | {"token_stride": 100}, TOKEN_OUTER, [2 * CONTENT] * 4),
    ],
    ids=["page, heads outside", "page, tokens outside", "cells", "one run a head", "one a token"],
)
def test_granularity_is_as_coarse_as_both_sides_allow(theirs, ours, lengths) -> None:
    """The order of heads and tokens and the gaps between them decide how long a run is."""
    producer = layer(heads=2, row_stride=1024, **theirs)
    consumer = layer(base=1 << 20, heads=2, row_stride=1024, **ours)
    found = plan([producer], [consumer], BLOCK, [1], [1])
    assert [length for _, _, length in found] == lengths


def test_a_head_is_taken_from_its_slot() -> None:
    """Half of the heads on one side: the other side's slots are counted from its first head."""
    producer = layer(heads=4)
    consumer = layer(base=1 << 20, heads=2, first=2)
    found = plan([producer], [consumer], BLOCK, [1], [1])
    assert found == [((1 << 20) + 2 * PAGE, 4 * PAGE + 2 * PAGE, 2 * PAGE)]


def test_cells_of_other_size_are_refused() -> None:
    """The refusal names the layer, both sizes and the settings."""
    part = Part(("layer",), HeadRange(0, 1), EVERY_TOKEN, (Rank(0),))
    with pytest.raises(IncompatiblePeer) as refusal:
        Template(part, worker(layer(content=4)), worker(layer()))
    text = str(refusal.value)
    assert "'layer'" in text
    assert "found 4 on the prefill engine" in text
    assert "expected 8 as on the decode engine" in text
    assert "--kv-cache-dtype" in text


def test_groups_without_a_span_are_not_read() -> None:
    """A span for each KV group: only those given are planned."""
    part = Part(("layer",), HeadRange(0, 1), EVERY_TOKEN, (Rank(0),))
    template = Template(part, worker(layer()), worker(layer()))
    assert len(template.lower({}, [np.array([1])], [np.array([1])])) == 0
    assert len(template.lower({0: Span(4, 4)}, [np.array([1])], [np.array([1])])) == 0


def descriptors(*lengths: int) -> Descriptors:
    length = np.array(lengths, dtype=np.int64)
    place = np.arange(len(lengths), dtype=np.int64) * 100
    return Descriptors(place, place + 10_000, length)


@pytest.mark.parametrize(
    ("lengths", "max_bytes", "max_count", "expected"),
    [
        ((), 10, 10, [[]]),
        ((5, 5), 10, 10, [[5, 5]]),
        ((5, 5, 5), 10, 10, [[5, 5], [5]]),
        ((5, 5, 5), 100, 2, [[5, 5], [5]]),
        ((50, 1, 1), 10, 10, [[50], [1, 1]]),
        ((1, 50, 1), 10, 10, [[1], [50], [1]]),
        ((1, 1, 1), 1, 1, [[1], [1], [1]]),
    ],
)
def test_slices_keep_order_and_bounds(lengths, max_bytes, max_count, expected) -> None:
    """Consecutive slices; one longer than the bound goes alone; nothing is lost."""
    whole = descriptors(*lengths)
    slices = list(whole.slices(max_bytes, max_count))
    assert [piece.length.tolist() for piece in slices] == expected
    joined = Descriptors.join(slices)
    assert joined.local.tolist() == whole.local.tolist()
    assert joined.remote.tolist() == whole.remote.tolist()


def test_join_of_nothing_is_nothing() -> None:
    """No pieces make an empty read."""
    nothing = Descriptors.join([])
    assert len(nothing) == 0
    assert nothing.nbytes == 0
