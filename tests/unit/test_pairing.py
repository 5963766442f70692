# SPDX-License-Identifier: Apache-2.0
"""From token positions to chunks, and from chunks to offsets."""

from __future__ import annotations

import numpy as np
import pytest

from kvhandoff.errors import IncompatiblePeer, ProtocolError
from kvhandoff.model.layout import LayerLayout
from kvhandoff.model.topology import TokenStripe
from kvhandoff.plan.pairing import Span, check_pair, chunks, granule, locate
from tests.unit.layers import CONTENT, layer


def striped(index: int, count: int, interleave: int, row_tokens: int = 4):
    return layer(
        row_tokens=row_tokens,
        block_tokens=row_tokens,
        row_stride=row_tokens * CONTENT,
        stripe=TokenStripe(index, count, interleave),
    )


@pytest.mark.parametrize(
    ("producer", "consumer", "expected"),
    [
        (layer(row_tokens=4), layer(row_tokens=4), 4),
        (layer(row_tokens=8), layer(row_tokens=12), 4),
        (layer(row_tokens=16), layer(row_tokens=4), 4),
        (striped(0, 2, 2), layer(row_tokens=4), 2),
        (striped(0, 2, 1), layer(row_tokens=4), 1),
        (layer(row_tokens=8), striped(1, 2, 8, 8), 8),
    ],
)
def test_granule_is_dense_on_both_sides(producer, consumer, expected: int) -> None:
    """Row sizes and stripes of both sides decide together how long a chunk is."""
    assert granule(producer, consumer) == expected


def cut(span: Span, producer: LayerLayout, consumer: LayerLayout) -> list[tuple[list[int], int]]:
    return [(c.first.tolist(), c.tokens) for c in chunks(span, producer, consumer)]


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (Span(0, 0), []),
        (Span(5, 5), []),
        (Span(7, 3), []),
        (Span(0, 8), [([0, 4], 4)]),
        (Span(0, 10), [([0, 4], 4), ([8], 2)]),
        (Span(3, 10), [([4], 4), ([3], 1), ([8], 2)]),
        (Span(5, 7), [([5], 2)]),
    ],
)
def test_spans_are_cut_at_the_granule(span: Span, expected: list) -> None:
    """Whole chunks come together; a partial first or last one comes by itself."""
    assert cut(span, layer(), layer()) == expected


def test_chunks_belong_to_both_stripes() -> None:
    """Only tokens that both sides hold are read."""
    even, odd = striped(0, 2, 2), striped(1, 2, 2)
    assert cut(Span(0, 12), even, layer()) == [([0, 4, 8], 2)]
    assert cut(Span(0, 12), even, striped(0, 2, 4)) == [([0, 8], 2)]
    assert cut(Span(0, 12), even, odd) == []


def test_a_token_is_found_through_block_and_row() -> None:
    """Two rows to a block: block 3 begins at row 6."""
    halved = layer(block_tokens=8, row_tokens=4, rows=8, row_stride=100)
    offsets = locate(halved, np.array([3, 1]), np.array([0, 1, 4, 8, 15]))
    assert offsets.tolist() == [600, 608, 700, 200, 324]


def test_a_striped_rank_stores_its_tokens_densely() -> None:
    """Rank 1 of 2, two tokens at a time: it holds 2, 3, 6, 7, 10, ... in slots 0, 1, 2, ..."""
    rank = striped(1, 2, 2)
    offsets = locate(rank, np.array([5, 2]), np.array([2, 3, 6, 7, 10]))
    assert (offsets // CONTENT).tolist() == [20, 21, 22, 23, 8]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([1], "token 4 is in block number 1 of the request, which has 1 blocks"),
        ([], "token 4 is in block number 1 of the request, which has 0 blocks"),
        ([1, 0], r"block ids 0\.\.1 are not all in 1\.\.7"),
        ([1, 8], r"block ids 1\.\.8 are not all in 1\.\.7"),
        ([-1, 1], r"block ids -1\.\.1 are not all in 1\.\.7"),
    ],
)
def test_blocks_that_cannot_be_read_are_refused(blocks: list[int], message: str) -> None:
    """Missing blocks, the null block and blocks outside of the cache are never turned to bytes."""
    with pytest.raises(ProtocolError, match=message):
        locate(layer(), np.array(blocks, dtype=np.int64), np.array([0, 4]))


def test_null_blocks_before_the_span_do_no_harm() -> None:
    """In front of a sliding window there are null blocks, which nobody asks for."""
    assert locate(layer(), np.array([0, 0, 3]), np.array([8])).tolist() == [3 * 4 * CONTENT]


PACKED = {"format": "packed/16"}
TOKEN_MAJOR = {"head_stride": CONTENT, "token_stride": 2 * CONTENT, "heads": 2}


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ({}, {}),
        ({}, {"row_tokens": 2}),
        (TOKEN_MAJOR, {}),
        (PACKED, PACKED),
        (PACKED, PACKED | {"block_tokens": 8}),
        (PACKED | {"stripe": TokenStripe(0, 2, 8)}, PACKED | {"stripe": TokenStripe(1, 2, 4)}),
    ],
    ids=["plain", "plain rows", "plain order", "packed", "rows in a block", "whole rows striped"],
)
def test_formats_that_go_together(producer: dict, consumer: dict) -> None:
    """Plain cells go with each other whatever they look like; packed rows if they are the same."""
    check_pair(layer(**producer), layer(**consumer))


