# SPDX-License-Identifier: Apache-2.0
"""A consumer worker's engine room: runs pulls, and keeps the model thread out of it.

One thread runs the state machines, and plans, begins and polls their reads; the client's thread
brings answers. Everything reaches the machines as a closure in one queue, so that they need no
lock.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhandoff.channel import Client
from kvhandoff.config import HandoffConfig
from kvhandoff.errors import (
    KVHandoffError,
    PeerUnreachable,
    ProtocolError,
    ThreadDied,
)
from kvhandoff.ids import EngineId, PullId, Rank, Reader
from kvhandoff.lifecycle.pull import Ask, Connect, Effect, Ended, Finish, Pull, Read
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.plan.pairing import Span
from kvhandoff.plan.pieces import Slicing
from kvhandoff.protocol.catalog import Fingerprint
from kvhandoff.protocol.messages import (
    Answer,
    Complete,
    Completed,
    HeldKey,
    Open,
    Opened,
    PullReport,
    Refused,
    Request,
)
from kvhandoff.protocol.params import HandoffParams
from kvhandoff.protocol.trust import Trust
from kvhandoff.runtime.margins import Clear, Margins, clear_host_memory
from kvhandoff.runtime.peers import Peer, Peers, Work
from kvhandoff.runtime.reads import Limits, Reads
from kvhandoff.runtime.reads import Read as Reading
from kvhandoff.transport.base import Transport

logger = logging.getLogger(__name__)

_POLL_SECONDS = (0.0002, 0.005)
"""Shortest and longest pause between two looks at reads under way."""

_LONGEST_PREFILL_STEP = 120.0
"""Seconds. Parameters leave a prefill engine during a step, its desk hears of them after it."""


@dataclass(frozen=True)
class PullJob:
    """What the scheduler asks of every worker.

    Attributes:
        request: the consumer's own request id.
        pull: names this attempt towards the desk, equal on all workers.
        replica: the PCP replica to read, equal on all workers.
        spans: tokens to read, by the consumer's KV group.
        margins: tokens beside them in their first and last blocks, likewise. Cleared before
            anything is read, so that nobody sees what the blocks held before.
        blocks: the consumer's block ids, by KV group and by position in the request.
    """

    request: str
    params: HandoffParams
    pull: PullId
    replica: int
    spans: Mapping[int, Span]
    blocks: tuple[list[int], ...]
    margins: Mapping[int, Sequence[Span]] = field(default_factory=dict)

    @property
    def key(self) -> HeldKey:
        """Names the held request towards the desk."""
        return HeldKey(self.params.remote_request_id, self.params.ticket)


@dataclass(frozen=True)
class PullResult:
    """How a pull ended; ``failure`` is None if every byte is there and was held."""

    request: str
    failure: str | None
    report: PullReport
    seconds: float


@dataclass
class _Active:
    """A pull under way. Touched by the puller's thread only."""

    job: PullJob
    machine: Pull = field(default_factory=Pull)
    peer: Peer | None = None
    work: Sequence[Work] = ()
    began: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    opened_after: float = 0.0
    retries: int = 0
    remote_blocks: list[np.ndarray] = field(default_factory=list)
    local_blocks: list[np.ndarray] = field(default_factory=list)
    moved: list[tuple[Rank, Reading]] = field(default_factory=list)

    def report(self) -> PullReport:
        reads = [read for _, read in self.moved]
        return PullReport(
            replica=self.job.replica,
            sources=sorted({source for source, _ in self.moved}),
            nbytes=sum(read.nbytes for read in reads),
            descriptors=sum(read.pieces for read in reads),
            open_seconds=self.opened_after,
            plan_seconds=sum(read.plan_seconds for read in reads),
            read_seconds=max((read.ended for read in reads), default=0.0)
            - min((read.began for read in reads), default=0.0),
            failovers=self.machine.failovers,
        )


