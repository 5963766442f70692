# SPDX-License-Identifier: Apache-2.0
"""Reads within one process, with faults on demand: for tests of what happens when reads fail.

It checks what a network card checks (only registered memory is reached, on both ends), so that a
wrong address is an error here instead of a crash.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import TypeAlias

from kvhandoff.errors import TransferFailed
from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors

Fault: TypeAlias = Callable[[str, int, int], bool | None]
"""``fault(session, piece, pieces)``: what becomes of a piece of a read, asked at each poll. True
keeps it under way, :class:`TransferFailed` makes it fail, anything else lets it land. Pieces do
not depend on each other, so that a read can fail now and land later."""


class MemoryFabric:
    """Connects the transports of one test. ``fault`` is asked before each piece of each read."""

    def __init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}
        self.fault: Fault | None = None
        self._names = itertools.count()
        self._lock = threading.Lock()

    def create(self) -> MemoryTransport:
        """A new transport on this fabric."""
        with self._lock:
            transport = MemoryTransport(self, f"memory:{next(self._names)}")
            self.transports[transport.session] = transport
        return transport


class MemoryFlight:
    """Pieces ``(number, local address, remote address, length)`` that are under way."""

    def __init__(self, reader: MemoryTransport, session: str, descriptors: Descriptors) -> None:
        self._reader, self._session, self._count = reader, session, len(descriptors)
        columns = (descriptors.local, descriptors.remote, descriptors.length)
        self._pieces = [
            (number, *piece)
            for number, piece in enumerate(zip(*(c.tolist() for c in columns), strict=True))
        ]
        self.failure: str | None = None

    @property
    def left(self) -> int:
        return len(self._pieces)

    def poll(self) -> None:
        self._pieces = [piece for piece in self._pieces if not self._is_final(*piece)]

    def cut(self) -> None:
        """Nothing lands any more."""
        if self._pieces:
            self._pieces, self.failure = [], self.failure or "the transport was cut"

    def _is_final(self, number: int, local: int, remote: int, length: int) -> bool:
        fabric = self._reader.fabric
        try:
            if fabric.fault is not None and fabric.fault(self._session, number, self._count):
                return False
            peer = fabric.transports.get(self._session)
            if peer is None:
                raise TransferFailed(f"{self._session} has gone")
            self._reader.must_contain(local, length)
            peer.must_contain(remote, length)
            ctypes.memmove(local, remote, length)
        except TransferFailed as error:
            self.failure = self.failure or str(error)
        return True


class MemoryTransport:
    """A :class:`~kvhandoff.transport.base.Transport` that copies within this process."""

    def __init__(self, fabric: MemoryFabric, session: str) -> None:
        self.fabric = fabric
        self._session = session
        self.segments: list[Segment] = []
        self.flights: list[MemoryFlight] = []

    @property
    def session(self) -> str:
        return self._session

    def register(self, segment: Segment) -> None:
        self.segments.append(segment)

    def connect(self, session: str) -> None:
        if session not in self.fabric.transports:
            raise TransferFailed(f"{session} has gone")

    def begin(self, session: str, descriptors: Descriptors) -> MemoryFlight:
        self.flights = [flight for flight in self.flights if flight.left]
        self.flights.append(MemoryFlight(self, session, descriptors))
        return self.flights[-1]

    def cut(self) -> None:
        for flight in self.flights:
            flight.cut()

    def must_contain(self, address: int, length: int) -> None:
        """Raise :class:`TransferFailed` unless the range lies in one registered segment."""
        if not any(
            s.base <= address and address + length <= s.base + s.length for s in self.segments
        ):
            raise TransferFailed(
                f"[{address:#x}, {address + length:#x}) is not registered with {self._session}"
            )

    def close(self) -> None:
        self.fabric.transports.pop(self._session, None)
        self.segments.clear()
