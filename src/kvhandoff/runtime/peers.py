# SPDX-License-Identifier: Apache-2.0
"""What a consumer worker knows about producer engines: catalogs, and plans derived from them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvhandoff.channel import Client
from kvhandoff.errors import IncompatiblePeer, KVHandoffError, ProtocolError
from kvhandoff.ids import Endpoint, EngineId, Rank
from kvhandoff.lifecycle.pull import Share
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.plan.descriptors import Template
from kvhandoff.plan.pairing import Span
from kvhandoff.plan.pieces import Slicing, cut
from kvhandoff.plan.routing import Part, cover, holder_order
from kvhandoff.protocol.catalog import Catalog, Fingerprint
from kvhandoff.protocol.messages import Answer, Hello, Refused
from kvhandoff.protocol.trust import Trust

logger = logging.getLogger(__name__)

MAX_PEERS = 256

Place: TypeAlias = tuple[Endpoint, EngineId]
OnPeer: TypeAlias = Callable[["Peer | KVHandoffError"], None]


@dataclass(frozen=True)
class Work:
    """One part of a pull: who shares it, and the token spans of each piece by KV group."""

    share: Share
    pieces: Sequence[Mapping[int, Span]]


@dataclass
class Peer:
    """One incarnation of a producer engine, seen from one consumer worker."""

    catalog: Catalog
    layout: WorkerLayout
    parts: tuple[Part, ...] = field(init=False)
    _workers: dict[Rank, WorkerLayout] = field(init=False)
    _templates: dict[tuple[int, Rank], Template] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.catalog.sizes
        self._workers = {sizes.rank(worker.at): worker for worker in self.catalog.workers}
        self.parts = cover(self.layout, self.catalog.workers, sizes)
        for number, part in enumerate(self.parts):  # refuses unequal cells now, not while reading
            self.template(number, part.holders[0])

    def template(self, part: int, source: Rank) -> Template:
        """The prepared plan for reading a part from a worker (computing it twice is harmless)."""
        found = self._templates.get((part, source))
        if found is None:
            found = Template(self.parts[part], self._workers[source], self.layout)
            self._templates[part, source] = found
        return found

    def session(self, source: Rank) -> str:
        """The transport address of a worker."""
        return self._workers[source].session

    def work(
        self,
        spans: Mapping[int, Span],
        *,
        request: str,
        replica: int,
        reader: int,
        slicing: Slicing,
        stripe: bool,
    ) -> list[Work]:
        """For each part, the pieces to read and whom to read them from."""
        work = []
        for number, part in enumerate(self.parts):
            holders = holder_order(
                part, self.catalog.sizes, replica=replica, request_id=request, reader=reader
            )
            template = self.template(number, holders[0])
            nbytes = template.nbytes(spans)
            active = slicing.holders(nbytes, len(holders)) if stripe else 1
            pieces = cut(
                spans,
                nbytes=nbytes,
                piece_bytes=slicing.piece_bytes(nbytes, active),
                align=template.align,
            )
            work.append(Work(Share(holders, len(pieces), active), pieces))
        return work


class Peers:
    """Catalogs by place. Used from the puller's thread only; ``post`` brings answers back to it."""

    def __init__(
        self,
        client: Client,
        layout: WorkerLayout,
        engine: EngineId,
        fingerprint: Fingerprint,
        timeout: float,
        post: Callable[[Callable[[], None]], None],
        trust: Trust,
    ) -> None:
        self._client = client
        self._layout = layout
        self._hello = Hello(engine, fingerprint)
        self._timeout = timeout
        self._post = post
        self._trust = trust
        self._known: OrderedDict[Place, Peer] = OrderedDict()
        self._waiting: dict[Place, list[OnPeer]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, place: Place, on_peer: OnPeer, *, stale: str = "") -> None:
        """Call back with the peer at ``place``, shaking hands if needed.

        Args:
            stale: an incarnation known to be over; a cached catalog of it is not used.
        """
        known = self._known.get(place)
        if known is not None and known.catalog.incarnation != stale:
            self._known.move_to_end(place)
            on_peer(known)
            return
        waiting = self._waiting.get(place)
        if waiting is not None:
            waiting.append(on_peer)
            return
        self._waiting[place] = [on_peer]
        self._client.ask(
            place[0],
            self._hello,
            self._timeout,
            lambda result: self._post(lambda: self._greeted(place, result)),
        )

    def forget(self, place: Place) -> None:
        """The peer did not answer; shake hands anew next time."""
        self._known.pop(place, None)

    def _greeted(self, place: Place, result: Answer | KVHandoffError) -> None:
        outcome = self._judge(place, result)
        if isinstance(outcome, Peer):
            self._known[place] = outcome
            self._known.move_to_end(place)
            if len(self._known) > MAX_PEERS:
                self._known.popitem(last=False)
        else:
            self._known.pop(place, None)
        for on_peer in self._waiting.pop(place, []):
            on_peer(outcome)

    def _judge(self, place: Place, result: Answer | KVHandoffError) -> Peer | KVHandoffError:
        if isinstance(result, KVHandoffError):
            return result
        if isinstance(result, Refused):
            return IncompatiblePeer(result.reason)
        if not isinstance(result, Catalog):
            return ProtocolError(f"{place[0]} answered a hello with {type(result).__name__}")
        if result.engine != place[1]:
            return ProtocolError(
                f"the desk at {place[0]} belongs to engine {result.engine!r}, expected "
                f"{place[1]!r}; the request's parameters are those of another engine"
            )
        try:
            result.check()
            self._trust.check_catalog(result)
            return Peer(result, self._layout)
        except KVHandoffError as error:
            return error
        except Exception as error:  # a peer's nonsense must not take this worker down
            logger.exception("the catalog of %s cannot be used", place[1])
            return ProtocolError(f"the catalog of {place[1]} cannot be used: {error!r}")
