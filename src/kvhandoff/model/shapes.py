# SPDX-License-Identifier: Apache-2.0
"""Engines that do not exist: layouts from a model's numbers, with addresses that are made up.

What an engine with given sizes *would* hold is enough to ask the planner who would read what from
whom. The result has the same type as a layout that was read from tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.ids import Rank
from kvhandoff.model.layout import LayerLayout, Segment, WorkerLayout
from kvhandoff.model.topology import ParallelSizes, heads_of

LAYOUTS = ("LBHN", "LBNH", "LHBN", "BLHN", "BLNH", "BHLN")
"""vLLM's cache layouts without the trailing C (content), which is innermost in all of them."""

_ALIGNMENT = 1 << 21
_FIRST_ADDRESS = 1 << 40
_SPAN = 1 << 46
"""Made-up address space of a worker; no two workers of an engine overlap."""


@dataclass(frozen=True)
class ModelShape:
    """A model's KV cache.

    Attributes:
        layers: layers with a cache.
        heads: KV heads of the model; 1 for MLA.
        content: bytes of one token and head (K and V together, or the MLA latent).
        mla: whether the one head is an MLA latent (vLLM shards it by other rules).
        query_heads: attention heads of the model; 0 if unknown.
    """

    layers: int
    heads: int
    content: int
    mla: bool = False
    query_heads: int = 0

    @property
    def names(self) -> list[str]:
        """Layer names as vLLM builds them."""
        return [f"model.layers.{i}.self_attn.attn" for i in range(self.layers)]


@dataclass(frozen=True)
class CacheShape:
    """How one engine lays out its cache.

    Attributes:
        blocks: scheduler blocks, the null block included.
        block_tokens: token slots of a block on one rank.
        rows_per_block: rows of the attention kernel in a block.
        order: a permutation of L (layer), B (block row), H (head), N (token), outermost first, as
            in vLLM's layout names (content C is always innermost).
        padding: bytes after each unit of the inner one of L and B.
        interleave: ``--cp-kv-cache-interleave-size``.
        partition: layers of each pipeline stage; empty for vLLM's default.
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
        """Token slots of a row."""
        return self.block_tokens // self.rows_per_block


def stage_sizes(layers: int, pp: int, partition: Sequence[int] = ()) -> list[int]:
    """Layers of each pipeline stage, as vLLM divides them.

    A rest goes to the stages before the last one, from the back (``get_pp_indices``).

    Args:
        partition: made by hand (``VLLM_PP_LAYER_PARTITION``); empty for the default.

    Raises:
        UnsupportedSetup: if a stage would have no layer or the stages do not add up.
    """
    if not partition:
        share, rest = divmod(layers, pp)
        partition = [share + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]
    if len(partition) != pp or sum(partition) != layers or min(partition) < 1:
        raise UnsupportedSetup.because(
            "layers cannot be divided over pipeline stages",
            found=f"{layers} layers as {','.join(map(str, partition))} with pp={pp}",
            expected=f"{pp} stages of at least one layer that add up to {layers}",
            change="change --pipeline-parallel-size or VLLM_PP_LAYER_PARTITION",
        )
    return list(partition)


def stage_layers(names: Sequence[str], pp: int, partition: Sequence[int] = ()) -> list[list[str]]:
    """Layer names of each pipeline stage; see :func:`stage_sizes`."""
    sizes = stage_sizes(len(names), pp, partition)
    return [
        list(names[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]


def strides_of(layers: int, heads: int, cache: CacheShape, content: int) -> dict[str, int]:
    """Byte strides of the axes L, B, H and N on one worker, and ``total`` bytes."""
    lengths = {
        "L": layers,
        "B": cache.blocks * cache.rows_per_block,
        "H": heads,
        "N": cache.row_tokens,
    }
    padded = max("LB", key=cache.order.index)
    strides, step = {}, content
    for axis in reversed(cache.order):
        if axis == padded:
            step += cache.padding
        strides[axis] = step
        step *= lengths[axis]
    return strides | {"total": step}


def worker_layout(
    model: ModelShape,
    sizes: ParallelSizes,
    rank: int,
    cache: CacheShape,
    *,
    base: int | None = None,
    session: str = "",
) -> WorkerLayout:
    """The layout of one worker in one allocation.

    Args:
        base: address of the allocation; made up by default.
        session: transport address; made up by default.

    Raises:
        UnsupportedSetup: if heads or layers cannot be divided over these ranks.
    """
    at = sizes.coordinate(rank)
    names = stage_layers(model.names, sizes.pp, cache.partition)[at.pp]
    heads = heads_of(model.heads, sizes.tp, at.tp)
    strides = strides_of(len(names), len(heads), cache, model.content)
    if base is None:
        base = _FIRST_ADDRESS + rank * _SPAN // sizes.world_size // _ALIGNMENT * _ALIGNMENT
    layers = tuple(
        LayerLayout(
            name=name,
            group=0,
            heads=heads,
            total_heads=model.heads,
            block_tokens=cache.block_tokens,
            row_tokens=cache.row_tokens,
            slots=cache.row_tokens,
            rows=cache.blocks * cache.rows_per_block,
            base=base + index * strides["L"],
            row_stride=strides["B"],
            head_stride=strides["H"],
            token_stride=strides["N"],
            content=model.content,
            stripe=sizes.stripe(at, cache.interleave),
        )
        for index, name in enumerate(names)
    )
    segment = Segment(base, strides["total"])
    return WorkerLayout(at, session or f"worker:{rank}", (segment,), layers)


def engine_layouts(
    model: ModelShape, sizes: ParallelSizes, cache: CacheShape
) -> dict[Rank, WorkerLayout]:
    """All workers of an engine that does not exist, by rank."""
    return {
        Rank(rank): worker_layout(model, sizes, rank, cache) for rank in range(sizes.world_size)
    }


def blocks_needed(tokens: int, cache: CacheShape, sizes: ParallelSizes) -> int:
    """Scheduler blocks of a request: divided by DCP only, never by PCP."""
    return -(-tokens // (cache.block_tokens * sizes.dcp))
