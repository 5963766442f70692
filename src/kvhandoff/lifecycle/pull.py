# SPDX-License-Identifier: Apache-2.0
"""One consumer worker's reading of one request.

::

    connect --> open --> read --> complete --> ended (ok)
       |          |        |          |
       '----------+--------+----------+------> ended (failed)

Each part is read in pieces, by one or several of its equivalent holders at a time. A holder that
returns a piece takes the next one, so that a slow one takes fewer. A holder whose read failed gets
no more, its piece goes back to the others, and one that was spare steps in.

A pull ends only after every read that it began has returned, whatever they returned: bytes that
land later would land in blocks that vLLM has given to somebody else. It ends well only after the
desk said ``held``.
"""

from __future__ import annotations

from collections import deque
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
    """Effect: read piece number ``piece`` of part number ``part`` from the worker ``source``."""

    part: int
    piece: int
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


@dataclass(frozen=True)
class Share:
    """A part to be read.

    Attributes:
        holders: whom it can be read from, best first.
        pieces: how many pieces it is read in.
        active: how many holders read at the same time; the others are spare.
    """

    holders: Sequence[Rank]
    pieces: int = 1
    active: int = 1


class _Progress:
    """What is left to read of one part, and who reads."""

    def __init__(self, share: Share) -> None:
        self.pending = deque(range(share.pieces))
        self.active = list(share.holders[: share.active])
        self.spare = deque(share.holders[share.active :])

    def drop(self, source: Rank, piece: int) -> None:
        """``source`` failed: take it out, let a spare step in, and give the piece back."""
        self.pending.appendleft(piece)
        if source in self.active:
            self.active.remove(source)
            if self.spare:
                self.active.append(self.spare.popleft())


class Pull:
    """State of one pull. Events that do not fit the state are late and change nothing.

    Args:
        window: pieces that each holder has in flight; more than one hides its latency.
    """

    def __init__(self, window: int = 2) -> None:
        self._window = window
        self.state = State.CONNECT
        self.failure: str | None = None
        self.failovers = 0
        self.opened: Opened | None = None
        self._incarnation = ""
        self._reconnected = False
        self._parts: list[_Progress] = []
        self._reading: set[tuple[int, int, Rank]] = set()

    def start(self) -> list[Effect]:
        """The first effect."""
        return [Connect(fresh=False)]

    def connected(self, incarnation: str, shares: Sequence[Share]) -> list[Effect]:
        """The catalog is known, and with it what there is to read."""
        if self.state is not State.CONNECT:
            return []
        self._incarnation = incarnation
        self._parts = [_Progress(share) for share in shares]
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
        return self._go_on()

    def read(self, part: int, piece: int, source: Rank, failure: str | None) -> list[Effect]:
        """A read returned; ``failure`` says why it did not bring all bytes."""
        if (part, piece, source) not in self._reading:
            return []
        self._reading.remove((part, piece, source))
        if failure is not None:
            progress = self._parts[part]
            progress.drop(source, piece)
            if progress.active:
                self.failovers += 1
            else:
                self.failure = self.failure or failure
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        """Hand out pieces to holders that have room; finish when nothing is left or in flight."""
        effects: list[Effect] = []
        if self.failure is None:
            for part, progress in enumerate(self._parts):
                for _ in range(self._window):
                    for source in progress.active:
                        if not progress.pending:
                            break
                        if self._in_flight(part, source) < self._window:
                            piece = progress.pending.popleft()
                            self._reading.add((part, piece, source))
                            effects.append(Read(part, piece, source))
        if not self._reading:
            self.state = State.COMPLETE
            effects.append(Finish(ok=self.failure is None))
        return effects

    def _in_flight(self, part: int, source: Rank) -> int:
        return sum((part, source) == (of, by) for of, _, by in self._reading)

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

    def _end(self) -> list[Effect]:
        self.state = State.ENDED
        return [Ended(self.failure)]
