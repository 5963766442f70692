# SPDX-License-Identifier: Apache-2.0
"""Frames that nobody should send: they are refused in the two known ways, and the desk lives on."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from random import Random

import msgspec
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvhandoff.channel import Client
from kvhandoff.ids import Endpoint
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.protocol.catalog import Catalog, Fingerprint
from kvhandoff.protocol.messages import (
    MAX_REQUEST_BYTES,
    Complete,
    HeldKey,
    Hello,
    Malformed,
    Message,
    Open,
    PullReport,
    Release,
    Renew,
    Status,
    WrongVersion,
    decode_answer,
    decode_request,
    encode,
)
from kvhandoff.runtime.desk import Desk
from tests.oracle import CacheShape, ModelShape, make_engine
from tests.profiles import examples

HOST = "127.0.0.1"
PATIENCE = 20.0
FINGERPRINT = Fingerprint("model", "tiny", "weights", "float32", "auto", "layers")
KEY = HeldKey("request", "0" * 32)

VALID = [
    encode(number, body)
    for number, body in enumerate(
        [
            Hello("engine", FINGERPRINT),
            Open(KEY, "pull", 0, 2),
            Renew([KEY] * 3),
            Complete(KEY, "pull", 0, True, 0.0, PullReport(sources=[1, 2])),
            Release(KEY, "pull"),
            Status(),
        ]
    )
]


def outcome(frame: bytes) -> str:
    """What decoding a frame comes to; anything but these three is a bug."""
    for decode in (decode_answer, decode_request):
        try:
            _, body = decode(frame)
        except (WrongVersion, Malformed) as error:
            result = type(error).__name__
        else:
            assert isinstance(body, Message | Catalog)
            result = "decoded"
    return result


@settings(max_examples=examples(500))
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x93\x01\x01\xc0")
def test_random_bytes_are_refused(frame: bytes) -> None:
    """Any bytes at all."""
    outcome(frame)


@settings(max_examples=examples(300))
@given(
    frame=st.sampled_from(VALID),
    edits=st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=4)), max_size=4),
    cut=st.integers(0, 1 << 16),
)
def test_mutated_frames_are_refused_or_read(frame: bytes, edits: list, cut: int) -> None:
    """Valid frames with a few bytes overwritten, inserted or missing."""
    for place, piece in edits:
        at = place % (len(frame) + 1)
        frame = frame[:at] + piece + frame[at + place % 3 :]
    outcome(frame)
    outcome(frame[: cut % (len(frame) + 1)])


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=20)
values = st.recursive(
    scalars | st.floats() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalars, inner, max_size=4),
    max_leaves=12,
)
kinds = st.sampled_from(["hello", "open", "renew", "complete", "release", "status", "catalog"])
names = st.sampled_from(["key", "keys", "pull", "index", "of", "ok", "report", "engine", "workers"])


@settings(max_examples=examples(100))
@given(
    version=st.just(1) | values,
    correlation=st.integers(-(1 << 63), (1 << 64) - 1) | values,
    body=values | st.fixed_dictionaries({"type": kinds}, optional={}).flatmap(
        lambda head: st.dictionaries(names, values, max_size=5).map(lambda tail: head | tail)
    ),
)  # fmt: skip
def test_well_formed_nonsense_is_refused_or_read(
    version: object, correlation: object, body: object
) -> None:
    """Valid msgpack with any values where a frame has its parts."""
    outcome(msgspec.msgpack.encode((version, correlation, body)))


@pytest.fixture
def desk() -> Iterator[Desk]:
    sizes = ParallelSizes()
    workers = tuple(
        cache.layout for cache in make_engine(ModelShape(), sizes, CacheShape()).values()
    )
    catalog = Catalog("engine", "incarnation", FINGERPRINT, sizes, 30.0, workers)
    desk = Desk(Endpoint(HOST, 0), catalog, max_hold=900.0)
    yield desk
    desk.close()


@pytest.fixture
def connect(desk: Desk) -> Iterator[Callable[[], zmq.Socket[bytes]]]:
    """Makes raw sockets to the desk, for frames that no client would send."""
    context = zmq.Context()

    def connect() -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
        socket.connect(f"tcp://{HOST}:{desk.port}")
        return socket

    yield connect
    context.destroy(linger=0)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def greet(client: Client, desk: Desk) -> object:
    answers: queue.Queue[object] = queue.Queue()
    client.ask(Endpoint(HOST, desk.port), Hello("decode", FINGERPRINT), PATIENCE, answers.put)
    return answers.get(timeout=PATIENCE)


def hostile_message(random: Random, number: int) -> list[bytes]:
    """A message of one or more parts: random, truncated, mutated, too long, nested, or valid."""
    frame = bytearray(random.choice(VALID))
    match number % 7:
        case 0:
            return [random.randbytes(random.randrange(64))]
        case 1:
            return [bytes(frame[: random.randrange(len(frame))])]
        case 2:
            frame[random.randrange(len(frame))] = random.randrange(256)
            return [bytes(frame)]
        case 3:
            return [random.randbytes(8) for _ in range(random.randrange(2, 5))]
        case 4:
            return [bytes(frame) + random.randbytes(4)]
        case 5:
            return [b"\x93\x01\x07" + b"\x91" * random.randrange(10_000)]
        case _:
            return [bytes(frame)]


def test_a_desk_outlives_hostile_frames(
    desk: Desk, client: Client, connect: Callable[[], zmq.Socket[bytes]]
) -> None:
    """Thousands of bad messages cost answers and counts; whoever asks properly is answered.

    After each hundred a good message shows that the desk has come that far.
    """
    socket, random = connect(), Random(3)
    for mark in range(1 << 20, (1 << 20) + 40):
        for number in range(100):
            socket.send_multipart(hostile_message(random, number))
        socket.send(encode(mark, Status()))
        while correlation_of(socket.recv()) != mark:
            pass
    assert desk.counters["malformed"] > 2000
    assert isinstance(greet(client, desk), Catalog)
    assert desk.take_free() == set()


def test_oversized_frames_cost_their_sender_the_connection(
    desk: Desk, client: Client, connect: Callable[[], zmq.Socket[bytes]]
) -> None:
    """The desk does not read them; the sender can connect again, others notice nothing."""
    socket = connect()
    for _ in range(3):
        socket.send(bytes(MAX_REQUEST_BYTES + 1))
    assert isinstance(greet(client, desk), Catalog)
    deadline = time.monotonic() + PATIENCE
    while not socket.poll(20):
        assert time.monotonic() < deadline
        socket.send(encode(1, Status()))
    assert correlation_of(socket.recv()) == 1
    assert desk.counters["malformed"] == 0


def correlation_of(answer: bytes) -> int:
    return decode_answer(answer)[0]
