# SPDX-License-Identifier: Apache-2.0
"""One pull, event by event: what it does next, and that it ends once, with its reads returned."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from kvhandoff.ids import Rank
from kvhandoff.lifecycle.pull import Ask, Connect, Effect, Ended, Finish, Pull, Read, Share, State
from kvhandoff.protocol.messages import Opened

SHARES = (Share((Rank(0), Rank(2))), Share((Rank(1), Rank(3))))


def share(*holders: int, pieces: int = 1, active: int = 1) -> Share:
    return Share(tuple(map(Rank, holders)), pieces, active)


def opened(incarnation: str = "life") -> Opened:
    return Opened(incarnation, ([1],), 4, 30.0)


def begin(*shares: Share, window: int = 2) -> tuple[Pull, list[Effect]]:
    """A pull that has begun to read, and its first reads."""
    pull = Pull(window)
    assert pull.start() == [Connect(fresh=False)]
    assert pull.connected("life", shares) == [Ask()]
    return pull, pull.answered(opened())


def reading(*shares: Share) -> Pull:
    """A pull that reads parts of one piece each."""
    shares = shares or SHARES
    pull, effects = begin(*shares)
    assert effects == [Read(part, 0, each.holders[0]) for part, each in enumerate(shares)]
    return pull


def reads(effects: list[Effect]) -> list[tuple[int, int, int]]:
    """``(part, piece, source)`` of effects that are all reads."""
    assert all(isinstance(effect, Read) for effect in effects)
    return [(e.part, e.piece, e.source) for e in effects if isinstance(e, Read)]


def test_a_pull_that_goes_well() -> None:
    """Connect, open, read all parts, complete, end without failure."""
    pull = reading()
    assert pull.opened == opened()
    assert pull.read(1, 0, Rank(1), None) == []
    assert pull.read(0, 0, Rank(0), None) == [Finish(ok=True)]
    assert pull.completed("held") == [Ended(None)]
    assert pull.state is State.ENDED
    assert pull.failovers == 0


def test_nothing_to_read_completes_at_once() -> None:
    """A worker whose layers are all somewhere else is a reader none the less."""
    pull = Pull()
    pull.start()
    pull.connected("life", ())
    assert pull.answered(opened()) == [Finish(ok=True)]


@pytest.mark.parametrize("verdict", ["expired", "released", "unknown"])
def test_only_held_ends_well(verdict) -> None:
    """After any other verdict the bytes are not used, and the failure says which it was."""
    pull = reading()
    pull.read(0, 0, Rank(0), None)
    pull.read(1, 0, Rank(1), None)
    (ended,) = pull.completed(verdict)
    assert isinstance(ended, Ended)
    assert verdict in (ended.failure or "")


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_holder_has_at_most_a_window_in_flight(window: int) -> None:
    """Pieces go out in order, and one more for each that returns."""
    pull, effects = begin(share(0, pieces=5), window=window)
    assert reads(effects) == [(0, piece, 0) for piece in range(window)]
    for piece in range(5 - window):
        assert reads(pull.read(0, piece, Rank(0), None)) == [(0, piece + window, 0)]
    for piece in range(5 - window, 4):
        assert pull.read(0, piece, Rank(0), None) == []
    assert pull.read(0, 4, Rank(0), None) == [Finish(ok=True)]


def test_each_part_has_a_window_of_its_own() -> None:
    """A part that is read from a holder does not wait for another part that is, too."""
    _, effects = begin(share(0, pieces=3), share(0, pieces=3), window=1)
    assert reads(effects) == [(0, 0, 0), (1, 0, 0)]


def test_several_holders_take_turns() -> None:
    """Every active holder gets a piece before any gets a second one; spare ones get none."""
    _, effects = begin(share(3, 1, 2, pieces=9, active=2))
    assert reads(effects) == [(0, 0, 3), (0, 1, 1), (0, 2, 3), (0, 3, 1)]


def test_fewer_pieces_than_holders_leave_some_idle() -> None:
    """No piece is read twice to keep everybody busy."""
    _, effects = begin(share(0, 1, 2, pieces=2, active=3))
    assert reads(effects) == [(0, 0, 0), (0, 1, 1)]


def test_a_slow_holder_takes_fewer_pieces() -> None:
    """Holder 0 returns one piece for every four that holder 1 returns."""
    pull, effects = begin(share(0, 1, pieces=40, active=2))
    flying = {Rank(0): deque(), Rank(1): deque()}
    taken: Counter[int] = Counter()
    turn = 0
    while effects != [Finish(ok=True)]:
        for _, piece, source in reads(effects):
            flying[Rank(source)].append(piece)
            taken[source] += 1
        turn += 1
        source = Rank(0) if (turn % 5 == 0 and flying[Rank(0)]) or not flying[Rank(1)] else Rank(1)
        effects = pull.read(0, flying[source].popleft(), source, None)
    assert sum(taken.values()) == 40
    assert 8 <= taken[0] <= 10


def test_a_failed_part_is_read_from_the_next_holder() -> None:
    """Only that part, and the pull still ends well."""
    pull = reading()
    assert pull.read(0, 0, Rank(0), "peer gone") == [Read(0, 0, Rank(2))]
    assert pull.read(1, 0, Rank(1), None) == []
    assert pull.read(0, 0, Rank(2), None) == [Finish(ok=True)]
    assert pull.completed("held") == [Ended(None)]
    assert pull.failovers == 1


def test_a_failed_piece_is_read_next_and_a_spare_steps_in() -> None:
    """What has landed stays; the holder that failed gets nothing any more."""
    pull, effects = begin(share(0, 1, 2, pieces=6, active=2), window=1)
    assert reads(effects) == [(0, 0, 0), (0, 1, 1)]
    assert reads(pull.read(0, 1, Rank(1), None)) == [(0, 2, 1)]
    assert reads(pull.read(0, 0, Rank(0), "gone")) == [(0, 0, 2)]
    assert reads(pull.read(0, 0, Rank(2), None)) == [(0, 3, 2)]
    assert reads(pull.read(0, 2, Rank(1), None)) == [(0, 4, 1)]
    assert reads(pull.read(0, 4, Rank(1), None)) == [(0, 5, 1)]
    assert pull.read(0, 3, Rank(2), None) == []
    assert pull.read(0, 5, Rank(1), None) == [Finish(ok=True)]


def test_without_a_spare_the_others_take_the_piece() -> None:
    """Also at the very end, when they were idle already."""
    pull, effects = begin(share(0, 1, pieces=2, active=2))
    assert reads(effects) == [(0, 0, 0), (0, 1, 1)]
    assert pull.read(0, 1, Rank(1), None) == []
    assert reads(pull.read(0, 0, Rank(0), "gone")) == [(0, 0, 1)]
    assert pull.read(0, 0, Rank(1), None) == [Finish(ok=True)]


def test_one_holder_that_goes_brings_in_one_spare() -> None:
    """Though it had two pieces in flight; of these, the one that landed is not read again."""
    pull, effects = begin(share(0, 1, 2, pieces=2), window=2)
    assert reads(effects) == [(0, 0, 0), (0, 1, 0)]
    assert reads(pull.read(0, 0, Rank(0), "gone")) == [(0, 0, 1)]
    assert reads(pull.read(0, 1, Rank(0), "gone")) == [(0, 1, 1)]
    assert pull.read(0, 1, Rank(1), None) == []
    assert pull.read(0, 0, Rank(1), None) == [Finish(ok=True)]

    pull, _ = begin(share(0, 1, pieces=2), window=2)
    assert reads(pull.read(0, 0, Rank(0), "gone")) == [(0, 0, 1)]
    assert pull.read(0, 1, Rank(0), None) == []
    assert pull.read(0, 0, Rank(1), None) == [Finish(ok=True)]


def test_without_another_holder_the_pull_fails_after_its_reads_returned() -> None:
    """The first reason is kept; the desk is told, and the pull ends with its answer."""
    pull = reading()
    pull.read(0, 0, Rank(0), "first reason")
    assert pull.read(0, 0, Rank(2), "second reason") == []
    assert pull.state is State.READ
    assert pull.read(1, 0, Rank(1), "third reason") == [Finish(ok=False)]
    assert pull.completed("held") == [Ended("second reason")]


def test_when_all_holders_fail_every_read_in_flight_is_awaited() -> None:
    """Four reads are out when the last holder fails; the pull ends after the fourth."""
    pull, effects = begin(share(0, 1, pieces=8, active=2))
    assert len(effects) == 4
    assert pull.read(0, 0, Rank(0), "gone") == []
    assert pull.read(0, 1, Rank(1), "gone, too") == []
    assert pull.state is State.READ
    assert pull.read(0, 2, Rank(0), None) == []
    assert pull.state is State.READ
    assert pull.read(0, 3, Rank(1), "late") == [Finish(ok=False)]
    assert pull.completed("held") == [Ended("gone, too")]


def test_a_pull_that_has_failed_does_not_fail_over() -> None:
    """What cannot succeed any more is not read again."""
    pull = reading(share(0), share(1, 3))
    assert pull.read(0, 0, Rank(0), "gone") == []
    assert pull.read(1, 0, Rank(1), "gone, too") == [Finish(ok=False)]


def test_a_pull_that_has_failed_takes_no_more_pieces() -> None:
    """Other parts stop where they are."""
    pull, _ = begin(share(0), share(1, pieces=9), window=1)
    assert pull.read(0, 0, Rank(0), "gone") == []
    assert pull.read(1, 0, Rank(1), None) == [Finish(ok=False)]


def test_failing_while_reading_waits_for_the_reads() -> None:
    """Nothing ends a pull whose reads may still write into its blocks."""
    pull = reading()
    assert pull.failed("the desk is gone") == []
    pull.read(0, 0, Rank(0), None)
    assert pull.read(1, 0, Rank(1), None) == [Finish(ok=True)]


@pytest.mark.parametrize("failure", [None, "failed"])
def test_a_repeated_read_event_does_not_stand_for_another_read(failure: str | None) -> None:
    """The holder's other piece is still in flight, and the pull waits for it."""
    pull, effects = begin(share(0, pieces=2))
    assert reads(effects) == [(0, 0, 0), (0, 1, 0)]
    assert pull.read(0, 0, Rank(0), None) == []
    assert pull.read(0, 0, Rank(0), failure) == []
    assert pull.state is State.READ
    assert pull.read(0, 1, Rank(0), None) == [Finish(ok=True)]
    assert pull.failure is None


