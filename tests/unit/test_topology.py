# SPDX-License-Identifier: Apache-2.0
"""Ranks, coordinates, head shares and token stripes."""

from __future__ import annotations

import pytest

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.topology import (
    EVERY_TOKEN,
    MAX_PARALLEL_SIZE,
    Coordinate,
    HeadRange,
    ParallelSizes,
    TokenStripe,
    heads_of,
)


@pytest.mark.parametrize(
    "sizes",
    [ParallelSizes(), ParallelSizes(tp=2, pp=3, pcp=4), ParallelSizes(tp=4, pp=2, pcp=2, dcp=8)],
    ids=str,
)
def test_rank_and_coordinate_are_inverse(sizes: ParallelSizes) -> None:
    """Ranks count through the coordinates, TP innermost and PP outermost."""
    coordinates = list(sizes.coordinates())
    assert [sizes.rank(at) for at in coordinates] == list(range(sizes.world_size))
    assert coordinates == sorted(coordinates)
    assert len(set(coordinates)) == sizes.tp * sizes.pp * sizes.pcp


def test_rank_of_one_coordinate_is_as_written() -> None:
    """``(pp * PCP + pcp) * TP + tp``, written out once."""
    sizes = ParallelSizes(tp=2, pp=3, pcp=4)
    assert sizes.rank(Coordinate(pp=2, pcp=1, tp=1)) == (2 * 4 + 1) * 2 + 1
    assert sizes.coordinate(19) == Coordinate(pp=2, pcp=1, tp=1)


@pytest.mark.parametrize(
    ("tp", "pcp", "allowed"),
    [(1, 1, {1}), (4, 1, {1, 2, 4}), (6, 1, {1, 2, 3, 6}), (2, 2, {1, 2, 4}), (4, 2, {1, 2, 8})],
)
def test_dcp_sizes_are_those_of_vllm(tp: int, pcp: int, allowed: set[int]) -> None:
    """Every DCP size is either accepted, or refused naming it and the sizes that work."""
    for dcp in range(1, 10):
        if dcp in allowed:
            assert ParallelSizes(tp=tp, pcp=pcp, dcp=dcp).dcp == dcp
        else:
            with pytest.raises(UnsupportedSetup) as refusal:
                ParallelSizes(tp=tp, pcp=pcp, dcp=dcp)
            text = str(refusal.value)
            assert f"dcp={dcp}" in text
            assert str(sorted(allowed)) in text
            assert "--decode-context-parallel-size" in text


@pytest.mark.parametrize("name", ["tp", "pp", "pcp", "dcp"])
@pytest.mark.parametrize("size", [0, -1, MAX_PARALLEL_SIZE + 1])
def test_sizes_have_bounds(name: str, size: int) -> None:
    """A size out of range is refused by its name and value."""
    with pytest.raises(UnsupportedSetup, match=rf"{name} size {size} "):
        ParallelSizes(**{name: size})


def test_pcp_makes_replicas_unless_dcp_shards_them() -> None:
    """With DCP the context parallel ranks hold shards, so there is one copy."""
    assert ParallelSizes(pcp=4).replicas == 4
    assert ParallelSizes(tp=2, pcp=4, dcp=4).replicas == 1
    assert ParallelSizes(tp=4).replicas == 1


@pytest.mark.parametrize(
    ("total", "tp", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_heads_are_shared_or_copied(total: int, tp: int, expected: list[tuple[int, int]]) -> None:
    """Ranks get equal shares, or one head that several ranks hold."""
    assert [heads_of(total, tp, rank) for rank in range(tp)] == [HeadRange(*r) for r in expected]


@pytest.mark.parametrize(("total", "tp"), [(3, 2), (2, 3), (6, 4), (4, 6)])
def test_heads_that_do_not_divide_are_refused(total: int, tp: int) -> None:
    """The refusal names both numbers and the setting."""
    with pytest.raises(UnsupportedSetup) as refusal:
        heads_of(total, tp, 0)
    assert f"{total} KV heads with tp={tp}" in str(refusal.value)
    assert "--tensor-parallel-size" in str(refusal.value)


@pytest.mark.parametrize("bounds", [(0, 0), (2, 1), (-1, 1), (0, (1 << 20) + 1)])
def test_impossible_head_ranges_cannot_be_made(bounds: tuple[int, int]) -> None:
    """They may come from the network, so the type itself refuses them."""
    with pytest.raises(ValueError, match="not a head range"):
        HeadRange(*bounds)


@pytest.mark.parametrize(
    "stripe", [(1, 1, 1), (-1, 2, 1), (0, 0, 1), (0, 2, 0), (0, MAX_PARALLEL_SIZE + 1, 1)]
)
def test_impossible_stripes_cannot_be_made(stripe: tuple[int, int, int]) -> None:
    """They may come from the network, so the type itself refuses them."""
    with pytest.raises(ValueError, match="not a token stripe"):
        TokenStripe(*stripe)


def test_stripes_follow_the_tp_pcp_order() -> None:
    """Neighbouring PCP ranks hold neighbouring stripes; without DCP everybody holds all."""
    sharded = ParallelSizes(tp=2, pcp=2, dcp=4)
    indices = {at: sharded.stripe(at, 16) for at in sharded.coordinates()}
    assert indices == {
        Coordinate(0, 0, 0): TokenStripe(0, 4, 16),
        Coordinate(0, 1, 0): TokenStripe(1, 4, 16),
        Coordinate(0, 0, 1): TokenStripe(2, 4, 16),
        Coordinate(0, 1, 1): TokenStripe(3, 4, 16),
    }
    whole = ParallelSizes(tp=2, pcp=2)
    assert {whole.stripe(at, 16) for at in whole.coordinates()} == {EVERY_TOKEN}
