# SPDX-License-Identifier: Apache-2.0
"""The KV oracle: caches in plain memory in which every layer/head/token cell has its own value.

Each cell of ``content`` bytes is filled with 64-bit words that follow from (seed, layer, head,
token, word). After a transfer each cell of the consumer must equal the oracle, and every byte
outside of the request must still have the marker it had before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhandoff.ids import Rank
from kvhandoff.model import shapes
from kvhandoff.model.layout import LayerLayout, WorkerLayout
from kvhandoff.model.shapes import CacheShape, blocks_needed
from kvhandoff.model.topology import HeadRange, ParallelSizes
from kvhandoff.plan.routing import owned

__all__ = [
    "CacheShape", "ModelShape", "WorkerCache", "assert_holds", "blocks_needed", "make_engine",
    "make_worker", "oracle_words", "stamp",
]  # fmt: skip

MARKER = 0xA5
WORD = 8


@dataclass(frozen=True)
class ModelShape(shapes.ModelShape):
    """A tiny model; ``heads`` 1 stands for MLA."""

    layers: int = 2
    heads: int = 1
    content: int = 2 * WORD


@dataclass
class WorkerCache:
    """One worker's memory with its layout."""

    layout: WorkerLayout
    memory: np.ndarray
    views: dict[str, np.ndarray] = field(default_factory=dict)

    def cells(self, name: str, tokens: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        """Index of the cells ``[token, head]`` of a layer, for tokens that this worker owns."""
        layer = self.layer(name)
        stripe = layer.stripe
        local = np.array([_local_slot(int(t), stripe.count, stripe.interleave) for t in tokens])
        block = blocks[local // layer.block_tokens]
        slot = local % layer.block_tokens
        rows = block * layer.rows_per_block + slot // layer.row_tokens
        heads = np.arange(len(layer.heads))
        return rows[:, None], heads[None, :], (slot % layer.row_tokens)[:, None]

    def layer(self, name: str) -> LayerLayout:
        return next(layer for layer in self.layout.layers if layer.name == name)

    def owned_tokens(self, name: str, start: int, stop: int) -> np.ndarray:
        tokens = np.arange(start, stop)
        return tokens[owned(tokens, self.layer(name).stripe)]


def _local_slot(token: int, count: int, interleave: int) -> int:
    """Written out step by step, so that it shares nothing with the code under test."""
    slot = 0
    period = count * interleave
    slot += (token // period) * interleave
    slot += token % period % interleave
    return slot


def oracle_words(
    seed: int, name: str, heads: HeadRange, tokens: np.ndarray, words: int
) -> np.ndarray:
    """Values of the cells ``[token, head, word]``."""
    layer = int(name.split(".")[2])
    token = tokens.astype(np.uint64)[:, None, None]
    head = np.arange(heads.start, heads.stop, dtype=np.uint64)[None, :, None]
    word = np.arange(words, dtype=np.uint64)[None, None, :]
    request = (seed * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9) % 2**64
    mixed = (
        np.uint64(request)
        + token * np.uint64(0x94D049BB133111EB)
        + head * np.uint64(0xD6E8FEB86659FD93)
        + word
    )
    return mixed ^ (mixed >> np.uint64(29))


def make_worker(
    model: shapes.ModelShape,
    sizes: ParallelSizes,
    rank: int,
    shape: CacheShape,
    session: str = "",
) -> WorkerCache:
    """A worker's cache, every byte set to the marker."""
    size = shapes.worker_layout(model, sizes, rank, shape, base=0).segments[0].length
    allocation = np.full(size + 64, MARKER, dtype=np.uint8)
    shift = -allocation.ctypes.data % 64
    memory = allocation[shift : shift + size]
    layout = shapes.worker_layout(
        model, sizes, rank, shape, base=memory.ctypes.data, session=session
    )
    cache = WorkerCache(layout, memory)
    cache.views |= {layer.name: _view(memory, layer, layout) for layer in layout.layers}
    return cache


def _view(memory: np.ndarray, layer: LayerLayout, layout: WorkerLayout) -> np.ndarray:
    """Words ``[row, head, token, word]`` of a layer."""
    offset = layer.base - layout.segments[0].base
    words = memory[offset : offset + (len(memory) - offset) // WORD * WORD].view(np.uint64)
    return np.lib.stride_tricks.as_strided(
        words,
        (layer.rows, len(layer.heads), layer.slots, layer.content // WORD),
        (layer.row_stride, layer.head_stride, layer.token_stride, WORD),
    )


def stamp(
    cache: WorkerCache, blocks: Sequence[int], tokens: int, seed: int, start: int = 0
) -> None:
    """Write the oracle's values of a request into the cells that this worker owns."""
    ids = np.array(blocks)
    for name, view in cache.views.items():
        mine = cache.owned_tokens(name, start, tokens)
        if mine.size:
            rows, heads, slots = cache.cells(name, mine, ids)
            words = oracle_words(seed, name, cache.layer(name).heads, mine, view.shape[3])
            view[rows, heads, slots] = words


def assert_holds(
    cache: WorkerCache, blocks: Sequence[int], start: int, stop: int, seed: int
) -> None:
    """Every cell of tokens ``[start, stop)`` equals the oracle; every other byte is the marker."""
    expected = np.full_like(cache.memory, MARKER)
    views = {layer.name: _view(expected, layer, cache.layout) for layer in cache.layout.layers}
    clean = WorkerCache(cache.layout, expected, views)
    stamp(clean, blocks, stop, seed, start)
    wrong = np.flatnonzero(expected != cache.memory)
    assert wrong.size == 0, (
        f"worker {cache.layout.at}: {wrong.size} bytes differ from the oracle, first at offset "
        f"{wrong[0]}"
    )


def make_engine(
    model: shapes.ModelShape,
    sizes: ParallelSizes,
    shape: CacheShape,
    sessions: Sequence[str] = (),
) -> dict[Rank, WorkerCache]:
    """All workers of an engine, by rank."""
    return {
        Rank(rank): make_worker(model, sizes, rank, shape, sessions[rank] if sessions else "")
        for rank in range(sizes.world_size)
    }
