# SPDX-License-Identifier: Apache-2.0
"""A consumer's renewer against a real desk: requests are kept, lost and let go of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvhandoff.channel import ReplyAddress, Server
from kvhandoff.ids import Endpoint, EngineId, Incarnation, RequestId, Ticket
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.model.topology import Coordinate, ParallelSizes
from kvhandoff.protocol.catalog import Catalog
from kvhandoff.protocol.messages import Renew, Renewed, Request
from kvhandoff.protocol.params import HandoffParams
from kvhandoff.runtime.desk import Desk
from kvhandoff.runtime.renewer import Renewer
from tests.engines import FINGERPRINT, HOST, wait_until

PATIENCE = 20.0
ENGINE = EngineId("prefill")


def params_of(request: str, port: int, lease: float) -> HandoffParams:
    return HandoffParams(
        remote_engine_id=ENGINE,
        remote_request_id=request,
        remote_host=HOST,
        remote_port=port,
        remote_num_tokens=4,
        remote_replicas=1,
        remote_lease=lease,
        ticket=f"ticket of {request}",
    )


class Held:
    """A desk with requests on it, each of one block."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        workers = (WorkerLayout(Coordinate(0, 0, 0), "nobody", (), ()),)
        catalog = Catalog(ENGINE, Incarnation("life"), FINGERPRINT, ParallelSizes(), lease, workers)
        self.desk = Desk(Endpoint(HOST, 0), catalog, max_hold=900.0)
        self.freed: set[str] = set()

    def hold(self, request: str) -> HandoffParams:
        ticket = Ticket(f"ticket of {request}")
        self.desk.hold(Holding(RequestId(request), ticket, ([1],), 4))
        return params_of(request, self.desk.port, self._lease)

    def is_free(self, request: str) -> bool:
        self.freed |= self.desk.take_free()
        return request in self.freed


@pytest.fixture
def start() -> Iterator[Callable[[float], Held]]:
    started: list[Held] = []

    def start(lease: float) -> Held:
        started.append(Held(lease))
        return started[-1]

    yield start
    for held in started:
        held.desk.close()


@pytest.fixture
def renewer() -> Iterator[Renewer]:
    renewer = Renewer(5.0, min_interval=0.01)
    yield renewer
    renewer.close()


class Listening:
    """Stands in for a desk: keeps the renewals that it gets, and answers ``held`` to all."""

    def __init__(self) -> None:
        self.renewals: list[list[str]] = []
        self._server = Server(Endpoint(HOST, 0))
        self.port = self._server.port
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            for to, request in self._server.receive(1.0):
                self._serve(to, request)
        self._server.close()

    def _serve(self, to: ReplyAddress, request: Request) -> None:
        assert isinstance(request, Renew)
        self.renewals.append([key.request for key in request.keys])
        self._server.reply(to, Renewed(["held"] * len(request.keys)))

    @property
    def renewed(self) -> int:
        return sum(map(len, self.renewals))

    def close(self) -> None:
        self._stopping = True
        self._server.wake()
        self._thread.join(PATIENCE)


@pytest.fixture
def listening() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    listening.close()


def test_the_first_renewal_is_sent_at_once(listening: Listening, renewer: Renewer) -> None:
    """A third of this lease is twenty minutes; nobody waits so long here."""
    renewer.keep(params_of("r", listening.port, 3600.0))
    wait_until(lambda: listening.renewals == [["r"]])
    renewer.keep(params_of("s", listening.port, 3600.0))
    wait_until(lambda: listening.renewals == [["r"], ["s"]])


def test_many_arrivals_cost_one_key_each(listening: Listening, renewer: Renewer) -> None:
    """Whoever was renewed a moment ago is not renewed with the next one."""
    for number in range(300):
        renewer.keep(params_of(f"r{number}", listening.port, 3600.0))
    wait_until(lambda: listening.renewed >= 300)
    assert listening.renewed == 300
    assert len({request for keys in listening.renewals for request in keys}) == 300


