# SPDX-License-Identifier: Apache-2.0
"""Mooncake uses the protocol that was asked for, or the engine does not start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.transport import mooncake

HOST = "127.0.0.1"


class Engine:
    """What this package uses of a TransferEngine that finds the cards named here."""

    cards: tuple[str, ...] = ()

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        return 0

    def get_local_topology(self) -> str:
        return json.dumps({"cpu:0": [list(self.cards), []], "cuda:0": [[], list(self.cards)]})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine without cards, and an environment that says nothing."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(mooncake, "_engine_class", lambda: Engine)
    monkeypatch.setattr(Engine, "cards", ())
    return Engine


def test_tcp_is_forced(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Mooncake takes any RDMA card that it finds."""
    monkeypatch.setenv("MC_FORCE_TCP", "")
    mooncake.MooncakeTransport(HOST, "tcp")
    assert mooncake.os.environ["MC_FORCE_TCP"] == "1"


def test_a_port_that_was_taken_meanwhile_is_tried_again(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that start together race for Mooncake's ports."""
    outcomes = iter([RuntimeError("bind: Address already in use"), -1, 0])

    def initialize(*args: str) -> int:
        outcome = next(outcomes)
        if isinstance(outcome, RuntimeError):
            raise outcome
        return outcome

    monkeypatch.setattr(engine, "initialize", initialize)
    mooncake.MooncakeTransport(HOST, "tcp")
    assert next(outcomes, None) is None


def test_an_engine_that_never_starts_is_refused(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what Mooncake says."""
    monkeypatch.setattr(mooncake.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(engine, "initialize", lambda *args: -1)
    with pytest.raises(UnsupportedSetup, match="found code -1 for host"):
        mooncake.MooncakeTransport(HOST, "tcp")


@pytest.mark.parametrize("device", ["", "mlx5_1", "mlx5_0,mlx5_1"])
def test_rdma_with_its_cards_starts(
    engine: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Any card, or all of those that were named."""
    monkeypatch.setattr(engine, "cards", ("mlx5_0", "mlx5_1"))
    mooncake.MooncakeTransport(HOST, "rdma", device)


@pytest.mark.parametrize(
    ("cards", "device", "forced", "told"),
    [
        ((), "", "", "RDMA cards []"),
        (("mlx5_0",), "mlx5_1", "", "RDMA cards ['mlx5_0'], expected mlx5_1"),
        (("mlx5_0",), "", "1", "MC_FORCE_TCP in the environment"),
    ],
)
def test_rdma_without_its_cards_is_refused(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    cards: tuple[str, ...],
    device: str,
    forced: str,
    told: str,
) -> None:
    """Mooncake alone would fall back to TCP without a word."""
    monkeypatch.setattr(engine, "cards", cards)
    if forced:
        monkeypatch.setenv("MC_FORCE_TCP", forced)
    with pytest.raises(UnsupportedSetup, match="would not use RDMA") as refusal:
        mooncake.MooncakeTransport(HOST, "rdma", device)
    assert told in str(refusal.value)
