# SPDX-License-Identifier: Apache-2.0
"""Questions and answers over real sockets: each is settled once, whatever the other side does."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from kvhandoff.channel import MAX_IDLE_PEERS, Client, ReplyAddress, Server
from kvhandoff.errors import PeerUnreachable, ThreadDied, UnsupportedSetup
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import (
    Completed,
    Done,
    Refused,
    Request,
    Status,
    WrongVersion,
    decode_answer,
    encode,
)

HOST = "127.0.0.1"
PATIENCE = 20.0
Serve = Callable[[Server, ReplyAddress, Request], None]


class Echo:
    """A server on a thread of its own, which does with each question what it is told to."""

    def __init__(self, host: str, serve: Serve, key: bytes | None) -> None:
        self.server = Server(Endpoint(host, 0), key)
        self.endpoint = Endpoint(host, self.server.port)
        self._serve = serve
        self._stopping = False
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            for to, request in self.server.receive(1.0):
                self._serve(self.server, to, request)
            while not self._mail.empty():
                self._mail.get()()
        self.server.close()

    def later(self, function: Callable[[], None]) -> None:
        """Do something on the server's thread."""
        self._mail.put(function)
        self.server.wake()

    def close(self) -> None:
        self._stopping = True
        self.server.wake()
        self._thread.join(PATIENCE)


def answer_done(server: Server, to: ReplyAddress, request: Request) -> None:
    server.reply(to, Done())


def answer_nothing(server: Server, to: ReplyAddress, request: Request) -> None:
    """A desk that is there and silent."""


@pytest.fixture
def start() -> Iterator[Callable[..., Echo]]:
    started: list[Echo] = []

    def start(serve: Serve = answer_done, host: str = HOST, key: bytes | None = None) -> Echo:
        started.append(Echo(host, serve, key))
        return started[-1]

    yield start
    for echo in started:
        echo.close()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def ask(client: Client, endpoint: Endpoint, timeout: float = PATIENCE) -> object:
    """Ask and wait for whatever comes of it."""
    results: queue.Queue[object] = queue.Queue()
    client.ask(endpoint, Status(), timeout, results.put)
    return results.get(timeout=PATIENCE)