def test_who_is_due_soon_shares_the_message(
    listening: Listening, renewer: Renewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that came one after the other are renewed together later on."""
    for request in ("r", "s", "t"):
        renewer.keep(params_of(request, listening.port, 0.6))
    wait_until(lambda: ["r", "s", "t"] in [sorted(keys) for keys in listening.renewals])


def test_a_stranger_cannot_set_the_pace(listening: Listening) -> None:
    """The lease comes from parameters that a client may have written."""
    renewer = Renewer(5.0)
    try:
        renewer.keep(params_of("r", listening.port, 0.1))
        wait_until(lambda: listening.renewed == 1)
        assert renewer._kept[Ticket("ticket of r")].interval == 1.0
    finally:
        renewer.close()


def test_a_request_is_kept_beyond_its_lease(start, renewer: Renewer) -> None:
    """One that nobody renews runs out meanwhile, several times over."""
    held = start(1.0)
    kept = held.hold("kept")
    renewer.keep(kept)
    for number in range(2):
        held.hold(f"other {number}")
        wait_until(lambda number=number: held.is_free(f"other {number}"))
    assert not held.is_free("kept")
    assert not renewer.is_lost(kept)
    assert len(renewer) == 1
    renewer.stop(kept)
    wait_until(lambda: held.is_free("kept"))


def test_what_has_expired_is_lost(start, renewer: Renewer) -> None:
    """D learns it from the first renewal, and asks no more; others are not touched."""
    held = start(0.3)
    late = held.hold("late")
    wait_until(lambda: held.is_free("late"))
    fresh = held.hold("fresh")
    renewer.keep(fresh)
    renewer.keep(late)
    wait_until(lambda: renewer.is_lost(late))
    assert not renewer.is_lost(fresh)
    assert len(renewer) == 1
    renewer.stop(late)
    assert not renewer.is_lost(late)


def test_a_forged_ticket_is_lost(start, renewer: Renewer) -> None:
    """It renews nothing, and is not told apart from what never was."""
    held = start(30.0)
    held.hold("r")
    forged = msgspec.structs.replace(params_of("r", held.desk.port, 30.0), ticket="forged")
    renewer.keep(forged)
    wait_until(lambda: renewer.is_lost(forged))


def test_releasing_frees_at_once(start, renewer: Renewer) -> None:
    """Not after the lease, which is an hour."""
    held = start(3600.0)
    params = held.hold("r")
    renewer.keep(params)
    renewer.release(params)
    wait_until(lambda: held.is_free("r"))
    assert len(renewer) == 0
    assert held.desk.counters["released"] == 1


def test_renewals_of_one_desk_share_messages(
    listening: Listening, renewer: Renewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many in each as a message may carry; all requests are in them."""
    monkeypatch.setattr("kvhandoff.runtime.renewer.MAX_BATCH", 4)
    names = {f"r{number}" for number in range(10)}
    for name in sorted(names):
        renewer.keep(params_of(name, listening.port, 0.3))

    def all_in_three() -> bool:
        sizes = [len(keys) for keys in listening.renewals]
        return any(sizes[at : at + 3] == [4, 4, 2] for at in range(len(sizes)))

    wait_until(all_in_three)
    sizes = [len(keys) for keys in listening.renewals]
    assert max(sizes) <= 4
    at = next(at for at in range(len(sizes)) if sizes[at : at + 3] == [4, 4, 2])
    assert {name for keys in listening.renewals[at : at + 3] for name in keys} == names


def test_a_desk_that_is_gone_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Silence is not an answer: the request may still be held, and reading it decides."""
    renewer = Renewer(0.2)
    nobody = Server(Endpoint(HOST, 0))
    nobody.close()
    params = params_of("r", nobody.port, 0.3)
    renewer.keep(params)
    wait_until(lambda: "renewing 1 requests" in caplog.text)
    assert not renewer.is_lost(params)
    assert len(renewer) == 1
    renewer.close()