@pytest.mark.parametrize(
    ("part", "piece", "source"), [(2, 0, 0), (0, 9, 0), (0, 0, 2), (0, 0, 9), (1, 0, 0)]
)
def test_reads_that_were_not_begun_are_passed_over(part: int, piece: int, source: int) -> None:
    """Unknown parts, pieces and holders, and pieces of somebody else."""
    pull = reading()
    for failure in (None, "failed"):
        assert pull.read(part, piece, Rank(source), failure) == []
    assert pull.failure is None
    assert pull.failovers == 0


def test_a_late_event_of_the_first_holder_is_not_one_of_the_second() -> None:
    """The piece is in flight again, from somebody else."""
    pull = reading()
    assert pull.read(0, 0, Rank(0), "gone") == [Read(0, 0, Rank(2))]
    assert pull.read(0, 0, Rank(0), None) == []
    assert pull.read(1, 0, Rank(1), None) == []
    assert pull.state is State.READ
    assert pull.read(0, 0, Rank(2), None) == [Finish(ok=True)]


@pytest.mark.parametrize("steps", [0, 1, 4], ids=["connecting", "opening", "completing"])
def test_failing_elsewhere_ends_the_pull(steps: int) -> None:
    """No reads are out then, so the failure is reported at once, and once."""
    pull = Pull()
    pull.start()
    events = [
        lambda: pull.connected("life", SHARES),
        lambda: pull.answered(opened()),
        lambda: pull.read(0, 0, Rank(0), None),
        lambda: pull.read(1, 0, Rank(1), None),
    ]
    for event in events[:steps]:
        event()
    assert pull.failed("no answer") == [Ended("no answer")]
    assert pull.failed("no answer") == []


