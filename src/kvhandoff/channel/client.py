# SPDX-License-Identifier: Apache-2.0
"""The asking side: questions to many desks, each answered once, by the desk that was asked."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import zmq

from kvhandoff.channel.bell import Bell
from kvhandoff.channel.connection import Connection
from kvhandoff.channel.keys import Keys
from kvhandoff.errors import PeerUnreachable, ProtocolError, ThreadDied
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import (
    Answer,
    Malformed,
    Request,
    WrongVersion,
    decode_answer,
    encode,
)

logger = logging.getLogger(__name__)

MAX_IDLE_PEERS = 256
"""Connections that a client keeps open to peers it has no question to."""

IDLE_SECONDS = 300.0
"""A connection that was not used for so long is closed: its peer may have been scaled down, and
ZMQ would try to reach it for ever."""

DOWN_SECONDS = 0.5
"""A peer that refuses connections for so long while somebody asks it is not there."""

_SOCKETS = 4096
_CLOSED = "this engine is shutting down"

OnAnswer: TypeAlias = Callable[["Answer | PeerUnreachable | ProtocolError"], None]
"""Gets what came of a question, on the client's thread; must not block."""


class _Question:
    def __init__(self, endpoint: Endpoint, seconds: float, on_answer: OnAnswer) -> None:
        self.endpoint = endpoint
        self.seconds = seconds
        self.asked = time.monotonic()
        self.deadline = self.asked + seconds
        self.on_answer = on_answer
        self.connection: Connection | None = None


