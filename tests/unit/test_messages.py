# SPDX-License-Identifier: Apache-2.0
"""Messages: the exact bytes of protocol version 1, and frames that are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvhandoff.ids import MAX_NAME_LENGTH, MAX_READERS
from kvhandoff.model.layout import LayerLayout, Segment, WorkerLayout
from kvhandoff.model.topology import Coordinate, HeadRange, ParallelSizes
from kvhandoff.protocol.catalog import Catalog, Fingerprint
from kvhandoff.protocol.messages import (
    MAX_ANSWER_BYTES,
    MAX_BATCH,
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Complete,
    Completed,
    Done,
    HeldKey,
    Hello,
    Malformed,
    Open,
    Opened,
    PullRecord,
    PullReport,
    Refused,
    Release,
    Renew,
    Renewed,
    Request,
    Status,
    StatusReport,
    WrongVersion,
    decode_answer,
    decode_request,
    encode,
)

FINGERPRINT = Fingerprint("m", "n", "w", "float32", "auto", "l")
KEY = HeldKey("r", "t")
LAYER = LayerLayout("a", 0, HeadRange(0, 1), 1, 4, 4, 4, 2, 4096, 32, 32, 8, 8)
WORKER = WorkerLayout(Coordinate(0, 0, 0), "s", (Segment(4096, 64),), (LAYER,))
REPORT = PullReport(1, [3], 64, 2, 0.5, 0.25, 0.125, 0)

CORRELATION = 7

# Bytes that another kvhandoff of protocol version 1 sends. If one of these has to change, so has
# PROTOCOL_VERSION, with a line in the version log of messages.py.
REQUESTS: list[tuple[Request, str]] = [
    (
        Hello("d", FINGERPRINT),
        "93010783a474797065a568656c6c6fa6656e67696e65a164ab66696e6765727072696e7486a56d6f"
        "64656ca16daa6d6f64656c5f6e616d65a16ea777656967687473a177a56474797065a7666c6f61743332ab63616368655f64"
        "74797065a46175746fa66c6179657273a16c",
    ),
    (
        Open(KEY, "p", 1, 2),
        "93010785a474797065a46f70656ea36b657992a172a174a470756c6ca170a5696e64657801a26f6602",
    ),
    (
        Renew([KEY]),
        "93010782a474797065a572656e6577a46b6579739192a172a174",
    ),
    (
        Complete(KEY, "p", 1, True, 2.0, REPORT),
        "93010787a474797065a8636f6d706c657465a36b657992a172a174a470756c6ca170a5696e646578"
        "01a26f6bc3a66c696e676572cb4000000000000000a67265706f727488a77265706c69636101a773"
        "6f75726365739103a66e627974657340ab64657363726970746f727302ac6f70656e5f7365636f6e"
        "6473cb3fe0000000000000ac706c616e5f7365636f6e6473cb3fd0000000000000ac726561645f73"
        "65636f6e6473cb3fc0000000000000a96661696c6f7665727300",
    ),
    (
        Release(KEY, "p"),
        "93010783a474797065a772656c65617365a36b657992a172a174a470756c6ca170",
    ),
    (
        Status(),
        "93010781a474797065a6737461747573",
    ),
]

ANSWERS: list[tuple[Answer, str]] = [
    (
        Catalog("e", "i", FINGERPRINT, ParallelSizes(), 30.0, (WORKER,)),
        "93010787a474797065a7636174616c6f67a6656e67696e65a165ab696e6361726e6174696f6ea169"
        "ab66696e6765727072696e7486a56d6f64656ca16daa6d6f64656c5f6e616d65a16ea777656967687473a177a56474797065"
        "a7666c6f61743332ab63616368655f6474797065a46175746fa66c6179657273a16ca573697a6573"
        "84a2747001a2707001a370637001a364637001a56c65617365cb403e000000000000a7776f726b65"
        "7273919493000000a1739192cd10004091dc0010a161009200010104040402cd10002020080893000101a0c2",
    ),
    (
        Opened("i", ([1, 2], [3]), 17, 30.0),
        "93010785a474797065a66f70656e6564ab696e6361726e6174696f6ea169a6626c6f636b73929201"
        "029103a6746f6b656e7311a56c65617365cb403e000000000000",
    ),
    (
        Renewed(["held", "expired"]),
        "93010782a474797065a772656e65776564a8766572646963747392a468656c64a765787069726564",
    ),
    (
        Completed("held"),
        "93010782a474797065a9636f6d706c65746564a776657264696374a468656c64",
    ),
    (
        Done(),
        "93010781a474797065a4646f6e65",
    ),
    (
        StatusReport("e", "i", 1, {"held": 1}, [PullRecord("r", "completed", 17, 1.5, None, [])]),
        "93010786a474797065ad7374617475735f7265706f7274a6656e67696e65a165ab696e6361726e61"
        "74696f6ea169a468656c6401a8636f756e7465727381a468656c6401a6726563656e749186a77265"
        "7175657374a172a76f7574636f6d65a9636f6d706c65746564a6746f6b656e7311ac68656c645f73"
        "65636f6e6473cb3ff8000000000000b266697273745f6f70656e5f7365636f6e6473c0a772656164"
        "65727390",
    ),
    (
        Refused("unknown", "why"),
        "93010783a474797065a772656675736564a4636f6465a7756e6b6e6f776ea6726561736f6ea3776879",
    ),
]


def kind(value: object) -> str:
    return type(value).__name__ if not isinstance(value, str) else ""


@pytest.mark.parametrize(("body", "golden"), REQUESTS, ids=kind)
def test_requests_have_these_bytes(body: Request, golden: str) -> None:
    """Each kind of request is written and read as version 1 says."""
    assert encode(CORRELATION, body).hex() == golden
    assert decode_request(bytes.fromhex(golden)) == (CORRELATION, body)


@pytest.mark.parametrize(("body", "golden"), ANSWERS, ids=kind)
def test_answers_have_these_bytes(body: Answer, golden: str) -> None:
    """Each kind of answer is written and read as version 1 says."""
    assert encode(CORRELATION, body).hex() == golden
    assert decode_answer(bytes.fromhex(golden)) == (CORRELATION, body)


def test_every_kind_has_golden_bytes() -> None:
    """A new kind of message cannot be forgotten here."""
    assert PROTOCOL_VERSION == 1
    assert {type(body) for body, _ in REQUESTS} == set(Request.__args__)
    assert {type(body) for body, _ in ANSWERS} == set(Answer.__args__)


@pytest.mark.parametrize("decode", [decode_request, decode_answer])
@pytest.mark.parametrize("version", [0, 2, -1, 1 << 60])
def test_other_versions_are_told_apart_before_the_body_is_read(decode: Any, version: int) -> None:
    """The error has both versions, what to do, and the correlation id to answer to."""
    frame = msgspec.msgpack.encode((version, CORRELATION, {"type": "from the future"}))
    with pytest.raises(WrongVersion) as refusal:
        decode(frame)
    assert refusal.value.correlation == CORRELATION
    assert f"version {version}, expected {PROTOCOL_VERSION}" in str(refusal.value)
    assert "same kvhandoff minor version" in str(refusal.value)


@pytest.mark.parametrize(("body", "golden"), REQUESTS, ids=kind)
def test_truncated_requests_are_malformed(body: Request, golden: str) -> None:
    """However many bytes are missing."""
    frame = bytes.fromhex(golden)
    for length in range(len(frame)):
        with pytest.raises(Malformed):
            decode_request(frame[:length])
    with pytest.raises(Malformed):
        decode_request(frame + b"\x00")


@pytest.mark.parametrize(
    ("decode", "limit"), [(decode_request, MAX_REQUEST_BYTES), (decode_answer, MAX_ANSWER_BYTES)]
)
def test_oversized_frames_are_not_read(decode: Any, limit: int) -> None:
    """The refusal names the size and the bound; nothing of the frame is looked at."""
    with pytest.raises(Malformed, match=f"{limit + 1} bytes, at most {limit}") as refusal:
        decode(bytes(limit + 1))
    assert refusal.value.correlation is None


def test_the_largest_batch_of_renewals_fits() -> None:
    """A renewer never writes a message that a desk would not read."""
    renewals = Renew([HeldKey("r" * 200, "0" * 32)] * MAX_BATCH)
    frame = encode(1, renewals)
    assert len(frame) <= MAX_REQUEST_BYTES
    assert decode_request(frame) == (1, renewals)


KEY_ = ["r", "t"]
OPEN = {"type": "open", "key": KEY_, "pull": "p", "index": 0, "of": 1}


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        None,
        "status",
        {"type": "opened", "incarnation": "i", "blocks": [], "tokens": 1, "lease": 1.0},
        {"type": "nonsense"},
        {"type": "status", "verbose": True},
        OPEN | {"extra": 1},
        OPEN | {"key": ["r"]},
        OPEN | {"key": ["", "t"]},
        OPEN | {"key": {"request": "r", "ticket": "t"}},
        OPEN | {"key": ["r" * (MAX_NAME_LENGTH + 1), "t"]},
        OPEN | {"key": [b"r", "t"]},
        OPEN | {"pull": ""},
        OPEN | {"pull": None},
        OPEN | {"index": -1},
        OPEN | {"index": MAX_READERS},
        OPEN | {"index": 0.5},
        OPEN | {"index": True},
        OPEN | {"of": 0},
        OPEN | {"of": MAX_READERS + 1},
        {name: value for name, value in OPEN.items() if name != "pull"},
        {"type": "renew", "keys": [KEY_] * (MAX_BATCH + 1)},
        {"type": "renew", "keys": "rt"},
        {"type": "complete", "key": KEY_, "pull": "p", "index": 0, "ok": 1},
        {"type": "complete", "key": KEY_, "pull": "p", "index": 0, "ok": True, "report": []},
        {"type": "release", "key": KEY_, "pull": "p" * (MAX_NAME_LENGTH + 1)},
        {"type": "hello", "engine": "e", "fingerprint": {"model": "m"}},
    ],
    ids=lambda body: str(body)[:60],
)
def test_bodies_that_do_not_fit_are_malformed(body: object) -> None:
    """Unknown kinds and fields, wrong types and numbers out of range; the asker can be told."""
    frame = msgspec.msgpack.encode((PROTOCOL_VERSION, CORRELATION, body))
    with pytest.raises(Malformed) as refusal:
        decode_request(frame)
    assert refusal.value.correlation == CORRELATION


@pytest.mark.parametrize(
    "frame",
    [[], [1], [1, 2], {"version": 1}, ["1", 2, {}], [1, None, {}], [1.5, 2, {}], 1, "x", None],
    ids=str,
)
def test_frames_that_are_none_have_nobody_to_answer_to(frame: object) -> None:
    """Without a correlation id there is no answer, only a count."""
    with pytest.raises(Malformed) as refusal:
        decode_request(msgspec.msgpack.encode(frame))
    assert refusal.value.correlation is None


@pytest.mark.parametrize(
    "frame",
    [
        b"\x93\x01\x07" + b"\x91" * 1_000_000 + b"\x01",
        b"\x91" * 1_000_000,
        b"\x93\x01\x07\x82\xa1x" + b"\x81\xa1x" * 300_000 + b"\x01\xa4type\xa6status",
        b"\x93\x01\x07\xdd\xff\xff\xff\xff",
        b"\x93\x01\x07\xc6\xff\xff\xff\xff",
        b"\x93\x01\x07\x81\xa4type\xa2\xff\xfe",
    ],
    ids=["nested arrays", "nested frames", "nested maps", "huge array", "huge bytes", "not UTF-8"],
)
def test_hostile_frames_are_malformed(frame: bytes) -> None:
    """Nesting, lengths and text that are made to hurt cost an error like any other."""
    with pytest.raises(Malformed):
        decode_request(frame)
    with pytest.raises(Malformed):
        decode_answer(frame)


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": {"tp": 4097}},
        {"sizes": {"tp": 2, "dcp": 3}},
        {"workers": [[[0, 0], "s", [], []]]},
        {"workers": [[[0, 0, 0], "s", [], [["a", 0, [3, 1], 1, 4, 4, 2, 0, 32, 32, 8, 8]]]]},
        {"workers": [[[0, 0, 0], "s", [["base", 1]], []]]},
    ],
    ids=["too large", "impossible dcp", "no coordinate", "no head range", "no address"],
)
def test_catalogs_are_read_into_valid_values_only(fields: dict[str, Any]) -> None:
    """What a type refuses to be made of, a catalog cannot hold."""
    golden = dict(msgspec.to_builtins(ANSWERS[0][0])) | {"sizes": {}} | fields
    with pytest.raises(Malformed):
        decode_answer(msgspec.msgpack.encode((PROTOCOL_VERSION, CORRELATION, golden)))
