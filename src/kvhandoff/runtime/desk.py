# SPDX-License-Identifier: Apache-2.0
"""The control endpoint of a prefill engine: one thread that owns the socket and the ledger.

It runs in one worker of the engine, so that what it lets go of reaches vLLM on the path on which
workers report. The model thread only drops events into a mailbox and takes out what is free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvhandoff.channel import ReplyAddress, Server
from kvhandoff.errors import IncompatiblePeer, ProtocolError, ThreadDied
from kvhandoff.ids import Endpoint, Incarnation, RequestId
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.lifecycle.ledger import Effect, Free, Ledger, Reply
from kvhandoff.protocol.catalog import Catalog, check_compatible
from kvhandoff.protocol.messages import (
    Answer,
    Complete,
    Hello,
    Open,
    Refused,
    Release,
    Renew,
    Request,
    StatusReport,
)

logger = logging.getLogger(__name__)

_LONGEST_NAP = 1.0


class Desk:
    """Serves one engine's catalog and ledger until :meth:`close`.

    Args:
        bind: where to listen.
        catalog: the engine, as described to consumers.
        max_hold, first_lease: see :class:`~kvhandoff.config.HandoffConfig`.
        key: the shared key, without which nobody is served; None serves everybody.
    """

    def __init__(
        self,
        bind: Endpoint,
        catalog: Catalog,
        *,
        max_hold: float,
        first_lease: float | None = None,
        key: bytes | None = None,
    ) -> None:
        self._catalog = catalog
        self._ledger = Ledger(
            Incarnation(catalog.incarnation),
            lease=catalog.lease,
            max_hold=max_hold,
            first_lease=first_lease,
        )
        self._mailbox: deque[Callable[[float], Iterable[Effect]]] = deque()
        self._free: deque[RequestId] = deque()
        self._stopping = False
        self._death: BaseException | None = None
        self._server = Server(bind, key)
        self.port = self._server.port
        self._thread = threading.Thread(target=self._run, name="kvhandoff-desk", daemon=True)
        self._thread.start()

    # ---- for the model thread: never blocks ----

    def announce(self, requests: Iterable[RequestId]) -> None:
        """Requests are being prefilled."""
        self._post(lambda now: self._ledger.announce(requests))

    def hold(self, holding: Holding) -> None:
        """Prefill ended; vLLM keeps the blocks until :meth:`take_free` names the request."""
        self._post(lambda now: self._ledger.hold(holding, now))

    def drop(self, requests: Iterable[RequestId]) -> None:
        """Announced requests ended without KV to hold."""
        self._post(lambda now: self._ledger.drop(requests))

    def reset(self) -> None:
        """Let go of everything that is held; its readers hear that it was released."""
        self._post(self._ledger.reset)

    def take_free(self) -> set[RequestId]:
        """Requests that may be freed, each named once.

        Raises:
            ThreadDied: if the desk's thread has died; the worker has to go with it, as
                nobody could be served any more.
        """
        if self._death is not None:
            raise ThreadDied(f"the desk of this engine stopped: {self._death!r}")
        free: set[RequestId] = set()
        while self._free:
            free.add(self._free.popleft())
        return free

    @property
    def counters(self) -> dict[str, int]:
        """Totals since start, by what happened."""
        return dict(self._ledger.counters) | {"malformed": self._server.malformed}

    def close(self) -> None:
        """Stop serving. Consumers find the desk gone; what is held is no longer promised."""
        self._stopping = True
        self._server.wake()
        self._thread.join(timeout=5)

    # ---- the desk's thread ----

    def _post(self, event: Callable[[float], Iterable[Effect]]) -> None:
        self._mailbox.append(event)
        self._server.wake()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for to, request in self._server.receive(self._nap()):
                    self._do_mail()  # a hold that came first is entered before its readers ask
                    self._do(self._serve(request, to))
                self._do_mail()
                self._do(self._ledger.expire(time.monotonic()))
        except BaseException as error:
            logger.exception("the desk stopped")
            self._death = error
        finally:
            self._server.close()

    def _nap(self) -> float:
        deadline = self._ledger.next_deadline()
        if self._mailbox:
            return 0.0
        return _LONGEST_NAP if deadline is None else min(_LONGEST_NAP, deadline - time.monotonic())

    def _do_mail(self) -> None:
        while self._mailbox:
            self._do(self._mailbox.popleft()(time.monotonic()))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(to, answer):
                    self._server.reply(to, answer)
                case Free(request, outcome):
                    if outcome == "expired":
                        logger.warning(
                            "request %s was not read within its lease; its blocks are freed",
                            request,
                        )
                    elif outcome == "unclaimed":
                        logger.info("nobody asked for request %s; its blocks are freed", request)
                    self._free.append(request)

    def _serve(self, request: Request, to: ReplyAddress) -> Iterable[Effect]:
        now = time.monotonic()
        try:
            match request:
                case Open():
                    return self._ledger.open(request, to, now)
                case Renew():
                    return self._ledger.renew(request, to, now)
                case Complete():
                    return self._ledger.complete(request, to, now)
                case Release():
                    return self._ledger.release(request, to, now)
                case Hello():
                    return [Reply(to, self._greet(request))]
                case _:
                    return [Reply(to, self._status())]
        except Exception:  # a message must never take the desk down
            logger.exception("serving %s failed", type(request).__name__)
            return [Reply(to, Refused("internal", "the desk could not serve this message"))]

    def _greet(self, hello: Hello) -> Answer:
        try:
            check_compatible(self._catalog.fingerprint, hello.fingerprint)
        except (IncompatiblePeer, ProtocolError) as error:
            self._ledger.counters["incompatible"] += 1
            logger.error("decode engine %s was refused: %s", hello.engine, error)
            return Refused("incompatible", str(error))
        return self._catalog

    def _status(self) -> StatusReport:
        return StatusReport(
            engine=self._catalog.engine,
            incarnation=self._catalog.incarnation,
            held=len(self._ledger),
            counters=self.counters,
            recent=list(self._ledger.recent),
        )
