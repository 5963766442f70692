# SPDX-License-Identifier: Apache-2.0
"""A consumer worker's engine room: runs pulls, and keeps the model thread out of it.

One thread runs the state machines; a pool plans and reads; the client's thread brings answers.
Everything reaches the machines as a closure in one queue, so that they need no lock.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvhandoff.channel import Client
from kvhandoff.config import HandoffConfig
from kvhandoff.errors import (
    KVHandoffError,
    PeerUnreachable,
    ProtocolError,
    UnsupportedSetup,
)
from kvhandoff.ids import EngineId, PullId, Rank, Reader
from kvhandoff.lifecycle.pull import Ask, Connect, Effect, Ended, Finish, Pull, Read
from kvhandoff.model.layout import WorkerLayout
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
from kvhandoff.runtime.margins import Clear, Margins, clear_host_memory
from kvhandoff.runtime.peers import Peer, Peers, Work
from kvhandoff.transport.base import Transport

logger = logging.getLogger(__name__)


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
    """A pull under way. Touched by the puller's thread; reads only append to :attr:`moved`."""

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
    moved: list[_Move] = field(default_factory=list)

    def report(self) -> PullReport:
        return PullReport(
            replica=self.job.replica,
            sources=sorted({move.source for move in self.moved}),
            nbytes=sum(move.nbytes for move in self.moved),
            descriptors=sum(move.descriptors for move in self.moved),
            open_seconds=self.opened_after,
            plan_seconds=sum(move.plan_seconds for move in self.moved),
            read_seconds=max((m.ended for m in self.moved), default=0.0)
            - min((m.began for m in self.moved), default=0.0),
            failovers=self.machine.failovers,
        )


@dataclass(frozen=True)
class _Move:
    """One read that brought all its bytes."""

    source: Rank
    nbytes: int
    descriptors: int
    plan_seconds: float
    began: float
    ended: float


class Puller:
    """Pulls requests into this worker's cache.

    Args:
        layout: this worker's cache.
        reader: this worker among its engine's workers.
        thread_init: called first in every thread that reads (accelerators are chosen per thread).
        clear: sets memory of this worker to zero, and returns when it is done.
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
    ) -> None:
        self._reader = reader
        self._transport = transport
        self._config = config
        self._slicing = Slicing(config.slice_bytes, config.stripe_min_bytes)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._margins = Margins(layout, clear)
        self._results: deque[PullResult] = deque()
        self._death: BaseException | None = None
        self._client = Client()
        self._peers = Peers(
            self._client, layout, engine, fingerprint, config.handshake_timeout, self._events.put
        )
        self._pool = ThreadPoolExecutor(
            config.read_threads, thread_name_prefix="kvhandoff-read", initializer=thread_init
        )
        self._thread = threading.Thread(target=self._run, name="kvhandoff-puller", daemon=True)
        self._thread.start()

    # ---- for the model thread: never blocks ----

    def submit(self, job: PullJob) -> None:
        """Begin a pull; its result comes from :meth:`take_results`, exactly once."""
        self._events.put(lambda: self._begin(job))

    def take_results(self) -> list[PullResult]:
        """Pulls that have ended since the last call.

        Raises:
            UnsupportedSetup: if the puller's thread has died: requests would wait forever.
        """
        if self._death is not None:
            raise UnsupportedSetup(f"the puller of this worker stopped: {self._death!r}")
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        """Stop. Reads that have begun end by themselves."""
        self._events.put(None)
        self._thread.join(timeout=5)
        self._client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- the puller's thread ----

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                event()
        except BaseException as error:
            logger.exception("the puller stopped")
            self._death = error

    def _begin(self, job: PullJob) -> None:
        active = _Active(job)
        active.local_blocks = [np.array(ids, dtype=np.int64) for ids in job.blocks]
        if job.margins:
            self._pool.submit(self._clear, active)
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
                    self._pool.submit(self._read, active, part, piece, source)
                case Finish(ok):
                    job, active.retries = active.job, 0
                    report = active.report()
                    self._ask(active, Complete(job.key, job.pull, self._reader.number, ok, report))
                case Ended(failure):
                    self._end(active, failure)

    def _connect(self, active: _Active, fresh: bool) -> None:
        params = active.job.params
        stale = active.peer.catalog.incarnation if fresh and active.peer else ""

        def on_peer(found: Peer | KVHandoffError) -> None:
            if isinstance(found, KVHandoffError):
                self._do(active, active.machine.failed(str(found)))
                return
            active.peer = found
            try:
                active.work = found.work(
                    active.job.spans,
                    request=params.remote_request_id,
                    replica=active.job.replica,
                    reader=self._reader.number,
                    slicing=self._slicing,
                    stripe=self._config.replica_policy == "stripe",
                )
            except KVHandoffError as error:  # a holder that is not like the others of its part
                self._do(active, active.machine.failed(str(error)))
                return
            shares = [work.share for work in active.work]
            self._do(active, active.machine.connected(found.catalog.incarnation, shares))

        self._peers.get((params.endpoint, params.engine), on_peer, stale=stale)

    def _ask(self, active: _Active, request: Request) -> None:
        """Ask the desk; what it answers comes back as an event. Asking twice does no harm there."""

        def answered(result: Answer | KVHandoffError) -> None:
            if isinstance(result, PeerUnreachable) and active.retries == 0:
                active.retries += 1
                self._ask(active, request)
            else:
                self._do(active, self._answered(active, result))

        self._client.ask(
            active.job.params.endpoint,
            request,
            self._config.answer_timeout,
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

    # ---- the pool's threads ----

    def _clear(self, active: _Active) -> None:
        try:
            self._margins.clear(active.job.margins, active.local_blocks)
        except Exception as error:  # the pull has to end, whatever happened
            logger.exception("clearing the blocks of %s failed", active.job.request)
            failure = f"its blocks could not be cleared: {error}"
            self._events.put(lambda: self._do(active, active.machine.failed(failure)))
        else:
            self._events.put(lambda: self._do(active, active.machine.start()))

    def _read(self, active: _Active, part: int, piece: int, source: Rank) -> None:
        failure: str | None = None
        try:
            active.moved.append(self._move(active, part, piece, source))
        except KVHandoffError as error:
            failure = str(error)
        except Exception as error:  # the pull has to end, whatever happened
            logger.exception("reading part %d from worker %d failed", part, source)
            failure = f"{type(error).__name__}: {error}"
        self._events.put(
            lambda: self._do(active, active.machine.read(part, piece, source, failure))
        )

    def _move(self, active: _Active, part: int, piece: int, source: Rank) -> _Move:
        peer = active.peer
        if peer is None:
            raise ProtocolError("read before the handshake")
        began = time.monotonic()
        template = peer.template(part, source)
        descriptors = template.lower(
            active.work[part].pieces[piece], active.remote_blocks, active.local_blocks
        )
        planned = time.monotonic()
        self._transport.read(peer.session(source), descriptors)
        return _Move(
            source,
            descriptors.nbytes,
            len(descriptors),
            planned - began,
            planned,
            time.monotonic(),
        )
