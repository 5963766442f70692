# SPDX-License-Identifier: Apache-2.0
"""Waking a thread that polls ZMQ sockets."""

from __future__ import annotations

import threading

import zmq


class Bell:
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
