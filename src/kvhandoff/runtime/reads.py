# SPDX-License-Identifier: Apache-2.0
"""Reads under way: what is asked of whom and when, and when a read is over.

Everything happens in :meth:`Reads.step`, on the thread that owns the reads. Each peer has a *lane*
with bounds of its own, so that a peer that is slow, or hangs, takes nothing from the others. Reads
of one lane take turns, slice by slice, so that a long prompt does not keep short ones waiting; a
read is planned when its turn comes.

A lane on which nothing moves for some seconds is *stalled*: what has not begun fails at once, so
that it can be read from somebody else. What has begun has to become final first. If that takes
too long the transport is *cut*, and reads from other peers are begun again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvhandoff.errors import KVHandoffError
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.transport.base import Flight, Transport

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Longer runs are cut. Below 32 MiB, Mooncake's RDMA transport prepares all of a piece before it
posts any of it, so that a piece which it rejects is not under way."""

SLICE_PIECES = 64
SLICE_BYTES = 16 << 20
"""What a read begins when it is its turn."""

MAX_CONNECTING = 16
MAX_IDLE_LANES = 256


@dataclass(frozen=True)
class Limits:
    """Bounds of what is under way; times in seconds.

    Attributes:
        pieces: from each peer. Mooncake's TCP transport fails what is beyond 2048.
        nbytes: from each peer.
        all_pieces: from all peers together.
        stall: a lane without any progress for so long is stalled.
        cut: a lane without any progress for so long is cut.
    """

    pieces: int = 512
    nbytes: int = 64 << 20
    all_pieces: int = 4096
    stall: float = 5.0
    cut: float = 60.0


@dataclass(eq=False)
class Read:
    """One read of one peer, and what is known of it so far; times are monotonic."""

    session: str
    plan: Callable[[], Descriptors]
    on_end: Callable[[Read], None]
    failure: str | None = None
    began: float = 0.0
    ended: float = 0.0
    plan_seconds: float = 0.0
    nbytes: int = 0
    pieces: int = 0
    more: bool = True  # in its lane's queue, as there may be something to begin
    flights: int = 0
    again: deque[Descriptors] = field(default_factory=deque)
    slices: Iterator[Descriptors] | None = None

    def next_slice(self) -> Descriptors | None:
        """What to begin next; None if everything has begun."""
        if self.again:
            return self.again.popleft()
        if self.slices is None:
            started = time.monotonic()
            found = self.plan()
            self.began = time.monotonic()
            self.plan_seconds = self.began - started
            self.nbytes, self.pieces = found.nbytes, len(found)
            self.slices = iter(found.chop(PIECE_BYTES).slices(SLICE_BYTES, SLICE_PIECES))
        return next((each for each in self.slices if len(each)), None)


@dataclass(eq=False)
class _Flying:
    flight: Flight
    read: Read
    descriptors: Descriptors
    left: int


@dataclass(eq=False)
class _Lane:
    """All reads of one peer. ``moved``: when anything was last heard or first asked of it."""

    session: str
    moved: float = 0.0
    connected: bool = False
    connecting: bool = False
    stalled: bool = False
    waiting: deque[Read] = field(default_factory=deque)
    flying: list[_Flying] = field(default_factory=list)
    pieces: int = 0
    nbytes: int = 0

    def has_room(self, limits: Limits) -> bool:
        return not self.flying or (
            self.pieces + SLICE_PIECES <= limits.pieces
            and self.nbytes + SLICE_BYTES <= limits.nbytes
        )

    def settle(self, read: Read) -> None:
        """End a read if it is over: nothing is under way, and nothing more begins."""
        if read.flights or (read.more and read.failure is None):
            return
        if read.more:
            read.more = False
            self.waiting.remove(read)
        read.ended = time.monotonic()
        read.on_end(read)

    def fail(self, reads: Iterable[Read], reason: str) -> None:
        """Nothing more of these reads begins; what is under way still has to become final."""
        for read in reads:
            read.failure = read.failure or reason
            self.settle(read)


def on_thread(function: Callable[[], None]) -> None:
    """Run a function on a thread of its own."""
    threading.Thread(target=function, name="kvhandoff-connect", daemon=True).start()