class Puller:
    """Pulls requests into this worker's cache.

    Args:
        layout: this worker's cache.
        reader: this worker among its engine's workers.
        thread_init: called first on the thread that reads (accelerators are chosen per thread).
        clear: sets memory of this worker to zero, and returns when it is done.
        linger: seconds for which a producer keeps a request that this engine has read.
    """

    def __init__(
        self,
        layout: WorkerLayout,
        reader: Reader,
        engine: EngineId,
        fingerprint: Fingerprint,
        transport: Transport,
        config: HandoffConfig,
        thread_init: Callable[[], None] = lambda: None,
        clear: Clear = clear_host_memory,
        linger: float = 0.0,
    ) -> None:
        self._reader = reader
        self._transport = transport
        self._linger = linger
        self._config = config
        self._slicing = Slicing(config.slice_bytes, config.stripe_min_bytes)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._margins = Margins(layout, clear)
        self._results: deque[PullResult] = deque()
        self._death: BaseException | None = None
        trust = Trust(config.shared_key, config.prefill_hosts)
        self._client = Client(key=trust.key)
        self._peers = Peers(
            self._client,
            layout,
            engine,
            fingerprint,
            config.handshake_timeout,
            self._events.put,
            trust,
        )
        self._thread_init = thread_init
        limits = Limits(
            pieces=config.pieces_in_flight,
            nbytes=config.bytes_in_flight,
            stall=config.stall_after,
            cut=config.cut_after,
        )
        self._reads = Reads(transport, limits, self._events.put)
        self._thread = threading.Thread(target=self._run, name="kvhandoff-puller", daemon=True)
        self._thread.start()

    # ---- for the model thread: never blocks ----

    def submit(self, job: PullJob) -> None:
        """Begin a pull; its result comes from :meth:`take_results`, exactly once."""
        self._events.put(lambda: self._begin(job))

    def take_results(self) -> list[PullResult]:
        """Pulls that have ended since the last call.

        Raises:
            ThreadDied: if the puller's or its client's has: requests would wait forever.
        """
        if self._death is not None:
            raise ThreadDied(f"the puller of this worker stopped: {self._death!r}")
        self._client.require_alive()
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    @property
    def stuck(self) -> int:
        """Reads that wait for a peer that has sent nothing for some seconds."""
        return self._reads.stuck

    @property
    def cuts(self) -> int:
        """How often the transport was cut since start."""
        return self._reads.cuts

    def close(self) -> None:
        """Stop. Whatever is under way is cut: the memory may be freed afterwards."""
        self._events.put(None)
        self._thread.join(timeout=30)
        self._client.close()

    # ---- the puller's thread ----

    def _run(self) -> None:
        try:
            self._thread_init()
            pause = _POLL_SECONDS[0]
            while True:
                for event in self._new_events(pause if self._reads.busy else None):
                    if event is None:
                        self._reads.close()
                        return
                    event()
                moved = self._reads.step()
                pause = _POLL_SECONDS[0] if moved else min(pause * 1.5, _POLL_SECONDS[1])
        except BaseException as error:
            logger.exception("the puller stopped")
            self._death = error

    def _new_events(self, patience: float | None) -> Iterator[Callable[[], None] | None]:
        """Wait for an event as long as there is nothing else to do; then all that are there."""
        with contextlib.suppress(queue.Empty):
            yield self._events.get(timeout=patience)
            while True:
                yield self._events.get_nowait()

    def _begin(self, job: PullJob) -> None:
        active = _Active(job)
        active.local_blocks = [np.array(ids, dtype=np.int64) for ids in job.blocks]
        try:
            self._margins.clear(job.margins, active.local_blocks)
        except Exception as error:  # the pull has to end, whatever happened
            logger.exception("clearing the blocks of %s failed", job.request)
            self._do(active, active.machine.failed(f"its blocks could not be cleared: {error}"))
        else:
            self._do(active, active.machine.start())

    def _do(self, active: _Active, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Connect(fresh):
                    self._connect(active, fresh)
                case Ask():
                    job = active.job
                    active.asked = time.monotonic()
                    self._ask(active, Open(job.key, job.pull, *self._reader))
                case Read(part, piece, source):
                    self._read(active, part, piece, source)
                case Finish(ok):
                    job, active.retries = active.job, 0
                    report = active.report()
                    reader = self._reader.number
                    self._ask(active, Complete(job.key, job.pull, reader, ok, self._linger, report))
                case Ended(failure):
                    self._end(active, failure)

    def _connect(self, active: _Active, fresh: bool) -> None:
        params = active.job.params
        stale = active.peer.catalog.incarnation if fresh and active.peer else ""

        def on_peer(found: Peer | KVHandoffError) -> None:
            self._serve(active, lambda: self._connected(active, found))

        self._peers.get((params.endpoint, params.engine), on_peer, stale=stale)

    def _serve(self, active: _Active, event: Callable[[], list[Effect]]) -> None:
        """What a peer has sent may cost the pull that it is about, and nothing else."""
        try:
            effects = event()
        except KVHandoffError as error:
            effects = active.machine.failed(str(error))
        except Exception as error:  # the pull has to end, whatever happened
            logger.exception("what was sent for %s cannot be used", active.job.request)
            effects = active.machine.failed(f"{type(error).__name__}: {error}")
        self._do(active, effects)

    def _connected(self, active: _Active, found: Peer | KVHandoffError) -> list[Effect]:
        if isinstance(found, KVHandoffError):
            return active.machine.failed(str(found))
        active.peer = found
        active.work = found.work(
            active.job.spans,
            request=active.job.params.remote_request_id,
            replica=active.job.replica,
            reader=self._reader.number,
            slicing=self._slicing,
            stripe=self._config.replica_policy == "stripe",
        )
        shares = [work.share for work in active.work]
        return active.machine.connected(found.catalog.incarnation, shares)

    def _ask(self, active: _Active, request: Request) -> None:
        """Ask the desk; what it answers comes back as an event. Asking twice does no harm there."""

        def answered(result: Answer | KVHandoffError) -> None:
            if isinstance(result, PeerUnreachable) and active.retries == 0:
                active.retries += 1
                self._ask(active, request)
            else:
                self._serve(active, lambda: self._answered(active, result))

        timeout = self._config.answer_timeout
        if isinstance(request, Open):  # the desk answers when it hears that prefill has ended
            timeout = max(timeout, min(active.job.params.remote_lease, _LONGEST_PREFILL_STEP))
        self._client.ask(
            active.job.params.endpoint,
            request,
            timeout,
            lambda result: self._events.put(lambda: answered(result)),
        )

    def _answered(self, active: _Active, result: Answer | KVHandoffError) -> list[Effect]:
        match result:
            case Opened():
                active.opened_after = time.monotonic() - active.asked
                return self._opened(active, result)
            case Completed(verdict):
                return active.machine.completed(verdict)
            case Refused(code, reason):
                return active.machine.failed(f"{reason} ({code})")
            case PeerUnreachable():
                self._peers.forget((active.job.params.endpoint, active.job.params.engine))
                return active.machine.failed(str(result))
            case KVHandoffError():
                return active.machine.failed(str(result))
            case _:
                return active.machine.failed(f"unexpected answer {type(result).__name__}")

    def _opened(self, active: _Active, opened: Opened) -> list[Effect]:
        promised = active.job.params.remote_num_tokens
        if opened.tokens != promised:
            return active.machine.failed(
                f"the prefill engine holds {opened.tokens} tokens, its parameters said {promised}"
            )
        active.remote_blocks = [np.array(ids, dtype=np.int64) for ids in opened.blocks]
        return active.machine.answered(opened)

    def _end(self, active: _Active, failure: str | None) -> None:
        seconds = time.monotonic() - active.began
        result = PullResult(active.job.request, failure, active.report(), seconds)
        if failure is None:
            logger.debug("pulled %s in %.1f ms: %s", result.request, seconds * 1e3, result.report)
        else:
            logger.warning("pulling %s failed: %s", result.request, failure)
        self._results.append(result)

    def _read(self, active: _Active, part: int, piece: int, source: Rank) -> None:
        peer = active.peer
        if peer is None:
            raise ProtocolError("read before the handshake")

        def plan() -> Descriptors:
            return peer.template(part, source).lower(
                active.work[part].pieces[piece], active.remote_blocks, active.local_blocks
            )

        def ended(read: Reading) -> None:
            if read.failure is None:
                active.moved.append((source, read))
            self._do(active, active.machine.read(part, piece, source, read.failure))

        self._reads.submit(peer.session(source), plan, ended)
