# SPDX-License-Identifier: Apache-2.0
"""Each refused engine is told what was found, what was expected and which setting to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.rules import CONSUMER, PRODUCER, require_engine, require_role
from kvhandoff.model.shapes import CacheShape, ModelShape
from kvhandoff.model.topology import ParallelSizes

GQA = ModelShape(layers=4, heads=4, content=16, query_heads=12)
MLA = ModelShape(layers=4, heads=1, content=16, mla=True)
CACHE = CacheShape(block_tokens=16)


def sizes(**numbers: int) -> ParallelSizes:
    return ParallelSizes(**numbers)


@pytest.mark.parametrize(
    ("role", "parallel", "model", "cache", "told"),
    [
        pytest.param(
            CONSUMER, sizes(pcp=2), MLA, CACHE,
            ("--prefill-context-parallel-size 2", "--prefill-context-parallel-size 1",
             "remove --prefill-context-parallel-size"),
            id="consumer with PCP",
        ),
        pytest.param(
            "kv_both", sizes(), MLA, CACHE,
            ("kv_role kv_both", "kv_producer or kv_consumer", "set kv_role"),
            id="both roles",
        ),
        pytest.param(
            None, sizes(), MLA, CACHE,
            ("kv_role None", "kv_producer or kv_consumer", "set kv_role"),
            id="no role",
        ),
        pytest.param(
            PRODUCER, sizes(tp=3), GQA, CACHE,
            ("4 KV heads with tp=3", "one number to divide the other", "--tensor-parallel-size"),
            id="heads",
        ),
        pytest.param(
            PRODUCER, sizes(pp=5), GQA, CACHE,
            ("4 layers as 1,1,1,1,0 with pp=5", "5 stages of at least one layer",
             "--pipeline-parallel-size"),
            id="more stages than layers",
        ),
        pytest.param(
            PRODUCER, sizes(pp=2), GQA, replace(CACHE, partition=(1, 2)),
            ("4 layers as 1,2 with pp=2", "add up to 4", "VLLM_PP_LAYER_PARTITION"),
            id="partition that does not add up",
        ),
        pytest.param(
            PRODUCER, sizes(pp=2), GQA, replace(CACHE, partition=(1, 1, 2)),
            ("1,1,2 with pp=2", "2 stages", "VLLM_PP_LAYER_PARTITION"),
            id="partition of other stages",
        ),
        pytest.param(
            PRODUCER, sizes(tp=4, dcp=2), GQA, CACHE,
            ("dcp=2 where tp=4 makes 1 copy of each of 4 KV heads", "expected dcp=1",
             "--decode-context-parallel-size"),
            id="DCP without copies",
        ),
        pytest.param(
            CONSUMER, sizes(tp=12, dcp=2), GQA, CACHE,
            ("dcp=2 where tp=12 makes 3 copies", "dcp that divides 3",
             "--decode-context-parallel-size"),
            id="DCP group across heads",
        ),
        pytest.param(
            PRODUCER, sizes(tp=2, pcp=2, dcp=2), GQA, CACHE,
            ("dcp=2 where tp=2 makes 1 copy", "expected dcp=1", "--tensor-parallel-size"),
            id="PCP x DCP without copies",
        ),
        pytest.param(
            CONSUMER, sizes(tp=8, dcp=2), GQA, CACHE,
            ("3 query heads for each KV head with dcp=2", "dcp that divides 3",
             "--decode-context-parallel-size"),
            id="DCP of query heads",
        ),
        pytest.param(
            PRODUCER, sizes(tp=2, dcp=2), MLA, replace(CACHE, interleave=6),
            ("interleave 6 with block size 16", "divides 16", "--cp-kv-cache-interleave-size"),
            id="interleave",
        ),
        pytest.param(
            PRODUCER, sizes(tp=2, dcp=2), MLA, replace(CACHE, interleave=32),
            ("interleave 32 with block size 16", "divides 16", "--block-size"),
            id="interleave above block",
        ),
    ],
)  # fmt: skip
def test_refusal_names_both_values_and_the_setting(
    role: str | None,
    parallel: ParallelSizes,
    model: ModelShape,
    cache: CacheShape,
    told: tuple[str, ...],
) -> None:
    with pytest.raises(UnsupportedSetup) as refusal:
        require_engine(role, parallel, model, cache)
    for words in told:
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("numbers", "found", "expected"),
    [
        ({"tp": 4, "dcp": 3}, "dcp=3 with tp=4, pcp=1", "[1, 2, 4]"),
        ({"tp": 2, "pcp": 4, "dcp": 2}, "dcp=2 with tp=2, pcp=4", "[1, 4, 8]"),
    ],
)
def test_dcp_that_vllm_does_not_have(numbers: dict[str, int], found: str, expected: str) -> None:
    with pytest.raises(UnsupportedSetup) as refusal:
        sizes(**numbers)
    for words in (found, expected, "--decode-context-parallel-size"):
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("role", "parallel", "model", "cache"),
    [
        (PRODUCER, sizes(tp=4, pcp=2), MLA, CACHE),
        (PRODUCER, sizes(tp=2, pcp=2, dcp=4), MLA, CACHE),
        (PRODUCER, sizes(tp=12, dcp=3), GQA, CACHE),
        (PRODUCER, sizes(tp=8, dcp=2), replace(GQA, query_heads=0), CACHE),
        (CONSUMER, sizes(tp=4, dcp=4), MLA, replace(CACHE, interleave=16)),
        (CONSUMER, sizes(), GQA, replace(CACHE, interleave=6)),
    ],
)
def test_what_works_is_let_through(
    role: str, parallel: ParallelSizes, model: ModelShape, cache: CacheShape
) -> None:
    require_engine(role, parallel, model, cache)


def test_a_producer_may_use_pcp() -> None:
    require_role(PRODUCER, sizes(pcp=4))