class Reads:
    """All reads of one worker.

    Args:
        post: runs a function on the thread that owns the reads, from any other thread.
        clock: monotonic seconds.
        aside: runs a function that may block on another thread.
    """

    def __init__(
        self,
        transport: Transport,
        limits: Limits,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
        aside: Callable[[Callable[[], None]], None] = on_thread,
    ) -> None:
        self._clock = clock
        self._aside = aside
        self._transport = transport
        self._limits = limits
        self._post = post
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()
        self._connecting = 0
        self.cuts = 0  # since start

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has anything to look at."""
        return any(lane.flying or lane.waiting for lane in self._lanes.values())

    @property
    def stuck(self) -> int:
        """Reads from stalled peers that are not final."""
        return sum(
            len({id(flying.read) for flying in lane.flying})
            for lane in self._lanes.values()
            if lane.stalled
        )

    def submit(
        self, session: str, plan: Callable[[], Descriptors], on_end: Callable[[Read], None]
    ) -> None:
        """Read what ``plan`` finds. ``on_end`` gets the read when it is final, in a step."""
        lane = self._lanes.setdefault(session, _Lane(session))
        lane.waiting.append(Read(session, plan, on_end))

    def step(self) -> bool:
        """Poll, fail, cut and begin, whatever is due. Whether anything moved."""
        now = self._clock()
        moved = False
        for lane in list(self._lanes.values()):
            moved |= self._poll(lane, now)
            self._judge(lane, now)
        self._cut_if_due(now)
        for lane in list(self._lanes.values()):
            moved |= self._begin(lane)
        if self._lanes:  # another lane is the first one to use what room there is in all
            self._lanes.move_to_end(next(iter(self._lanes)))
        self._forget_idle()
        return moved

    def close(self) -> None:
        """Make sure that nothing lands any more. Reads that are not over never end."""
        if any(lane.flying for lane in self._lanes.values()):
            self._transport.cut()
        self._lanes.clear()

    def _poll(self, lane: _Lane, now: float) -> bool:
        moved = False
        for flying in list(lane.flying):
            flying.flight.poll()
            final = flying.left - flying.flight.left
            if final:
                moved, lane.moved, lane.stalled = True, now, False
                lane.pieces -= final
                flying.left -= final
            if flying.left == 0:
                lane.flying.remove(flying)
                lane.nbytes -= flying.descriptors.nbytes
                flying.read.flights -= 1
                flying.read.failure = flying.read.failure or flying.flight.failure
                lane.settle(flying.read)
        return moved

    def _judge(self, lane: _Lane, now: float) -> None:
        """Whether a lane is stalled; what waits for one that is fails unless it has begun."""
        idle = now - lane.moved
        if not (lane.flying or lane.connecting) or idle < self._limits.stall:
            lane.stalled = False
            return
        if not lane.stalled:
            lane.stalled = True
            logger.warning(
                "%s has sent nothing for %.1f s, and %d reads are under way from there; "
                "they are cut after %g s of silence",
                lane.session,
                idle,
                len({id(flying.read) for flying in lane.flying}),
                self._limits.cut,
            )
        not_begun = [read for read in lane.waiting if not read.flights]
        lane.fail(not_begun, f"{lane.session} has sent nothing for {idle:.1f} s")

    def _begin(self, lane: _Lane) -> bool:
        """Begin slices while there is room, one of each read in turn."""
        if not lane.waiting or lane.stalled:
            return False
        if not lane.connected:
            self._connect(lane)
            return False
        moved = False
        in_all = sum(each.pieces for each in self._lanes.values())
        while lane.waiting and lane.has_room(self._limits):
            if in_all and in_all + SLICE_PIECES > self._limits.all_pieces:
                break
            read = lane.waiting.popleft()
            found = self._next_slice(read)
            moved = True
            if found is None:
                read.more = False
                lane.settle(read)
                continue
            lane.waiting.append(read)
            if not lane.flying:
                lane.moved = self._clock()
            flight = self._transport.begin(lane.session, found)
            lane.flying.append(_Flying(flight, read, found, len(found)))
            read.flights += 1
            lane.pieces += len(found)
            lane.nbytes += found.nbytes
            in_all += len(found)
            if flight.failure is not None:
                break  # look at what is left of it before anything else is asked of this peer
        return moved

    @staticmethod
    def _next_slice(read: Read) -> Descriptors | None:
        if read.failure is not None:
            return None
        try:
            return read.next_slice()
        except KVHandoffError as error:
            read.failure = str(error)
        except Exception as error:  # the pull has to end, whatever happened
            logger.exception("planning a read from %s failed", read.session)
            read.failure = f"{type(error).__name__}: {error}"
        return None

    def _forget_idle(self) -> None:
        for lane in [each for each in self._lanes.values() if not each.connecting]:
            unused = not lane.waiting and not lane.flying
            if unused and (not lane.connected or len(self._lanes) > MAX_IDLE_LANES):
                del self._lanes[lane.session]

    # ---- connecting, on a thread of its own, as it can block ----

    def _connect(self, lane: _Lane) -> None:
        due = any(self._hangs(each, self._clock()) for each in self._lanes.values())
        if lane.connecting or self._connecting >= MAX_CONNECTING or due:
            return
        lane.connecting, lane.moved = True, self._clock()
        self._connecting += 1

        def connect() -> None:
            failure: str | None = None
            try:
                self._transport.connect(lane.session)
            except Exception as error:  # noqa: BLE001 - told to the thread that owns the reads
                failure = str(error) or type(error).__name__
            self._post(lambda: self._connected(lane, failure))

        self._aside(connect)

    def _connected(self, lane: _Lane, failure: str | None) -> None:
        self._connecting -= 1
        lane.connecting = lane.stalled = False
        lane.connected = failure is None
        if failure is not None:
            lane.fail(list(lane.waiting), failure)

    # ---- cutting ----

    def _hangs(self, lane: _Lane, now: float) -> bool:
        return bool(lane.flying) and now - lane.moved >= self._limits.cut

    def _cut_if_due(self, now: float) -> None:
        """Cut if a lane hangs. Waits for threads that connect, which use the transport."""
        hanging = [lane for lane in self._lanes.values() if self._hangs(lane, now)]
        if not hanging or self._connecting:
            return
        self.cuts += 1
        logger.error(
            "cutting all connections, as %s sent nothing for %g s; reads from others begin again",
            ", ".join(lane.session for lane in hanging),
            self._limits.cut,
        )
        self._transport.cut()
        for lane in list(self._lanes.values()):
            lane.connected = lane.stalled = False
            flying, lane.flying, lane.pieces, lane.nbytes = lane.flying, [], 0, 0
            for each in flying:
                each.read.flights -= 1
                if lane not in hanging and each.flight.failure is None:
                    each.read.again.append(each.descriptors)
                else:
                    reason = f"{lane.session} has sent nothing for {self._limits.cut:g} s"
                    each.read.failure = each.read.failure or each.flight.failure or reason
            for read in {each.read: None for each in flying}:
                if read.failure is None and not read.more:
                    read.more = True
                    lane.waiting.append(read)
                lane.settle(read)
