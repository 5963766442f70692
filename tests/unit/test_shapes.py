# SPDX-License-Identifier: Apache-2.0
"""Engines that do not exist look like real ones."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvhandoff.ids import Rank
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.model.shapes import (
    LAYOUTS,
    CacheShape,
    ModelShape,
    blocks_needed,
    engine_layouts,
    stage_layers,
    stage_sizes,
)
from kvhandoff.model.topology import ParallelSizes

MODEL = ModelShape(layers=5, heads=4, content=256)


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (3, 3, [1, 1, 1]),
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (9, 4, [2, 2, 3, 2]),
        (61, 4, [15, 15, 16, 15]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
    ],
)
def test_layers_are_divided_as_by_vllm(layers: int, pp: int, stages: list[int]) -> None:
    """The expected numbers are what ``get_pp_indices`` of vLLM 0.32 returns."""
    assert stage_sizes(layers, pp) == stages


def test_a_partition_by_hand_is_kept() -> None:
    assert stage_layers(["a", "b", "c"], 2, (1, 2)) == [["a"], ["b", "c"]]


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("rows_per_block", [1, 2])
@pytest.mark.parametrize("padding", [0, 64])
def test_layouts_pass_the_check_of_catalogs(order: str, rows_per_block: int, padding: int) -> None:
    cache = CacheShape(
        blocks=8, block_tokens=4, rows_per_block=rows_per_block, order=order, padding=padding
    )
    sizes = ParallelSizes(tp=2, pp=2, pcp=2)
    for rank, worker in engine_layouts(MODEL, sizes, cache).items():
        worker.check()
        assert worker.at == sizes.coordinate(rank)
        assert all(layer.blocks == 8 for layer in worker.layers)


def test_cells_of_a_worker_do_not_overlap() -> None:
    for order in LAYOUTS:
        cache = CacheShape(blocks=3, block_tokens=4, rows_per_block=2, order=order, padding=8)
        worker = engine_layouts(MODEL, ParallelSizes(), cache)[Rank(0)]
        cells = sorted(_cells(worker))
        assert len(cells) == MODEL.layers * 3 * 4 * MODEL.heads
        assert all(before + MODEL.content <= after for before, after in pairwise(cells))


def _cells(worker: WorkerLayout) -> list[int]:
    return [
        layer.base + row * layer.row_stride + head * layer.head_stride + token * layer.token_stride
        for layer in worker.layers
        for row in range(layer.rows)
        for head in range(len(layer.heads))
        for token in range(layer.row_tokens)
    ]


def test_workers_do_not_overlap() -> None:
    cache = CacheShape(blocks=1 << 20, block_tokens=16)
    workers = engine_layouts(MODEL, ParallelSizes(tp=4, pcp=4), cache).values()
    segments = sorted((worker.segments[0] for worker in workers), key=lambda s: s.base)
    assert all(one.base + one.length <= two.base for one, two in pairwise(segments))


def test_blocks_are_divided_by_dcp_and_never_by_pcp() -> None:
    cache = CacheShape(block_tokens=16)
    assert blocks_needed(65, cache, ParallelSizes(pcp=2)) == 5
    assert blocks_needed(65, cache, ParallelSizes(pcp=2, dcp=2)) == 3
