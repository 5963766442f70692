# SPDX-License-Identifier: Apache-2.0
"""The desk's books, event by event: who is answered what, and when blocks are freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvhandoff.ids import Incarnation, RequestId, Ticket
from kvhandoff.lifecycle import ledger as books
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.lifecycle.ledger import Effect, Free, Ledger, Reply
from kvhandoff.protocol.messages import (
    Answer,
    Complete,
    Completed,
    Done,
    HeldKey,
    Open,
    Opened,
    PullReport,
    Refused,
    Release,
    Renew,
    Renewed,
)

LEASE = 10.0
MAX_HOLD = 25.0
R = RequestId("r")
KEY = HeldKey("r", "ticket")
WRONG = HeldKey("r", "another ticket")


class Desk:
    """A ledger with a clock that a test moves, and the effects so far."""

    def __init__(self) -> None:
        self.ledger = Ledger(Incarnation("life"), lease=LEASE, max_hold=MAX_HOLD)
        self.now = 100.0
        self.freed: list[tuple[str, str]] = []
        self.answers: list[tuple[Any, Answer]] = []

    def take(self, effects: list[Effect]) -> list[Answer]:
        """Record effects; returns the answers among them."""
        for effect in effects:
            if isinstance(effect, Free):
                self.freed.append((effect.request, effect.outcome))
            else:
                self.answers.append((effect.to, effect.answer))
        return [effect.answer for effect in effects if isinstance(effect, Reply)]

    def hold(self, request: RequestId = R) -> list[Answer]:
        holding = Holding(request, Ticket("ticket"), ([4, 2],), 20)
        return self.take(self.ledger.hold(holding, self.now))

    def open(
        self, index: int = 0, of: int = 1, pull: str = "pull", key: HeldKey = KEY
    ) -> list[Answer]:
        return self.take(self.ledger.open(Open(key, pull, index, of), (pull, index), self.now))

    def complete(
        self,
        index: int = 0,
        pull: str = "pull",
        key: HeldKey = KEY,
        ok: bool = True,
        linger: float = 0.0,
    ) -> str:
        message = Complete(key, pull, index, ok, linger, PullReport(nbytes=index))
        (answer,) = self.take(self.ledger.complete(message, (pull, index), self.now))
        assert isinstance(answer, Completed)
        return answer.verdict

    def release(self, pull: str = "", key: HeldKey = KEY) -> None:
        assert self.take(self.ledger.release(Release(key, pull), pull, self.now)) == [Done()]

    def renew(self, *keys: HeldKey) -> list[str]:
        (answer,) = self.take(self.ledger.renew(Renew(list(keys)), "renewer", self.now))
        assert isinstance(answer, Renewed)
        return list(answer.verdicts)

    def after(self, seconds: float) -> None:
        """Let time pass, and let the ledger look at its clock."""
        self.now += seconds
        assert self.take(self.ledger.expire(self.now)) == []


@pytest.fixture
def desk() -> Desk:
    return Desk()


def refusal(answers: list[Answer]) -> str:
    (answer,) = answers
    assert isinstance(answer, Refused)
    assert answer.reason
    return answer.code


OPENED = Opened("life", ([4, 2],), 20, LEASE)


def test_a_request_is_read_and_freed(desk: Desk) -> None:
    """The plain order: announce, hold, open, complete."""
    desk.ledger.announce([R])
    assert desk.ledger.announced == 1
    desk.hold()
    assert (desk.ledger.announced, len(desk.ledger)) == (0, 1)
    assert desk.open() == [OPENED]
    assert desk.complete() == "held"
    assert desk.freed == [(R, "completed")]
    assert len(desk.ledger) == 0
    assert desk.ledger.next_deadline() is None
    assert dict(desk.ledger.counters) == {"held": 1, "completed": 1}


def test_every_named_reader_is_waited_for(desk: Desk) -> None:
    """The first reader says how many there are; blocks go after the last one's completion."""
    desk.hold()
    desk.open(1, 3)
    assert desk.complete(1) == "held"
    assert desk.freed == []
    for index in (0, 2):
        assert desk.open(index, 3) == [OPENED]
        assert desk.freed == []
        assert desk.complete(index) == "held"
    assert desk.freed == [(R, "completed")]


