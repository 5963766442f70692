# SPDX-License-Identifier: Apache-2.0
"""Real vLLM on a CPU: engines of different parallel sizes hand off to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from kvhandoff.cli.servers import Server
from kvhandoff.ids import Endpoint
from tests.vllm import lab

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")
pytest.importorskip("kvhandoff_cpu_lab", reason="tools/cpu_lab is not installed (make setup)")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

TP2 = ("--tensor-parallel-size", "2")
PP2 = ("--pipeline-parallel-size", "2")
PROMPTS = lab.FIRST[2:18:3] + lab.SECOND[4:18:4]


@dataclass
class Pair:
    """The two engines that run; one of them is exchanged between tests."""

    bench: lab.Bench
    expected: list[list[int]]
    stack: ExitStack
    prefill: Server | None = None
    desk: Endpoint | None = None
    decode: Server | None = None

    def run_prefill(self, name: str, pcp: int, *arguments: str) -> None:
        if self.prefill is not None:
            self.prefill.stop()
        self.prefill, self.desk = self.bench.lab.prefill(name, pcp, *arguments)
        self.stack.callback(self.prefill.stop)

    def run_decode(self, name: str, *arguments: str) -> None:
        if self.decode is not None:
            self.decode.stop()
        self.decode = self.bench.lab.decode(name, *arguments)
        self.stack.callback(self.decode.stop)

    def check(self) -> None:
        """Tokens are plain vLLM's, every request was read, nothing is left."""
        assert self.prefill is not None
        assert self.desk is not None
        assert self.decode is not None
        lab.start(self.prefill, self.decode)
        prefill, decode = self.prefill, self.decode
        answers = lab.at_once(lambda prompt: lab.hand_off(prefill, decode, prompt), PROMPTS)
        assert answers == self.expected
        report = lab.settled(self.desk, prefill)
        ended = {name: report.counters.get(name, 0) for name in ("completed", "released")}
        assert sum(ended.values()) == report.counters["held"], report.counters
        assert ended["completed"] > 0
        assert not set(report.counters) & {"expired", "late", "unknown"}


@pytest.fixture(scope="module", params=["mla", "qwen3"])
def pair(request: pytest.FixtureRequest, benches: Callable[[str], lab.Bench]) -> Iterator[Pair]:
    bench = benches(request.param)
    expected = bench.expected["first"][2:18:3] + bench.expected["second"][4:18:4]
    with ExitStack() as stack:
        yield Pair(bench, expected, stack)


def test_prefill_tp2_to_decode_tp1(pair: Pair) -> None:
    pair.run_prefill("prefill-tp2", 1, *TP2)
    pair.run_decode("decode-tp1", "--no-enable-prefix-caching")
    pair.check()


def test_prefill_pp2_to_decode_tp1(pair: Pair) -> None:
    pair.run_prefill("prefill-pp2", 1, *PP2)
    pair.check()


def test_prefill_pcp2_tp2_to_decode_tp1(pair: Pair) -> None:
    pair.run_prefill("prefill-pcp2-tp2", 2, *TP2)
    pair.check()


def test_prefill_pcp2_tp2_to_decode_tp2(pair: Pair) -> None:
    pair.run_decode("decode-tp2", "--no-enable-prefix-caching", *TP2)
    pair.check()


def test_prefill_tp1_to_decode_tp2(pair: Pair) -> None:
    pair.run_prefill("prefill-tp1", 1)
    pair.check()
