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
from kvhandoff.model.layout import LayerLayout, Segment, WorkerLayout
from kvhandoff.model.topology import EVERY_TOKEN, Coordinate, HeadRange, ParallelSizes, heads_of
from kvhandoff.plan.routing import owned

MARKER = 0xA5
WORD = 8


@dataclass(frozen=True)
class ModelShape:
    """A model's cache: ``heads`` 1 stands for MLA."""

    layers: int = 2
    heads: int = 1
    content: int = 2 * WORD

    @property
    def names(self) -> list[str]:
        return [f"model.layers.{i}.self_attn.attn" for i in range(self.layers)]


@dataclass(frozen=True)
class CacheShape:
    """How one engine lays out its cache.

    ``order`` is a permutation of L (layer), B (block row), H (head), N (token), outermost first,
    as in vLLM's layout names (content C is always innermost).
    """

    blocks: int = 16
    block_tokens: int = 4
    rows_per_block: int = 1
    order: str = "LBHN"
    padding: int = 0
    interleave: int = 1
    partition: tuple[int, ...] = ()

    @property
    def row_tokens(self) -> int:
        return self.block_tokens // self.rows_per_block


def stage_layers(names: Sequence[str], pp: int, partition: Sequence[int] = ()) -> list[list[str]]:
    """Layers of each pipeline stage: as asked, else as even as can be, later stages larger."""
    if not partition:
        share, rest = divmod(len(names), pp)
        partition = [share + (stage >= pp - rest) for stage in range(pp)]
    assert sum(partition) == len(names)
    assert len(partition) == pp
    ends = np.cumsum(partition).tolist()
    return [list(names[end - count : end]) for end, count in zip(ends, partition, strict=True)]


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


def strides_of(
    layers: int, rows: int, heads: int, shape: CacheShape, content: int
) -> dict[str, int]:
    """Byte strides of the axes L, B, H, N; padding follows each unit of the inner one of L, B."""
    sizes = {"L": layers, "B": rows, "H": heads, "N": shape.row_tokens}
    padded = max("LB", key=shape.order.index)
    strides, step = {}, content
    for axis in reversed(shape.order):
        if axis == padded:
            step += shape.padding
        strides[axis] = step
        step *= sizes[axis]
    strides["total"] = step
    return strides


def make_worker(
    model: ModelShape,
    sizes: ParallelSizes,
    rank: int,
    shape: CacheShape,
    session: str = "",
) -> WorkerCache:
    """A worker's cache, every byte set to the marker."""
    at: Coordinate = sizes.coordinate(rank)
    names = stage_layers(model.names, sizes.pp, shape.partition)[at.pp]
    heads = heads_of(model.heads, sizes.tp, at.tp)
    stripe = sizes.stripe(at, shape.interleave) if sizes.dcp > 1 else EVERY_TOKEN
    rows = shape.blocks * shape.rows_per_block
    strides = strides_of(len(names), rows, len(heads), shape, model.content)
    memory = np.full(max(strides["total"], 64) + 64, MARKER, dtype=np.uint8)
    base = (memory.ctypes.data + 63) // 64 * 64
    layers, views = [], {}
    for index, name in enumerate(names):
        layer = LayerLayout(
            name=name,
            group=0,
            heads=heads,
            total_heads=model.heads,
            block_tokens=shape.block_tokens,
            row_tokens=shape.row_tokens,
            rows=rows,
            base=base + index * strides["L"],
            row_stride=strides["B"],
            head_stride=strides["H"],
            token_stride=strides["N"],
            content=model.content,
            stripe=stripe,
        )
        layers.append(layer)
        offset = layer.base - memory.ctypes.data
        words = memory[offset : offset + (len(memory) - offset) // WORD * WORD].view(np.uint64)
        views[name] = np.lib.stride_tricks.as_strided(
            words,
            (rows, len(heads), shape.row_tokens, model.content // WORD),
            (strides["B"], strides["H"], strides["N"], WORD),
        )
    segment = Segment(memory.ctypes.data, memory.nbytes)
    return WorkerCache(WorkerLayout(at, session, (segment,), tuple(layers)), memory, views)


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
    clean = WorkerCache(cache.layout, expected)
    shift = cache.memory.ctypes.data
    for name, view in cache.views.items():
        offset = cache.layer(name).base - shift
        words = expected[offset : offset + (len(expected) - offset) // WORD * WORD].view(np.uint64)
        clean.views[name] = np.lib.stride_tricks.as_strided(words, view.shape, view.strides)
    stamp(clean, blocks, stop, seed, start)
    wrong = np.flatnonzero(expected != cache.memory)
    assert wrong.size == 0, (
        f"worker {cache.layout.at}: {wrong.size} bytes differ from the oracle, first at offset "
        f"{wrong[0]}"
    )


def make_engine(
    model: ModelShape, sizes: ParallelSizes, shape: CacheShape, sessions: Sequence[str] = ()
) -> dict[Rank, WorkerCache]:
    """All workers of an engine, by rank."""
    return {
        Rank(rank): make_worker(
            model, sizes, rank, shape, sessions[rank] if sessions else f"worker:{rank}"
        )
        for rank in range(sizes.world_size)
    }


def blocks_needed(tokens: int, shape: CacheShape, sizes: ParallelSizes) -> int:
    """Scheduler blocks of a request: divided by DCP only, never by PCP."""
    return -(-tokens // (shape.block_tokens * sizes.dcp))