@pytest.fixture
def dealer(start: Callable[..., Echo]) -> Iterator[zmq.Socket[bytes]]:
    """A raw socket to a server, for frames that no client would send."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    socket.connect(start().endpoint.url)
    yield socket
    context.destroy(linger=0)


def test_a_question_is_answered(start: Callable[..., Echo], client: Client) -> None:
    """The plain case, several times over one connection."""
    echo = start()
    assert [ask(client, echo.endpoint) for _ in range(5)] == [Done()] * 5


def test_answers_may_come_later_and_in_another_order(
    start: Callable[..., Echo], client: Client
) -> None:
    """A parked question is answered when there is something to say; answers find their askers."""
    parked: list[ReplyAddress] = []

    def answer_third(server: Server, to: ReplyAddress, request: Request) -> None:
        parked.append(to)
        if len(parked) == 3:
            verdicts = ("held", "expired", "released")
            for address, verdict in reversed(list(zip(parked, verdicts, strict=True))):
                server.reply(address, Completed(verdict))

    echo = start(answer_third)
    results: queue.Queue[tuple[int, object]] = queue.Queue()
    for number in range(3):
        client.ask(
            echo.endpoint, Status(), PATIENCE, lambda result, n=number: results.put((n, result))
        )
    answers = [results.get(timeout=PATIENCE) for _ in range(3)]
    assert answers == [
        (2, Completed("released")),
        (1, Completed("expired")),
        (0, Completed("held")),
    ]


def test_repeated_and_unasked_answers_are_passed_over(
    start: Callable[..., Echo], client: Client
) -> None:
    """Only the first answer to a question counts."""

    def answer_twice(server: Server, to: ReplyAddress, request: Request) -> None:
        server.reply(ReplyAddress(to.identity, to.correlation + 1000), Done())
        server.reply(to, Completed("held"))
        server.reply(to, Completed("expired"))

    echo = start(answer_twice)
    assert [ask(client, echo.endpoint) for _ in range(3)] == [Completed("held")] * 3


@pytest.fixture
def hole() -> Iterator[Endpoint]:
    """A port that takes connections and never says a word."""
    with socket.create_server((HOST, 0)) as listener:
        yield Endpoint(HOST, listener.getsockname()[1])


@pytest.mark.parametrize("desk", [True, False], ids=["a desk", "something else"])
def test_deadlines_settle_questions(
    start: Callable[..., Echo], client: Client, hole: Endpoint, desk: bool
) -> None:
    """Whoever does not answer is unreachable, by name, after the time that was given."""
    endpoint = start(answer_nothing).endpoint if desk else hole
    result = ask(client, endpoint, timeout=0.05)
    assert isinstance(result, PeerUnreachable)
    assert f"{endpoint} did not answer within 0.05 s" in str(result)
    assert ask(client, start().endpoint) == Done()


@pytest.mark.parametrize("host", ["..", "-"])
def test_hosts_that_cannot_be_dialled_are_unreachable(
    start: Callable[..., Echo], client: Client, host: str
) -> None:
    """The client says so at once and goes on."""
    result = ask(client, Endpoint(host, 5555))
    assert isinstance(result, PeerUnreachable)
    assert host in str(result)
    assert ask(client, start().endpoint) == Done()


def test_other_versions_are_answered_in_words(dealer: zmq.Socket[bytes]) -> None:
    """The asker learns what is spoken here, under its own correlation id."""
    dealer.send(msgspec.msgpack.encode((99, 5, {"type": "from the future"})))
    correlation, answer = decode_answer(dealer.recv())
    assert correlation == 5
    assert isinstance(answer, Refused)
    assert answer.code == "version"
    assert "version 99, expected 1" in answer.reason


def test_malformed_bodies_are_answered_in_words(dealer: zmq.Socket[bytes]) -> None:
    """And the same connection serves what is well-formed."""
    dealer.send(msgspec.msgpack.encode((1, 6, {"type": "nonsense"})))
    correlation, answer = decode_answer(dealer.recv())
    assert correlation == 6
    assert isinstance(answer, Refused)
    assert answer.code == "malformed"
    dealer.send(encode(7, Status()))
    assert decode_answer(dealer.recv()) == (7, Done())


def test_frames_without_an_asker_cost_nothing(dealer: zmq.Socket[bytes]) -> None:
    """What has no correlation id, or too many parts, is counted and dropped."""
    dealer.send(b"\xff\xff")
    dealer.send(b"")
    dealer.send_multipart([b"", encode(1, Status())])
    dealer.send_multipart([encode(2, Status())] * 3)
    dealer.send(encode(3, Status()))
    assert decode_answer(dealer.recv()) == (3, Done())


def test_answers_of_another_version_are_errors_for_the_asker(client: Client) -> None:
    """A client tells its caller instead of letting the deadline pass."""
    results: queue.Queue[object] = queue.Queue()
    context = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        port = router.bind_to_random_port(f"tcp://{HOST}")
        client.ask(Endpoint(HOST, port), Status(), PATIENCE, results.put)
        identity, frame = router.recv_multipart()
        _, correlation, _ = msgspec.msgpack.decode(frame)
        router.send_multipart([identity, b"\xff not an answer"])
        router.send_multipart([identity, msgspec.msgpack.encode((2, correlation, None))])
        assert isinstance(results.get(timeout=PATIENCE), WrongVersion)
    finally:
        context.destroy(linger=0)


def test_a_taken_port_is_refused_by_setting() -> None:
    """The refusal names the address and what to change, and leaves nothing behind."""
    server = Server(Endpoint(HOST, 0))
    try:
        with pytest.raises(UnsupportedSetup) as refusal:
            Server(Endpoint(HOST, server.port))
        assert f"{HOST}:{server.port}" in str(refusal.value)
        assert "kv_port" in str(refusal.value)
    finally:
        server.close()


def test_a_closed_server_frees_its_port() -> None:
    """An engine that restarts listens on the same port again."""
    server = Server(Endpoint(HOST, 0))
    server.close()
    again = Server(Endpoint(HOST, server.port))
    assert again.port == server.port
    again.close()


def test_ipv6_works(start: Callable[..., Echo], client: Client) -> None:
    """Where the machine has it: bound, named with brackets, and asked."""
    try:
        echo = start(host="::1")
    except UnsupportedSetup:
        pytest.skip("this machine has no IPv6 loopback")
    assert str(echo.endpoint) == f"[::1]:{echo.server.port}"
    assert ask(client, echo.endpoint) == Done()


def test_closing_a_client_settles_what_is_open(start: Callable[..., Echo]) -> None:
    """Nobody waits for a client that has gone, not even who asks while it goes."""
    client = Client()
    asked = threading.Event()
    silent = start(lambda server, to, request: asked.set())
    results: queue.Queue[object] = queue.Queue()

    def ask_again(result: object) -> None:
        results.put(result)
        client.ask(silent.endpoint, Status(), PATIENCE, results.put)

    client.ask(silent.endpoint, Status(), PATIENCE, ask_again)
    assert asked.wait(PATIENCE)
    client.close()
    for _ in range(2):
        assert isinstance(results.get(timeout=PATIENCE), PeerUnreachable)
    assert results.empty()


def test_a_callback_that_fails_does_not_stop_the_client(
    start: Callable[..., Echo], client: Client
) -> None:
    """The next question is answered as if nothing had happened."""
    echo = start()

    def fail(result: object) -> None:
        raise RuntimeError("a bug in a callback")

    client.ask(echo.endpoint, Status(), PATIENCE, fail)
    assert ask(client, echo.endpoint) == Done()


def test_peers_are_bounded(start: Callable[..., Echo], client: Client) -> None:
    """More peers than sockets: idle ones make room, and all are answered.

    All addresses of 127.0.0.0/8 lead to this machine, so one server plays all the peers.
    """
    echo = start(host="0.0.0.0")
    for number in range(MAX_IDLE_PEERS + 300):
        endpoint = Endpoint(f"127.0.{number // 250}.{number % 250 + 1}", echo.server.port)
        assert ask(client, endpoint) == Done()


@pytest.mark.parametrize(
    ("asker", "answered"),
    [(b"a key that both sides know", True), (b"a key that is another one", False), (None, False)],
    ids=["same", "other", "none"],
)
def test_a_desk_with_a_key_answers_who_has_it(
    start: Callable[..., Echo], asker: bytes | None, answered: bool
) -> None:
    """Others get no answer, as nothing of what they send is even decoded."""
    heard: list[Request] = []

    def hear(server: Server, to: ReplyAddress, request: Request) -> None:
        heard.append(request)
        server.reply(to, Done())

    echo = start(hear, key=b"a key that both sides know")
    client = Client(key=asker)
    try:
        result = ask(client, echo.endpoint, timeout=PATIENCE)
    finally:
        client.close()
    assert isinstance(result, Done if answered else PeerUnreachable)
    assert len(heard) == answered
    if not answered:
        assert "has another shared_key" in str(result)


def test_an_asker_with_a_key_trusts_no_desk_without(start: Callable[..., Echo]) -> None:
    """Somebody who took over the address of a desk learns nothing."""
    heard: list[Request] = []
    echo = start(lambda server, to, request: heard.append(request))
    client = Client(key=b"a key that the real desk knows")
    try:
        assert "has another shared_key" in str(ask(client, echo.endpoint))
    finally:
        client.close()
    assert heard == []


def test_a_closed_client_answers_at_once(start: Callable[..., Echo]) -> None:
    """Whoever asks too late is told, and does not wait for a deadline that nobody watches."""
    client = Client()
    client.close()
    results: queue.Queue[object] = queue.Queue()
    client.ask(start().endpoint, Status(), PATIENCE, results.put)
    assert isinstance(results.get_nowait(), PeerUnreachable)


def test_unused_connections_are_closed(start: Callable[..., Echo]) -> None:
    """A peer that was scaled down is not dialled for ever; one that is asked again is there."""
    client = Client(idle=0.1)
    echo = start()
    try:
        assert ask(client, echo.endpoint) == Done()
        end = time.monotonic() + PATIENCE
        while client.connections and time.monotonic() < end:
            time.sleep(0.05)
        assert client.connections == 0
        assert ask(client, echo.endpoint) == Done()
    finally:
        client.close()


def test_a_refused_connection_is_known_soon(client: Client) -> None:
    """Nobody waits for a deadline; whoever asks again is told again."""
    for _ in range(2):
        began = time.monotonic()
        result = ask(client, Endpoint(HOST, 1))
        assert isinstance(result, PeerUnreachable)
        assert f"{HOST}:1 cannot be reached: nobody listens there" in str(result)
        assert time.monotonic() - began < PATIENCE / 2


def test_a_desk_that_goes_is_missed_soon(client: Client) -> None:
    """It had the question; the connection ends before the answer."""
    server = Server(Endpoint(HOST, 0))
    results: queue.Queue[object] = queue.Queue()
    endpoint = Endpoint(HOST, server.port)
    client.ask(endpoint, Status(), 10 * PATIENCE, results.put)
    while not list(server.receive(0.1)):
        pass
    server.close()
    assert "nobody listens there" in str(results.get(timeout=PATIENCE))


def test_a_desk_that_comes_back_is_found(client: Client) -> None:
    """On the same port, while somebody asks again and again."""
    server = Server(Endpoint(HOST, 0))
    server.close()
    endpoint = Endpoint(HOST, server.port)
    assert isinstance(ask(client, endpoint), PeerUnreachable)
    server = Server(endpoint)
    results: queue.Queue[object] = queue.Queue()
    client.ask(endpoint, Status(), PATIENCE, results.put)
    try:
        while not (asked := list(server.receive(0.1))):
            pass
        server.reply(asked[0][0], Done())
        assert results.get(timeout=PATIENCE) == Done()
    finally:
        server.close()


def test_only_the_desk_that_was_asked_answers(start: Callable[..., Echo], client: Client) -> None:
    """Another desk that knows the number of the question says what it likes."""
    numbers: queue.Queue[int] = queue.Queue()
    asked: queue.Queue[ReplyAddress] = queue.Queue()
    honest = start(lambda server, to, request: numbers.put(to.correlation))
    forger = start(lambda server, to, request: asked.put(to))
    results: queue.Queue[object] = queue.Queue()
    lies: queue.Queue[object] = queue.Queue()
    client.ask(honest.endpoint, Status(), 1.0, results.put)
    client.ask(forger.endpoint, Status(), PATIENCE, lies.put)
    number, to = numbers.get(timeout=PATIENCE), asked.get(timeout=PATIENCE)
    forger.later(lambda: forger.server.reply(ReplyAddress(to.identity, number), Completed("held")))
    forger.later(lambda: forger.server.reply(to, Done()))
    assert lies.get(timeout=PATIENCE) == Done()
    assert isinstance(results.get(timeout=PATIENCE), PeerUnreachable)


def test_a_message_of_many_parts_is_bounded(dealer: zmq.Socket[bytes]) -> None:
    """Its parts are received one by one and not kept."""
    dealer.send_multipart([b"part"] * 100_000)
    dealer.send(encode(3, Status()))
    assert decode_answer(dealer.recv()) == (3, Done())


def test_the_death_of_the_thread_is_noticed(
    start: Callable[..., Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open questions are settled, and the owner learns that no other will be."""
    client = Client()
    client.require_alive()

    def break_down(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(client, "_send_new", break_down)
    assert isinstance(ask(client, start().endpoint), PeerUnreachable)
    client.close()
    with pytest.raises(ThreadDied, match="a bug"):
        client.require_alive()