@pytest.mark.parametrize(
    ("producer", "consumer", "told"),
    [
        (PACKED, {}, ("found packed/16", "expected plain cells", "--attention-backend")),
        ({}, PACKED, ("found plain cells", "expected packed/16", "--attention-backend")),
        (PACKED, {"format": "packed/32"},
         ("found packed/16", "expected packed/32", "--attention-backend")),
        (PACKED, PACKED | {"row_tokens": 2},
         ("found 4 on the prefill", "expected 2 as on the decode", "--block-size")),
        (PACKED | TOKEN_MAJOR, PACKED | {"heads": 2},
         ("heads inside of tokens on the prefill", "tokens inside of heads", "LBHNC")),
        (PACKED | {"heads": 2}, PACKED | TOKEN_MAJOR,
         ("heads inside of tokens on the decode", "tokens inside of heads", "LBHNC")),
        (PACKED | {"stripe": TokenStripe(0, 2, 2)}, PACKED,
         ("interleave-size 2 on the prefill", "a multiple of 4", "--cp-kv-cache-interleave-size")),
        (PACKED, PACKED | {"stripe": TokenStripe(0, 2, 6)},
         ("interleave-size 6 on the decode", "a multiple of 4", "--cp-kv-cache-interleave-size")),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_copied_whole_are_refused(
    producer: dict, consumer: dict, told: tuple[str, ...]
) -> None:
    """The refusal names the layer, what was found and expected, and the setting to change."""
    with pytest.raises(IncompatiblePeer, match="layer 'layer'") as refusal:
        check_pair(layer(**producer), layer(**consumer))
    for text in told:
        assert text in str(refusal.value)


def test_whole_rows_are_taken_to_their_ends() -> None:
    """Tokens of the first and last row that nobody asked for go along."""
    packed = layer(**PACKED)
    assert cut(Span(4, 10), packed, packed) == [([4, 8], 4)]
    assert cut(Span(5, 10), packed, packed) == [([4, 8], 4)]
    assert cut(Span(5, 10, private=4), packed, packed) == [([4, 8], 4)]


def test_whole_rows_never_reach_into_a_shared_prefix() -> None:
    """Other requests may be reading it."""
    packed = layer(**PACKED)
    with pytest.raises(ProtocolError, match="token 5 is inside of a row of 4 tokens"):
        chunks(Span(5, 10, private=5), packed, packed)


COMPRESSED = {"block_tokens": 16, "row_tokens": 16, "slots": 4, "row_stride": 4 * CONTENT}


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (Span(0, 16), [([0], 16)]),
        (Span(0, 15), [([0], 12)]),
        (Span(0, 3), []),
        (Span(5, 7), []),
        (Span(5, 9), [([4], 4)]),
        (Span(10, 40), [([16], 16), ([8], 8), ([32], 8)]),
    ],
)
def test_an_entry_for_several_tokens_is_read_if_its_last_token_is_there(
    span: Span, expected: list
) -> None:
    """It was stored when that token was computed; a first token in front of the span is no bar."""
    compressed = layer(**COMPRESSED)
    assert cut(span, compressed, compressed) == expected


def test_an_entry_for_several_tokens_is_found() -> None:
    """Block 3 begins at row 3; tokens 16 to 19 share its first slot."""
    offsets = locate(layer(**COMPRESSED), np.array([2, 3]), np.array([0, 4, 12, 16]))
    assert (offsets // CONTENT).tolist() == [8, 9, 11, 12]


STATE = {"block_tokens": 16, "row_tokens": 16, "slots": 3, "state": True}


def test_a_state_is_one_chunk_at_its_last_token() -> None:
    """Whatever the span says about the tokens before."""
    state = layer(**STATE)
    assert cut(Span(0, 35), state, state) == [([34], 1)]
    assert cut(Span(34, 35), state, state) == [([34], 1)]
    assert cut(Span(35, 35), state, state) == []


def test_a_state_is_found_in_the_block_of_its_last_token() -> None:
    """Earlier blocks may be null by then; a ring keeps one block for good."""
    state = layer(**STATE, row_stride=100)
    assert locate(state, np.array([0, 0, 5]), np.array([34])).tolist() == [500]
    ring = layer(**STATE | {"block_tokens": 1 << 40, "row_tokens": 1 << 40}, row_stride=100)
    assert locate(ring, np.array([5]), np.array([34])).tolist() == [500]


@pytest.mark.parametrize(
    ("producer", "consumer", "told"),
    [
        ({"content": 16}, {}, ("bytes of a slot and head", "16 on the prefill", "--dtype")),
        (STATE, {}, ("kinds of cache", "recurrent state on the prefill", "the same model")),
        (STATE, STATE | {"slots": 4}, ("slots of a state", "VLLM_SSM_CONV_STATE_LAYOUT")),
        (COMPRESSED, {}, ("tokens that share a slot", "4 on the prefill", "the same model")),
        (
            COMPRESSED | {"stripe": TokenStripe(0, 2, 2)}, COMPRESSED,
            ("runs of 2 tokens", "a multiple of 4", "--cp-kv-cache-interleave-size"),
        ),
    ],
)  # fmt: skip
def test_layers_that_do_not_match_are_refused(
    producer: dict, consumer: dict, told: tuple[str, ...]
) -> None:
    """The refusal names the layer, what was found and expected, and the setting to change."""
    with pytest.raises(IncompatiblePeer, match="layer 'layer'") as refusal:
        check_pair(layer(**producer), layer(**consumer))
    for text in told:
        assert text in str(refusal.value)


def test_states_with_blocks_of_another_size_go_together() -> None:
    """A state is a state, wherever the next one would be kept."""
    check_pair(layer(**STATE), layer(**STATE | {"block_tokens": 32, "row_tokens": 32}))
