# SPDX-License-Identifier: Apache-2.0
"""One consumer worker's reading of one request.

::

    connect --> open --> read --> complete --> ended (ok)
       |          |        |          |
       '----------+--------+----------+------> ended (failed)

A part whose read failed is read again from the next equivalent holder. A pull ends only after
every read that it began has returned, whatever they returned: bytes that land later would land in
blocks that vLLM has given to somebody else. It ends well only after the desk said ``held``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from kvhandoff.ids import Rank
from kvhandoff.protocol.messages import Opened, Verdict


@dataclass(frozen=True)
class Connect:
    """Effect: get the producer's catalog; ``fresh``: a cached one has been found stale."""

    fresh: bool


@dataclass(frozen=True)
class Ask:
    """Effect: send the desk an ``Open``."""


@dataclass(frozen=True)
class Read:
    """Effect: read part number ``part`` from the worker ``source``."""

    part: int
    source: Rank


@dataclass(frozen=True)
class Finish:
    """Effect: send the desk a ``Complete``."""

    ok: bool


@dataclass(frozen=True)
class Ended:
    """Effect: report the request, received (``failure`` is None) or failed."""

    failure: str | None


Effect: TypeAlias = Connect | Ask | Read | Finish | Ended


class State(Enum):
    """Where a pull is."""

    CONNECT = auto()
    OPEN = auto()
    READ = auto()
    COMPLETE = auto()
    ENDED = auto()


class Pull:
    """State of one pull. Events that do not fit the state are late and change nothing."""

    def __init__(self) -> None:
        self.state = State.CONNECT
        self.failure: str | None = None
        self.failovers = 0
        self.opened: Opened | None = None
        self._incarnation = ""
        self._reconnected = False
        self._holders: Sequence[Sequence[Rank]] = ()
        self._tried: list[int] = []
        self._outstanding = 0

    def start(self) -> list[Effect]:
        """The first effect."""
        return [Connect(fresh=False)]

    def connected(self, incarnation: str, holders: Sequence[Sequence[Rank]]) -> list[Effect]:
        """The catalog is known. ``holders`` lists, for each part, whom to read from, best first."""
        if self.state is not State.CONNECT:
            return []
        self._incarnation = incarnation
        self._holders = holders
        self._tried = [0] * len(holders)
        self.state = State.OPEN
        return [Ask()]

    def answered(self, opened: Opened) -> list[Effect]:
        """The desk opened the request."""
        if self.state is not State.OPEN:
            return []
        if opened.incarnation != self._incarnation:
            if self._reconnected:
                return self.failed("the prefill engine restarts faster than it can be read")
            self._reconnected = True
            self.state = State.CONNECT
            return [Connect(fresh=True)]
        self.opened = opened
        self.state = State.READ
        if not self._holders:
            return self._drained()
        self._outstanding = len(self._holders)
        return [Read(part, holders[0]) for part, holders in enumerate(self._holders)]

    def read(self, part: int, failure: str | None) -> list[Effect]:
        """A read returned; ``failure`` says why it did not bring all bytes."""
        if self.state is not State.READ:
            return []
        if failure is not None:
            self._tried[part] += 1
            if self.failure is None and self._tried[part] < len(self._holders[part]):
                self.failovers += 1
                return [Read(part, self._holders[part][self._tried[part]])]
            self.failure = self.failure or failure
        self._outstanding -= 1
        return self._drained() if self._outstanding == 0 else []

    def completed(self, verdict: Verdict) -> list[Effect]:
        """The desk's answer to ``Complete``."""
        if self.state is not State.COMPLETE:
            return []
        if verdict != "held" and self.failure is None:
            self.failure = (
                f"the prefill engine let go of the request before it was read ({verdict})"
            )
        return self._end()

    def failed(self, reason: str) -> list[Effect]:
        """Connecting, opening or completing failed for good.

        The desk may have this reader in its books all the same; the consumer's scheduler releases
        the pull there once every rank has ended.
        """
        if self.state in (State.READ, State.ENDED):
            return []
        self.failure = self.failure or reason
        return self._end()

    def _drained(self) -> list[Effect]:
        self.state = State.COMPLETE
        return [Finish(ok=self.failure is None)]

    def _end(self) -> list[Effect]:
        self.state = State.ENDED
        return [Ended(self.failure)]
