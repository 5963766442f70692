# SPDX-License-Identifier: Apache-2.0
"""Which replica a consumer reads: by request, or by what it is reading already."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvhandoff.ids import EngineId
from kvhandoff.plan.replicas import ReplicaChooser
from kvhandoff.plan.routing import replica_for_request

P, OTHER = EngineId("p"), EngineId("other")


@pytest.mark.parametrize("policy", ["request", "stripe"])
def test_by_request_id_only(policy) -> None:
    """Both agree with each other whatever is under way, and keep nothing in mind."""
    chooser = ReplicaChooser(policy)
    for number in range(100):
        request = f"r{number}"
        assert chooser.choose(P, request, 4, 1000) == replica_for_request(request, 4)
    assert len(chooser) == 0
    chooser.done(P, 0, 1000)
    assert len(chooser) == 0


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_equal_load_follows_the_request_id(replicas: int) -> None:
    """An idle consumer chooses as all others do, so that idle ones spread, too."""
    for number in range(100):
        request = f"r{number}"
        chooser = ReplicaChooser("least-loaded")
        assert chooser.choose(P, request, replicas, 10) == replica_for_request(request, replicas)


@pytest.mark.parametrize("replicas", [2, 4])
def test_load_evens_out(replicas: int) -> None:
    """No replica is ahead of another by more than one prompt."""
    rng = random.Random(7)
    chooser = ReplicaChooser("least-loaded")
    load: Counter[int] = Counter()
    for number in range(500):
        tokens = rng.randint(1, 1000)
        load[chooser.choose(P, f"r{number}", replicas, tokens)] += tokens
        assert max(load.values()) - min(load[r] for r in range(replicas)) <= 1000


def test_a_busy_replica_is_avoided_until_it_is_done() -> None:
    """One long prompt weighs as much as many short ones."""
    chooser = ReplicaChooser("least-loaded")
    busy = chooser.choose(P, "long", 2, 1000)
    assert {chooser.choose(P, f"r{n}", 2, 100) for n in range(9)} == {1 - busy}
    chooser.done(P, busy, 1000)
    assert chooser.choose(P, "next", 2, 100) == busy


def test_engines_do_not_weigh_on_each_other() -> None:
    """Replica 0 of one engine is another worker than replica 0 of the other one."""
    chooser = ReplicaChooser("least-loaded")
    first = chooser.choose(P, "r", 2, 1000)
    assert chooser.choose(OTHER, "r", 2, 1000) == first


def test_what_is_done_is_forgotten() -> None:
    """The state is as large as what is under way, whatever engines came and went."""
    chooser = ReplicaChooser("least-loaded")
    for number in range(1000):
        engine = EngineId(f"engine {number}")
        replica = chooser.choose(engine, f"r{number}", 4, 10)
        assert len(chooser) == 1
        chooser.done(engine, replica, 10)
    assert len(chooser) == 0
