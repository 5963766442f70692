# SPDX-License-Identifier: Apache-2.0
"""Clearing what a pull leaves out of its first and last blocks.

Blocks are not empty when a request gets them. What is read covers them but for the margins, and a
kernel that loads whole blocks multiplies even masked tokens (zero times NaN is NaN); besides, the
bytes belong to somebody else's prompt.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from kvhandoff.model.layout import WorkerLayout
from kvhandoff.model.topology import HeadRange, TokenStripe
from kvhandoff.plan.descriptors import Descriptors, Template
from kvhandoff.plan.pairing import Span
from kvhandoff.plan.routing import Part

Clear: TypeAlias = Callable[[Descriptors], None]
"""Sets the local side of descriptors to zero, and returns when that is done."""


def clear_host_memory(descriptors: Descriptors) -> None:
    """Clear memory that this process can write to directly."""
    for address, length in zip(
        descriptors.local.tolist(), descriptors.length.tolist(), strict=True
    ):
        ctypes.memset(address, 0, length)


class Margins:
    """Clears spans of a worker's own cache, found by the planner that finds what to read."""

    def __init__(self, layout: WorkerLayout, clear: Clear) -> None:
        alike: dict[tuple[HeadRange, TokenStripe], list[str]] = defaultdict(list)
        for layer in layout.layers:
            if not layer.state:
                alike[layer.heads, layer.stripe].append(layer.name)
        self._templates = [
            Template(Part(tuple(names), heads, stripe, ()), layout, layout)
            for (heads, stripe), names in alike.items()
        ]
        self._clear = clear

    def clear(self, margins: Mapping[int, Sequence[Span]], blocks: Sequence[np.ndarray]) -> None:
        """Clear spans, by KV group, of a request with these blocks."""
        for group, spans in margins.items():
            for span in spans:
                for template in self._templates:
                    found = template.lower({group: span}, blocks, blocks)
                    if len(found):
                        self._clear(found)