def test_an_earlier_failure_outweighs_what_came_of_completing() -> None:
    """The reason that a user sees is the cause, not what followed from it."""
    pull = reading(share(0))
    pull.read(0, 0, Rank(0), "the cause")
    assert pull.failed("no answer") == [Ended("the cause")]
    pull = reading(share(0))
    pull.read(0, 0, Rank(0), "the cause")
    assert pull.completed("expired") == [Ended("the cause")]


def test_a_stale_catalog_is_fetched_anew_once() -> None:
    """Nothing is read with the addresses of an engine that has restarted."""
    pull = Pull()
    pull.start()
    pull.connected("life", SHARES)
    assert pull.answered(opened("next life")) == [Connect(fresh=True)]
    assert pull.connected("next life", (share(5),)) == [Ask()]
    assert pull.answered(opened("next life")) == [Read(0, 0, Rank(5))]


def test_an_engine_that_keeps_restarting_is_given_up() -> None:
    """The second stale catalog in a row ends the pull."""
    pull = Pull()
    pull.start()
    pull.connected("life", SHARES)
    pull.answered(opened("next life"))
    pull.connected("next life", SHARES)
    (ended,) = pull.answered(opened("third life"))
    assert isinstance(ended, Ended)
    assert "restarts" in (ended.failure or "")


@pytest.mark.parametrize("steps", range(6))
def test_events_that_do_not_fit_change_nothing(steps: int) -> None:
    """Late and repeated answers are passed over, in every state."""
    pull = Pull()
    pull.start()
    fitting = [
        lambda: pull.connected("life", (share(0), share(1))),
        lambda: pull.answered(opened()),
        lambda: pull.read(0, 0, Rank(0), None),
        lambda: pull.read(1, 0, Rank(1), None),
        lambda: pull.completed("held"),
    ]
    for event in fitting[:steps]:
        event()
    state = pull.state
    late = {
        State.CONNECT: lambda: pull.connected("other", ()),
        State.OPEN: lambda: pull.answered(opened("other")),
        State.READ: lambda: pull.read(0, 0, Rank(0), "failed"),
        State.COMPLETE: lambda: pull.completed("expired"),
    }
    for fits, event in late.items():
        if fits is not state:
            assert event() == []
            assert pull.state is state
    for event in fitting[steps:]:
        effects = event()
    if steps < len(fitting):
        assert effects == [Ended(None)]
    assert pull.failure is None