@pytest.mark.parametrize("keys", [KEY, WRONG])
def test_open_before_hold_is_answered_when_prefill_ended(desk: Desk, keys: HeldKey) -> None:
    """Readers may come while the prompt is computed; tickets are looked at once there is one."""
    desk.ledger.announce([R])
    assert desk.open(0, 2, key=keys) == []
    assert desk.open(1, 2, key=keys) == []
    answers = desk.hold()
    assert [to for to, _ in desk.answers] == [("pull", 0), ("pull", 1)]
    if keys is KEY:
        assert answers == [OPENED, OPENED]
    else:
        assert [answer.code for answer in answers] == ["ticket", "ticket"]


def test_announcing_again_changes_nothing(desk: Desk) -> None:
    """A prompt in chunks is announced with each; once held it is no longer being prefilled."""
    desk.ledger.announce([R])
    desk.open()
    desk.ledger.announce([R])
    assert desk.hold() == [OPENED]
    desk.ledger.announce([R])
    assert desk.ledger.announced == 0


@pytest.mark.parametrize(("key", "freed"), [(KEY, [(R, "released")]), (WRONG, [])])
def test_release_before_hold_counts_when_prefill_ended(
    desk: Desk, key: HeldKey, freed: list[tuple[str, str]]
) -> None:
    """A consumer that has the prompt in its cache is faster than the producer's next step."""
    desk.ledger.announce([R])
    assert desk.take(desk.ledger.release(Release(key), "early", desk.now)) == []
    assert desk.hold() == [Done()]
    assert desk.freed == freed
    assert len(desk.ledger) == 1 - len(freed)


def test_open_and_its_release_before_hold(desk: Desk) -> None:
    """A consumer that gave up before prefill ended: nobody reads, so the blocks go at once."""
    desk.ledger.announce([R])
    desk.open()
    desk.ledger.release(Release(KEY, "pull"), "early", desk.now)
    assert desk.hold() == [OPENED, Done()]
    assert desk.freed == [(R, "released")]


def test_release_of_a_dropped_request_is_answered(desk: Desk) -> None:
    """What ends before it is held needs no release."""
    desk.ledger.announce([R])
    desk.ledger.release(Release(KEY), "early", desk.now)
    assert desk.take(desk.ledger.drop([R])) == [Done()]


def test_dropped_requests_refuse_those_who_wait(desk: Desk) -> None:
    """An aborted prefill answers its readers, and is then unknown."""
    desk.ledger.announce([R])
    desk.open()
    assert refusal(desk.take(desk.ledger.drop([R, RequestId("never seen")]))) == "unknown"
    assert refusal(desk.open()) == "unknown"
    assert desk.ledger.announced == 0
    assert desk.freed == []


def test_waiting_readers_have_a_bound(desk: Desk) -> None:
    """One more is told to come later; those who wait are not forgotten."""
    desk.ledger.announce([R])
    waiting = Open(KEY, "pull", 0, 1)
    for _ in range(books.MAX_PARKED):
        assert desk.ledger.open(waiting, None, desk.now) == []
    assert refusal(desk.open()) == "not-ready"
    assert desk.hold() == [OPENED] * books.MAX_PARKED
    desk.ledger.announce([RequestId("next")])
    assert desk.open(key=HeldKey("next", "ticket")) == []


@pytest.mark.parametrize(
    ("end", "again"),
    [
        (lambda desk: desk.complete(), "held"),
        (lambda desk: desk.after(LEASE), "expired"),
        (lambda desk: desk.release("pull"), "released"),
    ],
    ids=["completed", "expired", "released"],
)
def test_late_completions_hear_how_it_ended(
    desk: Desk, end: Callable[[Desk], object], again: str
) -> None:
    """Only a reader that had completed in time hears ``held``, however often it asks."""
    desk.hold()
    desk.open()
    end(desk)
    assert len(desk.freed) == 1
    for _ in range(3):
        assert desk.complete() == again
    assert desk.complete(index=5) == ("released" if again == "held" else again)
    assert desk.complete(pull="another") == ("released" if again == "held" else again)
    assert desk.complete(key=WRONG) == "unknown"
    assert len(desk.freed) == 1


def test_half_of_the_readers_in_time_do_not_make_the_other_half(desk: Desk) -> None:
    """After an expiry the reader that had completed still hears ``held``, the other does not."""
    desk.hold()
    desk.open(0, 2)
    desk.open(1, 2)
    assert desk.complete(0) == "held"
    desk.after(LEASE)
    assert desk.freed == [(R, "expired")]
    assert desk.complete(0) == "held"
    assert desk.complete(1) == "expired"
    assert desk.ledger.counters["late"] == 1


