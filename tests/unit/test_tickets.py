# SPDX-License-Identifier: Apache-2.0
"""One ticket, several requests: one pulls, and whoever is left can take over."""

from __future__ import annotations

import pytest

from kvhandoff.ids import MAX_NAME_LENGTH, Ticket, short_name
from kvhandoff.lifecycle import tickets as module
from kvhandoff.lifecycle.tickets import Tickets, Turn

T = Ticket("t")


def test_the_first_one_is_told_apart() -> None:
    """Its renewals begin with it."""
    tickets = Tickets()
    assert tickets.join(T, "a")
    assert not tickets.join(T, "b")


def test_turns() -> None:
    """Everybody may pull until somebody does; then the others wait until it has ended."""
    tickets = Tickets()
    for name in ("a", "b"):
        tickets.join(T, name)
        assert tickets.turn(T, name) is Turn.PULL
    tickets.pull(T, "a")
    assert tickets.turn(T, "b") is Turn.WAIT
    assert not tickets.leave(T, "a")
    assert tickets.turn(T, "b") is Turn.PULL
    tickets.pull(T, "b")
    tickets.read(T)
    assert tickets.turn(T, "b") is Turn.COMPUTE
    assert not tickets.join(T, "c")
    assert tickets.turn(T, "c") is Turn.COMPUTE
    assert len(tickets) == 0


def test_the_last_one_releases() -> None:
    """Once, whoever it is."""
    tickets = Tickets()
    for name in ("a", "b"):
        tickets.join(T, name)
    tickets.pull(T, "a")
    assert not tickets.leave(T, "b")
    assert tickets.leave(T, "a")
    assert not tickets.leave(T, "a")


def test_spent_tickets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten; pulling one again is refused by the desk."""
    monkeypatch.setattr(module, "MAX_SPENT", 2)
    tickets = Tickets()
    for name in ("1", "2", "3"):
        tickets.join(Ticket(name), "r")
        tickets.read(Ticket(name))
    assert tickets.join(Ticket("1"), "r")
    assert not tickets.join(Ticket("3"), "r")


def test_names_fit_into_messages() -> None:
    """Short ids are their own names; long ones that begin alike have different names."""
    assert short_name("r" * MAX_NAME_LENGTH) == "r" * MAX_NAME_LENGTH
    names = {short_name("r" * MAX_NAME_LENGTH + end) for end in ("a", "b", "\ud800")}
    assert len(names) == 3
    assert max(map(len, names)) <= MAX_NAME_LENGTH
