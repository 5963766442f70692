# SPDX-License-Identifier: Apache-2.0
"""Request and answer over ZMQ: a ROUTER on the desk, one DEALER for each peer on a consumer.

This is the only module that imports ``zmq``. Each frame in either direction is one message of
:mod:`kvhandoff.protocol.messages`; a socket never blocks its owner, and lost messages are the
deadline's business.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import zmq

from kvhandoff.errors import PeerUnreachable, ProtocolError, UnsupportedSetup
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Answer,
    Malformed,
    Refused,
    Request,
    WrongVersion,
    decode_answer,
    decode_request,
    encode,
)

logger = logging.getLogger(__name__)

MAX_IDLE_PEERS = 256
"""Sockets that a client keeps open for peers it has no question to; a ZMQ context has 1023."""


@dataclass(frozen=True)
class ReplyAddress:
    """Where an answer goes: a ROUTER identity and the asker's correlation id."""

    identity: bytes
    correlation: int


class Server:
    """The desk's socket. Everything but :meth:`wake` belongs to one thread.

    Args:
        bind: address and port; port 0 takes a free one, :attr:`port` tells which.

    Raises:
        UnsupportedSetup: if the port cannot be bound.
    """

    def __init__(self, bind: Endpoint) -> None:
        self.malformed = 0
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            self._socket.bind(bind.url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UnsupportedSetup.because(
                "the desk cannot listen",
                found=f"{bind}: {error}",
                expected="a free port on an address of this host",
                change="change kv_port (0 takes any free port) or bind_host",
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._bell = _Bell(self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell.listener, zmq.POLLIN)

    def wake(self) -> None:
        """End a :meth:`receive` early; from any thread."""
        self._bell.ring()

    def receive(self, timeout: float) -> Iterator[tuple[ReplyAddress, Request]]:
        """Wait up to ``timeout`` seconds, then yield what came; bad frames are answered here."""
        self._poller.poll(max(0, int(timeout * 1000)))
        self._bell.quiet()
        for _ in range(256):  # then let the owner look at its clock
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(frames)
            if message is not None:
                yield message

    def _decode(self, frames: list[bytes]) -> tuple[ReplyAddress, Request] | None:
        if len(frames) != 2:
            self.malformed += 1
            return None
        identity, frame = frames
        try:
            correlation, request = decode_request(frame)
            return ReplyAddress(identity, correlation), request
        except (WrongVersion, Malformed) as error:
            self.malformed += 1
            if error.correlation is not None:
                version = isinstance(error, WrongVersion)
                refusal = Refused("version" if version else "malformed", str(error))
                self.reply(ReplyAddress(identity, error.correlation), refusal)
            return None

    def reply(self, to: ReplyAddress, answer: Answer) -> None:
        """Send an answer; a peer that has gone or does not read loses it."""
        try:
            self._socket.send_multipart((to.identity, encode(to.correlation, answer)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("answer to a peer that has gone was dropped: %s", error)

    def close(self) -> None:
        """Free the port."""
        self._bell.close()
        self._context.destroy(linger=0)


OnAnswer: TypeAlias = Callable[["Answer | PeerUnreachable | ProtocolError"], None]
"""Gets what came of a question, on the client's thread; must not block."""


@dataclass
class _Question:
    endpoint: Endpoint
    deadline: float
    seconds: float
    on_answer: OnAnswer


class Client:
    """Asks desks and calls back. One thread serves all peers; any thread may :meth:`ask`."""

    def __init__(self, name: str = "kvhandoff-client") -> None:
        self._context = zmq.Context(io_threads=1)
        self._bell = _Bell(self._context)
        self._inbox: deque[tuple[_Question, Request]] = deque()
        self._stopping = False
        self._correlation = itertools.count(1)
        self._sockets: dict[Endpoint, zmq.Socket[bytes]] = {}
        self._open: dict[int, _Question] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(
        self, endpoint: Endpoint, request: Request, timeout: float, on_answer: OnAnswer
    ) -> None:
        """Send ``request``; ``on_answer`` is called once, within about ``timeout`` seconds."""
        question = _Question(endpoint, time.monotonic() + timeout, timeout, on_answer)
        self._inbox.append((question, request))
        self._bell.ring()

    def close(self) -> None:
        """Stop; open questions are answered with :class:`PeerUnreachable`."""
        self._stopping = True
        self._bell.ring()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.listener, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(self._until_next_deadline()))
            self._bell.quiet()
            self._send_new(poller)
            for socket in [s for s in self._sockets.values() if s in ready]:
                self._receive(socket)
            self._give_up_late(poller)
        for question in list(self._open.values()):
            self._settle(question, PeerUnreachable("this engine is shutting down"))
        while self._inbox:  # asked too late to be sent, or from one of these callbacks
            self._settle(self._inbox.popleft()[0], PeerUnreachable("this engine is shutting down"))
        self._bell.close()
        self._context.destroy(linger=0)

    def _until_next_deadline(self) -> int:
        nearest = min((q.deadline for q in self._open.values()), default=None)
        if nearest is None:
            return 60_000
        return max(0, int((nearest - time.monotonic()) * 1000) + 1)

    def _send_new(self, poller: zmq.Poller) -> None:
        while self._inbox:
            question, request = self._inbox.popleft()
            correlation = next(self._correlation)
            self._open[correlation] = question
            try:
                socket = self._sockets.get(question.endpoint) or self._connect(
                    question.endpoint, poller
                )
                socket.send(encode(correlation, request), zmq.NOBLOCK)
            except (zmq.ZMQError, msgspec.MsgspecError, ValueError, TypeError) as error:
                del self._open[correlation]
                self._settle(
                    question, PeerUnreachable(f"cannot send to {question.endpoint}: {error}")
                )

    def _connect(self, endpoint: Endpoint, poller: zmq.Poller) -> zmq.Socket[bytes]:
        if len(self._sockets) >= MAX_IDLE_PEERS:
            self._drop_idle(poller)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(endpoint.url)
        poller.register(socket, zmq.POLLIN)
        self._sockets[endpoint] = socket
        return socket

    def _drop_idle(self, poller: zmq.Poller) -> None:
        busy = {question.endpoint for question in self._open.values()}
        for endpoint in [e for e in self._sockets if e not in busy]:
            self._drop(endpoint, poller)

    def _drop(self, endpoint: Endpoint, poller: zmq.Poller) -> None:
        socket = self._sockets.pop(endpoint, None)
        if socket is not None:
            poller.unregister(socket)
            socket.close(0)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            result: Answer | ProtocolError
            try:
                correlation, result = decode_answer(frame)
            except (WrongVersion, Malformed) as error:
                if error.correlation is None:
                    logger.warning("a desk sent a frame that does not decode: %s", error)
                    continue
                correlation, result = error.correlation, error
            question = self._open.pop(correlation, None)
            if question is not None:
                self._settle(question, result)

    def _give_up_late(self, poller: zmq.Poller) -> None:
        now = time.monotonic()
        for correlation in [c for c, q in self._open.items() if q.deadline <= now]:
            question = self._open.pop(correlation)
            # A fresh socket next time: this one may hold messages for a peer that has gone.
            if not any(q.endpoint == question.endpoint for q in self._open.values()):
                self._drop(question.endpoint, poller)
            self._settle(
                question,
                PeerUnreachable(
                    f"the desk at {question.endpoint} did not answer within {question.seconds:g} s"
                ),
            )

    @staticmethod
    def _settle(question: _Question, result: Answer | PeerUnreachable | ProtocolError) -> None:
        try:
            question.on_answer(result)
        except Exception:
            logger.exception("callback for an answer from %s failed", question.endpoint)


class _Bell:
    """Wakes the thread that polls :attr:`listener`; unheard rings are one ring."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.listener = context.socket(zmq.PAIR)
        self._hammer = context.socket(zmq.PAIR)
        address = f"inproc://bell-{id(self)}"
        self.listener.bind(address)
        self._hammer.connect(address)
        self._lock = threading.Lock()
        self._rung = False

    def ring(self) -> None:
        with self._lock:
            if not self._rung and not self._hammer.closed:
                self._rung = True
                self._hammer.send(b"", zmq.NOBLOCK)

    def quiet(self) -> None:
        with self._lock:
            if self._rung and self.listener.poll(0):
                self.listener.recv(zmq.NOBLOCK)
                self._rung = False

    def close(self) -> None:
        with self._lock:
            self._hammer.close(0)
            self.listener.close(0)