class Client:
    """Asks desks and calls back. One thread serves all peers; any thread may :meth:`ask`.

    Args:
        key: the desks' shared key, if they have one.
        idle: seconds after which an unused connection is closed.

    Raises:
        UnsupportedSetup: if there is a key and ZMQ cannot use it.
    """

    def __init__(
        self,
        name: str = "kvhandoff-client",
        *,
        key: bytes | None = None,
        idle: float = IDLE_SECONDS,
    ) -> None:
        self._keys = None if key is None else Keys(key)
        self._idle = idle
        self._death: BaseException | None = None
        self._lock = threading.Lock()
        self._over = False  # under the lock: nothing enters the inbox any more
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS)
        self._bell = Bell(self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._bell.listener, zmq.POLLIN)
        self._inbox: deque[tuple[_Question, Request]] = deque()
        self._stopping = False
        self._correlation = itertools.count(secrets.randbits(62))  # nobody else can name a question
        self._connections: dict[Endpoint, Connection] = {}
        self._open: dict[int, _Question] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(
        self, endpoint: Endpoint, request: Request, timeout: float, on_answer: OnAnswer
    ) -> None:
        """Send ``request``; ``on_answer`` is called once, within about ``timeout`` seconds.

        It is called much sooner if nobody listens there, and at once, on the caller's thread,
        after :meth:`close`.
        """
        question = _Question(endpoint, timeout, on_answer)
        with self._lock:
            over = self._over
            if not over:
                self._inbox.append((question, request))
        if over:
            self._settle(question, PeerUnreachable(_CLOSED))
        else:
            self._bell.ring()

    def require_alive(self) -> None:
        """Raise :class:`ThreadDied` if answers will never come."""
        if self._death is not None:
            raise ThreadDied(f"the thread that asks prefill engines stopped: {self._death!r}")

    @property
    def connections(self) -> int:
        """Peers that a socket is open to."""
        return len(self._connections)

    def close(self) -> None:
        """Stop; open questions are answered with :class:`PeerUnreachable`."""
        self._stopping = True
        self._bell.ring()
        self._thread.join(timeout=5)

    # ---- the client's thread ----

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            logger.exception("the thread that asks prefill engines stopped")
            self._death = error
        finally:
            with self._lock:
                self._over = True
            for question in [*self._open.values(), *(question for question, _ in self._inbox)]:
                self._settle(question, PeerUnreachable(_CLOSED))
            self._bell.close()
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._stopping:
            ready = dict(self._poller.poll(self._until_next_deadline()))
            self._bell.quiet()
            self._send_new()
            for connection in list(self._connections.values()):
                if connection.monitor in ready:
                    connection.look()
                if connection.socket in ready:
                    self._receive(connection)
            self._give_up()
            self._drop_unused(time.monotonic() - self._idle)

    def _until_next_deadline(self) -> int:
        now = time.monotonic()
        nearest = min((self._due(q)[0] for q in self._open.values()), default=now + 60)
        for connection in self._connections.values():
            nearest = min(nearest, max(now + 1, connection.used + self._idle))
        return max(0, int((nearest - now) * 1000) + 1)

    def _due(self, question: _Question) -> tuple[float, str]:
        """When a question is given up, and why."""
        late = f"did not answer within {question.seconds:g} s"
        down = None if question.connection is None else question.connection.down
        if down is not None:
            soon = max(down.since, question.asked) + DOWN_SECONDS
            if soon < question.deadline:
                return soon, down.reason
        return question.deadline, late

    def _send_new(self) -> None:
        while self._inbox:
            question, request = self._inbox.popleft()
            correlation = next(self._correlation)
            try:
                question.connection = self._connection_to(question.endpoint)
                question.connection.socket.send(encode(correlation, request), zmq.NOBLOCK)
            except (zmq.ZMQError, msgspec.MsgspecError, ValueError, TypeError) as error:
                self._settle(
                    question, PeerUnreachable(f"cannot send to {question.endpoint}: {error}")
                )
            else:
                self._open[correlation] = question

    def _connection_to(self, endpoint: Endpoint) -> Connection:
        connection = self._connections.get(endpoint)
        if connection is None:
            if len(self._connections) >= MAX_IDLE_PEERS:
                self._drop_unused(time.monotonic())
            connection = Connection(self._context, endpoint, self._keys)
            self._connections[endpoint] = connection
            self._poller.register(connection.socket, zmq.POLLIN)
            self._poller.register(connection.monitor, zmq.POLLIN)
        connection.used = time.monotonic()
        return connection

    def _drop_unused(self, since: float) -> None:
        unused = [each for each in self._connections.values() if each.used <= since]
        if unused:
            busy = {question.endpoint for question in self._open.values()}
            for connection in unused:
                if connection.endpoint not in busy:
                    self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection.endpoint]
        self._poller.unregister(connection.socket)
        self._poller.unregister(connection.monitor)
        connection.close()

    def _receive(self, connection: Connection) -> None:
        while True:
            try:
                frame = connection.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            result: Answer | ProtocolError
            try:
                correlation, result = decode_answer(frame)
            except (WrongVersion, Malformed) as error:
                if error.correlation is None:
                    logger.warning("%s sent a frame that does not decode", connection.endpoint)
                    continue
                correlation, result = error.correlation, error
            question = self._open.get(correlation)
            if question is None:
                continue
            if question.connection is not connection:
                logger.error("%s answered a question to %s", connection.endpoint, question.endpoint)
                continue
            del self._open[correlation]
            self._settle(question, result)

    def _give_up(self) -> None:
        now = time.monotonic()
        for correlation, question in list(self._open.items()):
            due, reason = self._due(question)
            if due > now:
                continue
            del self._open[correlation]
            connection = question.connection
            # A fresh socket next time: this one may hold messages for a peer that has gone.
            if (
                connection is not None
                and self._connections.get(question.endpoint) is connection
                and not any(q.connection is connection for q in self._open.values())
            ):
                self._drop(connection)
            self._settle(question, PeerUnreachable(f"the desk at {question.endpoint} {reason}"))

    @staticmethod
    def _settle(question: _Question, result: Answer | PeerUnreachable | ProtocolError) -> None:
        try:
            question.on_answer(result)
        except Exception:
            logger.exception("callback for an answer from %s failed", question.endpoint)
