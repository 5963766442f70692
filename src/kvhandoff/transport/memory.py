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

from kvhandoff.errors import TransferFailed
from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors


class MemoryFabric:
    """Connects the transports of one test. ``fault`` is asked before each piece of each read.

    ``fault(session, piece, pieces)`` may sleep, raise :class:`TransferFailed`, or return.
    """

    def __init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}
        self.fault: Callable[[str, int, int], None] | None = None
        self._names = itertools.count()
        self._lock = threading.Lock()

    def create(self) -> MemoryTransport:
        """A new transport on this fabric."""
        with self._lock:
            transport = MemoryTransport(self, f"memory:{next(self._names)}")
            self.transports[transport.session] = transport
        return transport


class MemoryTransport:
    """A :class:`~kvhandoff.transport.base.Transport` that copies within this process."""

    def __init__(self, fabric: MemoryFabric, session: str) -> None:
        self._fabric = fabric
        self._session = session
        self.segments: list[Segment] = []

    @property
    def session(self) -> str:
        return self._session

    def register(self, segment: Segment) -> None:
        self.segments.append(segment)

    def read(self, session: str, descriptors: Descriptors) -> None:
        pieces = zip(
            descriptors.local.tolist(),
            descriptors.remote.tolist(),
            descriptors.length.tolist(),
            strict=True,
        )
        for piece, (local, remote, length) in enumerate(pieces):
            if self._fabric.fault is not None:
                self._fabric.fault(session, piece, len(descriptors))
            peer = self._fabric.transports.get(session)
            if peer is None:
                raise TransferFailed(f"{session} has gone")
            self.must_contain(local, length)
            peer.must_contain(remote, length)
            ctypes.memmove(local, remote, length)

    def must_contain(self, address: int, length: int) -> None:
        """Raise :class:`TransferFailed` unless the range lies in one registered segment."""
        if not any(
            s.base <= address and address + length <= s.base + s.length for s in self.segments
        ):
            raise TransferFailed(
                f"[{address:#x}, {address + length:#x}) is not registered with {self._session}"
            )

    def close(self) -> None:
        self._fabric.transports.pop(self._session, None)
        self.segments.clear()
