# SPDX-License-Identifier: Apache-2.0
"""Layouts: derived sizes, and what a layout from the network must not say."""

from __future__ import annotations

from typing import Any

import pytest

from kvhandoff.errors import ProtocolError
from kvhandoff.model.layout import Segment
from tests.unit.layers import BLOCK, CONTENT, ROWS, layer, worker

SIZE = ROWS * BLOCK * CONTENT


def test_blocks_are_counted_in_rows() -> None:
    """A scheduler block may be several rows of the tensor."""
    halved = layer(block_tokens=8, row_tokens=4, rows=10)
    assert halved.rows_per_block == 2
    assert halved.blocks == 5


def test_end_is_behind_the_last_cell() -> None:
    """For a dense layer it is base plus size; strides with gaps end at the last content."""
    assert layer(base=100).end == 100 + SIZE
    assert layer(base=100, heads=3).end == 100 + 3 * SIZE
    assert layer(row_stride=1000).end == (ROWS - 1) * 1000 + BLOCK * CONTENT


def test_geometry_ignores_name_and_place() -> None:
    """Layers that differ only in name and base are planned together."""
    assert layer("a", 0).geometry == layer("b", 4096).geometry
    assert layer("a", 0).geometry != layer("a", 0, row_stride=4096).geometry


def test_layout_that_fits_is_accepted() -> None:
    """Exactly filled segments are fine, and layers may lie in different ones."""
    first, second = layer("a", 4096), layer("b", 1 << 40)
    worker(first).check()
    worker(first, second, segments=(Segment(4096, SIZE), Segment(1 << 40, SIZE))).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"row_stride": 0},
        {"head_stride": -8},
        {"token_stride": 0},
        {"content": 0},
        {"rows": 0},
        {"row_tokens": 0},
        {"block_tokens": 0},
        {"row_stride": 1 << 63},
        {"block_tokens": 6},
        {"block_tokens": 8, "rows": 7},
        {"total_heads": 0},
        {"group": -1},
        {"name": "n" * 513},
    ],
    ids=str,
)
def test_impossible_numbers_are_refused(changes: dict[str, Any]) -> None:
    """Numbers that no cache can have are refused with the layer's name, before they are used."""
    bad = layer(**changes)
    segment = Segment(0, 1 << 62)
    with pytest.raises(ProtocolError, match=r"layer '[a-z]+' has an impossible layout"):
        worker(bad, segments=(segment,)).check()


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(4096, SIZE - 1),),
        (Segment(4097, SIZE),),
        (Segment(4096, SIZE // 2), Segment(4096 + SIZE // 2, SIZE // 2)),
        (Segment(4096, 1 << 63),),
        (Segment(4096, -1),),
    ],
    ids=["short", "late", "split", "beyond the address space", "negative"],
)
def test_layers_outside_of_registered_memory_are_refused(segments: tuple[Segment, ...]) -> None:
    """A layer lies in one registered segment, or the layout is refused with both ranges."""
    with pytest.raises(ProtocolError, match=r"spans \[0x1000, 0x1100\), outside of"):
        worker(layer(base=4096), segments=segments).check()


def test_a_worker_without_memory_holds_no_layer() -> None:
    """No segment at all is like a segment elsewhere."""
    with pytest.raises(ProtocolError, match="outside of the registered segments"):
        worker(layer(), segments=(Segment(1 << 20, 0),)).check()
