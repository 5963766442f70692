# SPDX-License-Identifier: Apache-2.0
"""Transfer engines that outlive the engines of one test.

Ending a TransferEngine takes about a second. Closing a transport only unregisters its memory, so
that the next test can register its own with the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.transport.base import Flight
from tests.engines import HOST

if TYPE_CHECKING:
    from kvhandoff.transport.mooncake import MooncakeTransport


class _Lent:
    """One transport of the pool, in the hands of one worker until :meth:`close`."""

    def __init__(self, pool: MooncakePool, transport: MooncakeTransport) -> None:
        self._pool, self._transport = pool, transport

    @property
    def session(self) -> str:
        return self._transport.session

    def register(self, segment: Segment) -> None:
        self._transport.register(segment)

    def connect(self, session: str) -> None:
        self._transport.connect(session)

    def begin(self, session: str, descriptors: Descriptors) -> Flight:
        return self._transport.begin(session, descriptors)

    def cut(self) -> None:
        self._transport.cut()

    def close(self) -> None:
        self._transport.close()
        self._pool.idle.append(self._transport)


class MooncakePool:
    """Lends each worker a TransferEngine of its own; makes one if none is idle."""

    def __init__(self) -> None:
        self.idle: list[MooncakeTransport] = []
        self._made = 0

    @property
    def lent(self) -> int:
        """Transports that were not given back."""
        return self._made - len(self.idle)

    def lend(self) -> _Lent:
        from kvhandoff.transport.mooncake import MooncakeTransport

        if not self.idle:
            self.idle.append(MooncakeTransport(HOST, "tcp"))
            self._made += 1
        return _Lent(self, self.idle.pop())
