# SPDX-License-Identifier: Apache-2.0
"""Keeps a consumer scheduler's requests held on their producers, and lets go of them early.

One thread per consumer engine. It renews in batches, one message per desk, three times within a
lease, so that one lost message expires nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from kvhandoff.channel import Client
from kvhandoff.errors import KVHandoffError, ThreadDied
from kvhandoff.ids import Endpoint, PullId, Ticket
from kvhandoff.protocol.messages import MAX_BATCH, Answer, HeldKey, Release, Renew, Renewed
from kvhandoff.protocol.params import HandoffParams

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3
MIN_INTERVAL = 1.0
"""Seconds; the lease comes from the network."""


@dataclass
class _Kept:
    key: HeldKey
    endpoint: Endpoint
    interval: float
    due: float


class Renewer:
    """Renews what it is told to :meth:`keep` until :meth:`stop` or :meth:`release`."""

    def __init__(
        self,
        answer_timeout: float,
        *,
        key: bytes | None = None,
        min_interval: float = MIN_INTERVAL,
    ) -> None:
        self._timeout = answer_timeout
        self._min_interval = min_interval
        self._client = Client("kvhandoff-renewer-client", key=key)
        self._kept: dict[Ticket, _Kept] = {}
        self._lost: set[Ticket] = set()
        self._change = threading.Condition()
        self._stopping = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvhandoff-renewer", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._kept)

    def require_alive(self) -> None:
        """Raise :class:`ThreadDied` if nothing is renewed any more."""
        if self._death is not None:
            raise ThreadDied(f"the thread that renews leases stopped: {self._death!r}")
        self._client.require_alive()

    def keep(self, params: HandoffParams) -> None:
        """Renew this request from now on, for the first time at once: it may have waited long in
        a queue in front of this engine's scheduler."""
        interval = max(params.remote_lease / RENEWALS_PER_LEASE, self._min_interval)
        with self._change:
            self._kept[params.proof] = _Kept(
                HeldKey(params.remote_request_id, params.ticket),
                params.endpoint,
                interval,
                time.monotonic(),
            )
            self._change.notify()

    def stop(self, params: HandoffParams) -> None:
        """Renew no longer."""
        with self._change:
            self._kept.pop(params.proof, None)
            self._lost.discard(params.proof)

    def is_lost(self, params: HandoffParams) -> bool:
        """Whether the producer has answered that it no longer holds the request."""
        return params.proof in self._lost

    def release(self, params: HandoffParams, pull: PullId | None = None) -> None:
        """Renew no longer and tell the producer that nobody (of ``pull``) reads any more."""
        self.stop(params)
        key = HeldKey(params.remote_request_id, params.ticket)

        def done(result: Answer | KVHandoffError) -> None:
            if isinstance(result, KVHandoffError):
                logger.warning(
                    "could not release %s, it stays held until its lease runs out: %s",
                    key.request,
                    result,
                )

        self._client.ask(params.endpoint, Release(key, pull or ""), self._timeout, done)

    def close(self) -> None:
        """Stop renewing; what is still kept is left to its lease."""
        with self._change:
            self._stopping = True
            self._change.notify()
        self._thread.join(timeout=5)
        self._client.close()

    def _run(self) -> None:
        try:
            self._renew_until_stopped()
        except BaseException as error:
            logger.exception("the thread that renews leases stopped")
            self._death = error

    def _renew_until_stopped(self) -> None:
        while True:
            with self._change:
                if self._stopping:
                    return
                nearest = min((kept.due for kept in self._kept.values()), default=None)
                now = time.monotonic()
                if nearest is None or nearest > now:
                    self._change.wait(None if nearest is None else nearest - now)
                    continue
                batches = self._take_due(now)
            for endpoint, keys in batches.items():
                for start in range(0, len(keys), MAX_BATCH):
                    self._renew(endpoint, keys[start : start + MAX_BATCH])

    def _take_due(self, now: float) -> dict[Endpoint, list[HeldKey]]:
        batches: dict[Endpoint, list[HeldKey]] = defaultdict(list)
        due_endpoints = {kept.endpoint for kept in self._kept.values() if kept.due <= now}
        for kept in self._kept.values():
            # Whoever is due soon shares the message; whoever was renewed just now does not.
            if kept.endpoint in due_endpoints and kept.due <= now + kept.interval / 2:
                kept.due = now + kept.interval
                batches[kept.endpoint].append(kept.key)
        return batches

    def _renew(self, endpoint: Endpoint, keys: list[HeldKey]) -> None:
        def renewed(result: Answer | KVHandoffError) -> None:
            if not isinstance(result, Renewed) or len(result.verdicts) != len(keys):
                logger.warning("renewing %d requests at %s failed: %s", len(keys), endpoint, result)
                return
            with self._change:
                for key, verdict in zip(keys, result.verdicts, strict=True):
                    ticket = Ticket(key.ticket)
                    if verdict != "held" and self._kept.pop(ticket, None) is not None:
                        logger.warning("%s is no longer held (%s)", key.request, verdict)
                        self._lost.add(ticket)

        self._client.ask(endpoint, Renew(keys), self._timeout, renewed)
