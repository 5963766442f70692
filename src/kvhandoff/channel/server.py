# SPDX-License-Identifier: Apache-2.0
"""The desk's socket."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvhandoff.channel.bell import Bell
from kvhandoff.channel.keys import Keys
from kvhandoff.errors import UnsupportedSetup
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import (
    MAX_REQUEST_BYTES,
    Answer,
    Malformed,
    Refused,
    Request,
    WrongVersion,
    decode_request,
    encode,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplyAddress:
    """Where an answer goes: a ROUTER identity and the asker's correlation id."""

    identity: bytes
    correlation: int


class Server:
    """The desk's socket. Everything but :meth:`wake` belongs to one thread.

    Args:
        bind: address and port; port 0 takes a free one, :attr:`port` tells which.
        key: shared with all askers; None lets everybody ask.

    Raises:
        UnsupportedSetup: if the port cannot be bound.
    """

    def __init__(self, bind: Endpoint, key: bytes | None = None) -> None:
        self.malformed = 0
        self._context = zmq.Context(io_threads=1)
        self._gate: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        if key is not None:
            self._admit_only(Keys(key))
        try:
            self._socket.bind(bind.url)
        except zmq.ZMQError as error:
            self._shut()
            raise UnsupportedSetup.because(
                "the desk cannot listen",
                found=f"{bind}: {error}",
                expected="a free port on an address of this host",
                change="change kv_port (0 takes any free port) or bind_host",
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._bell = Bell(self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell.listener, zmq.POLLIN)

    def _admit_only(self, keys: Keys) -> None:
        self._gate = ThreadAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(credentials_provider=keys)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.desk_secret)

    def wake(self) -> None:
        """End a :meth:`receive` early; from any thread."""
        self._bell.ring()

    def receive(self, timeout: float) -> Iterator[tuple[ReplyAddress, Request]]:
        """Wait up to ``timeout`` seconds, then yield what came; bad frames are answered here."""
        self._poller.poll(max(0, int(timeout * 1000)))
        self._bell.quiet()
        for _ in range(256):  # then let the owner look at its clock
            try:
                frames = self._receive_parts()
            except zmq.Again:
                return
            message = self._decode(frames)
            if message is not None:
                yield message

    def _receive_parts(self) -> list[bytes]:
        """One message. ZMQ bounds the size of a part, but not how many there are."""
        frames = [self._socket.recv(zmq.NOBLOCK)]
        while self._socket.getsockopt(zmq.RCVMORE):
            part = self._socket.recv(zmq.NOBLOCK)
            if len(frames) < 3:
                frames.append(part)
        return frames

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
        self._shut()

    def _shut(self) -> None:
        if self._gate is not None:
            self._gate.stop()
        self._context.destroy(linger=0)