def test_repeated_completions_count_once(desk: Desk) -> None:
    """A reader whose answer was lost asks again, and the other reader is still waited for."""
    desk.hold()
    desk.open(0, 2)
    assert [desk.complete(0) for _ in range(3)] == ["held"] * 3
    assert desk.freed == []


@pytest.mark.parametrize(
    ("index", "pull"), [(0, "pull"), (1, "opened"), (0, "another")], ids=["none", "index", "pull"]
)
def test_readers_that_never_opened_are_unknown(desk: Desk, index: int, pull: str) -> None:
    """Nobody completes, and frees, what they never asked for."""
    desk.hold()
    desk.open(0, 2, pull="opened")
    assert desk.complete(index, pull) == "unknown"
    assert desk.freed == []


def test_failed_reads_complete_too(desk: Desk) -> None:
    """A reader that gave up needs the blocks no longer."""
    desk.hold()
    desk.open()
    assert desk.complete(ok=False) == "held"
    assert desk.freed == [(R, "failed")]


def test_one_pull_that_went_well_is_enough(desk: Desk) -> None:
    """A request counts as failed if nobody got it whole."""
    desk.hold()
    desk.open(0, 2, pull="first")
    desk.open(1, 2, pull="first")
    desk.open(pull="second")
    desk.complete(0, pull="first", ok=False)
    desk.complete(1, pull="first")
    desk.complete(pull="second")
    assert desk.freed == [(R, "completed")]


def test_a_second_pull_keeps_the_request(desk: Desk) -> None:
    """Two consumers of one request: it goes when both have ended."""
    desk.hold()
    desk.open(pull="first")
    desk.open(pull="second")
    assert desk.complete(pull="first") == "held"
    assert desk.freed == []
    assert desk.complete(pull="second") == "held"
    assert desk.freed == [(R, "completed")]


@pytest.mark.parametrize("pull", ["", "pull"])
def test_release_without_pulls_frees(desk: Desk, pull: str) -> None:
    """A consumer that will not read says so, whether or not it has a pull."""
    desk.hold()
    desk.release(pull)
    assert desk.freed == [(R, "released")]
    desk.release(pull)
    assert refusal(desk.open()) == "released"
    assert desk.freed == [(R, "released")]


@pytest.mark.parametrize("pull", ["", "another"])
def test_release_leaves_other_pulls_alone(desk: Desk, pull: str) -> None:
    """Somebody who does not read does not take from somebody who does."""
    desk.hold()
    desk.open()
    desk.release(pull)
    assert desk.freed == []
    assert desk.complete() == "held"
    assert desk.freed == [(R, "completed")]


def test_release_ends_a_pull_whose_readers_did_not_all_come(desk: Desk) -> None:
    """A consumer of two ranks of which one never opened lets go of its pull."""
    desk.hold()
    desk.open(0, 2)
    desk.complete(0)
    desk.release("pull")
    assert desk.freed == [(R, "released")]
    assert desk.complete(0) == "held"


def test_release_of_one_pull_waits_for_the_other(desk: Desk) -> None:
    """The last one to end decides when."""
    desk.hold()
    desk.open(pull="first")
    desk.open(pull="second")
    desk.release("first")
    assert desk.freed == []
    assert desk.complete(pull="first") == "held"
    assert desk.freed == []
    assert desk.complete(pull="second") == "held"
    assert desk.freed == [(R, "completed")]


def test_release_needs_the_ticket(desk: Desk) -> None:
    """Knowing a request's id is not enough to take it from others."""
    desk.hold()
    desk.release(key=WRONG)
    desk.release(key=HeldKey("nobody", "ticket"))
    assert desk.freed == []


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Open(WRONG, "pull", 0, 1), "ticket"),
        (Open(HeldKey("r", "ünïcode"), "pull", 0, 1), "ticket"),
        (Open(HeldKey("nobody", "ticket"), "pull", 0, 1), "unknown"),
        (Open(KEY, "pull", 2, 2), "reader"),
        (Open(KEY, "pull", 3, 2), "reader"),
        (Open(KEY, "taken", 0, 3), "reader"),
    ],
    ids=["ticket", "not ASCII", "unknown", "index", "index beyond", "other number of readers"],
)
def test_open_refuses_what_cannot_be(desk: Desk, message: Open, code: str) -> None:
    """With a code for programs, a reason for people, and no trace in the books."""
    desk.hold()
    desk.open(0, 2, pull="taken")
    deadline = desk.ledger.next_deadline()
    desk.now += 1
    assert refusal(desk.take(desk.ledger.open(message, "asker", desk.now))) == code
    assert desk.ledger.next_deadline() == deadline
    assert desk.ledger.counters["refused"] == 1


