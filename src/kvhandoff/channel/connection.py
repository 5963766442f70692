# SPDX-License-Identifier: Apache-2.0
"""One connection to a desk, and whether anybody is at its other end."""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvhandoff.channel.keys import Keys
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import MAX_ANSWER_BYTES

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_OPEN = zmq.EVENT_CONNECTED
_DOWN = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_DENIED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_NOBODY = "cannot be reached: nobody listens there"
_STRANGER = (
    "cannot be reached: whoever listens there hangs up; it is not a desk, or has another shared_key"
)


@dataclass(frozen=True)
class Down:
    """Nobody has been at the other end since then."""

    since: float
    reason: str


class Connection:
    """A DEALER socket, and a socket on which ZMQ tells what becomes of its connection.

    Attributes:
        used: when it was last asked for.
        down: set while connecting fails at once, which a peer that is only slow does not do.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, keys: Keys | None
    ) -> None:
        self.endpoint = endpoint
        self.used = 0.0
        self.down: Down | None = None
        self._opened = False
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 400)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.desk_public)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.asker_public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.asker_secret)
        self.monitor = self.socket.get_monitor_socket(_UP | _OPEN | _DOWN | _DENIED)
        try:
            self.socket.connect(endpoint.url)
        except zmq.ZMQError:
            self.close()
            raise

    def look(self) -> None:
        """Take note of what ZMQ has told."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
            if event & _UP:
                self.down, self._opened = None, False
            elif event & _OPEN:
                self._opened = True
            elif event & (_DOWN | _DENIED):
                # "Opened" stays until a handshake succeeds: hanging up is told in several events.
                reason = _STRANGER if self._opened or event & _DENIED else _NOBODY
                since = time.monotonic() if self.down is None else self.down.since
                self.down = Down(since, reason)

    def close(self) -> None:
        """Forget the peer, and what was to be sent to it."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
