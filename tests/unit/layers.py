# SPDX-License-Identifier: Apache-2.0
"""Small layouts for the tests of this folder, dense unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from kvhandoff.model.layout import LayerLayout, Segment, WorkerLayout
from kvhandoff.model.topology import Coordinate, HeadRange

CONTENT = 8
BLOCK = 4
ROWS = 8


def layer(
    name: str = "layer", base: int = 0, *, heads: int = 1, first: int = 0, **changes: Any
) -> LayerLayout:
    """One layer: rows of ``BLOCK`` tokens of ``heads`` heads from ``first`` on (``LBHN``)."""
    fields: dict[str, Any] = {
        "name": name,
        "group": 0,
        "heads": HeadRange(first, first + heads),
        "total_heads": first + heads,
        "block_tokens": BLOCK,
        "row_tokens": BLOCK,
        "slots": changes.get("row_tokens", BLOCK),
        "rows": ROWS,
        "base": base,
        "row_stride": heads * BLOCK * CONTENT,
        "head_stride": BLOCK * CONTENT,
        "token_stride": CONTENT,
        "content": CONTENT,
    }
    return LayerLayout(**(fields | changes))


def worker(*layers: LayerLayout, segments: tuple[Segment, ...] = ()) -> WorkerLayout:
    """A worker with these layers, in one segment that just holds them."""
    if not segments:
        base = min(each.base for each in layers)
        segments = (Segment(base, max(each.end for each in layers) - base),)
    return WorkerLayout(Coordinate(0, 0, 0), "session", segments, layers)