def test_refused_readers_leave_no_pull_behind(desk: Desk) -> None:
    """A reader that cannot exist does not make the request wait for its pull."""
    desk.hold()
    assert refusal(desk.open(2, 2, pull="impossible")) == "reader"
    desk.open()
    assert desk.complete() == "held"
    assert desk.freed == [(R, "completed")]


def test_pulls_of_a_request_have_a_bound(desk: Desk) -> None:
    """One more is refused; those under way are not disturbed."""
    desk.hold()
    for number in range(books.MAX_PULLS):
        assert desk.open(pull=f"pull {number}") == [OPENED]
    assert refusal(desk.open(pull="one more")) == "reader"
    assert desk.open(pull="pull 0") == [OPENED]


def test_tombstones_have_a_bound(desk: Desk) -> None:
    """The oldest endings are forgotten first, and then are unknown."""
    count = books.MAX_TOMBSTONES + 2
    for number in range(count):
        desk.hold(RequestId(f"r{number}"))
        desk.release(key=HeldKey(f"r{number}", "ticket"))
    ends = [HeldKey(f"r{number}", "ticket") for number in (0, 1, 2, 3, count - 1)]
    assert desk.renew(*ends) == ["unknown", "unknown", "released", "released", "released"]


def test_renew_says_how_each_request_is(desk: Desk) -> None:
    """One verdict for each key, in their order; only what is held is extended."""
    desk.ledger.announce([RequestId("announced")])
    for name in ("expired", "released", "completed"):
        desk.hold(RequestId(name))
    desk.release(key=HeldKey("released", "ticket"))
    desk.open(key=HeldKey("completed", "ticket"))
    desk.complete(key=HeldKey("completed", "ticket"))
    desk.after(LEASE)
    desk.hold()
    verdicts = {
        KEY: "held",
        WRONG: "unknown",
        HeldKey("announced", "any"): "held",
        HeldKey("expired", "ticket"): "expired",
        HeldKey("expired", "another"): "unknown",
        HeldKey("released", "ticket"): "released",
        HeldKey("completed", "ticket"): "released",
        HeldKey("nobody", "ticket"): "unknown",
    }
    assert desk.renew(*verdicts) == list(verdicts.values())
    assert desk.renew() == []


@pytest.mark.parametrize(
    "hear",
    [
        lambda desk: desk.renew(KEY),
        lambda desk: desk.open(0, 2),
        lambda desk: desk.complete(0),
    ],
    ids=["renew", "open", "complete"],
)
def test_hearing_from_a_consumer_extends_the_lease(
    desk: Desk, hear: Callable[[Desk], object]
) -> None:
    """A lease counts from the last sign of life."""
    desk.hold()
    desk.open(0, 2)
    desk.after(LEASE - 1)
    hear(desk)
    desk.after(LEASE - 1)
    assert desk.freed == []
    desk.after(1)
    assert desk.freed == [(R, "expired")]


@pytest.mark.parametrize(
    "hear",
    [
        lambda desk: desk.renew(WRONG),
        lambda desk: desk.open(key=WRONG),
        lambda desk: desk.complete(key=WRONG),
        lambda desk: desk.complete(pull="never opened"),
    ],
    ids=["renew", "open", "complete", "no reader"],
)
def test_strangers_do_not_extend_the_lease(desk: Desk, hear: Callable[[Desk], object]) -> None:
    """Without the ticket, or without having opened, nothing is prolonged."""
    desk.hold()
    desk.after(LEASE - 1)
    hear(desk)
    desk.after(1)
    assert desk.freed == [(R, "unclaimed")]


def impatient() -> Desk:
    """A desk with a short first lease."""
    desk = Desk()
    desk.ledger = Ledger(Incarnation("life"), lease=LEASE, max_hold=MAX_HOLD, first_lease=2.0)
    return desk


def test_who_is_never_asked_for_goes_soon() -> None:
    """And who comes later hears that it is over."""
    desk = impatient()
    desk.hold()
    assert desk.ledger.next_deadline() == 102.0
    desk.after(2)
    assert desk.freed == [(R, "unclaimed")]
    assert desk.renew(KEY) == ["expired"]
    (answer,) = desk.open()
    assert isinstance(answer, Refused)
    assert answer.code == "expired"


@pytest.mark.parametrize("hear", [lambda d: d.renew(KEY), lambda d: d.open()])
def test_who_is_asked_for_has_the_whole_lease(hear: Callable[[Desk], object]) -> None:
    """From the first message on."""
    desk = impatient()
    desk.hold()
    desk.after(1)
    hear(desk)
    desk.after(LEASE - 1)
    assert desk.freed == []
    desk.after(1)
    assert desk.freed == [(R, "expired")]


def test_a_renewal_before_hold_counts() -> None:
    """A consumer is quicker than the producer's next step, and renews again much later."""
    desk = impatient()
    desk.ledger.announce([R])
    assert desk.renew(KEY) == ["held"]
    desk.hold()
    assert desk.ledger.next_deadline() == 100.0 + LEASE


def test_nothing_is_held_longer_than_max_hold(desk: Desk) -> None:
    """A consumer that renews for ever does not keep blocks for ever."""
    desk.hold()
    for _ in range(int(MAX_HOLD) - 1):
        desk.after(1)
        assert desk.renew(KEY) == ["held"]
    assert desk.ledger.next_deadline() == 100.0 + MAX_HOLD
    desk.after(1)
    assert desk.freed == [(R, "expired")]
    assert desk.renew(KEY) == ["expired"]


def test_next_deadline_is_the_earliest(desk: Desk) -> None:
    """Whoever drives the ledger needs to wake no earlier, and no later."""
    assert desk.ledger.next_deadline() is None
    desk.hold(RequestId("early"))
    desk.now += 3
    desk.hold(RequestId("late"))
    assert desk.ledger.next_deadline() == 100.0 + LEASE
    desk.after(LEASE - 3)
    assert desk.freed == [("early", "unclaimed")]
    assert desk.ledger.next_deadline() == 103.0 + LEASE


def test_records_tell_how_requests_went(desk: Desk) -> None:
    """The latest endings with times and the readers' reports, for the status report."""
    desk.hold()
    desk.now += 2
    desk.open(0, 2)
    desk.open(1, 2)
    desk.now += 3
    desk.complete(1)
    desk.complete(0)
    desk.hold(RequestId("unread"))
    desk.after(LEASE)
    read, unread = desk.ledger.recent
    assert (read.request, read.outcome, read.tokens) == (R, "completed", 20)
    assert (read.held_seconds, read.first_open_seconds) == (5.0, 2.0)
    assert [report.nbytes for report in read.readers] == [1, 0]
    assert (unread.outcome, unread.first_open_seconds, unread.readers) == ("unclaimed", None, [])


def test_a_reset_lets_go_of_everything(desk: Desk) -> None:
    """Also under readers, who hear that what they read is of no use."""
    desk.hold()
    desk.hold(RequestId("unread"))
    desk.open()
    desk.take(desk.ledger.reset(desk.now))
    assert sorted(desk.freed) == [(R, "released"), ("unread", "released")]
    assert desk.complete() == "released"
    assert desk.ledger.next_deadline() is None
    desk.hold(RequestId("new"))
    assert len(desk.ledger) == 1


def test_a_request_lingers_for_siblings(desk: Desk) -> None:
    """One that comes in time reads it, too; renewals do not prolong it."""
    desk.hold()
    desk.open(pull="first")
    assert desk.complete(pull="first", linger=2.0) == "held"
    assert desk.freed == []
    desk.after(1)
    desk.renew(KEY)
    assert desk.open(pull="second") == [OPENED]
    desk.after(LEASE - 1)
    assert desk.freed == []
    assert desk.complete(pull="second", linger=2.0) == "held"
    desk.renew(KEY)
    desk.after(2)
    assert desk.freed == [(R, "completed")]
    assert desk.complete(pull="first") == "held"


def test_lingering_is_bounded_by_the_lease(desk: Desk) -> None:
    """A consumer cannot keep blocks for longer by reading them."""
    desk.hold()
    desk.open()
    desk.complete(linger=1e6)
    desk.after(LEASE)
    assert desk.freed == [(R, "completed")]
