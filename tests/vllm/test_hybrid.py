# SPDX-License-Identifier: Apache-2.0
"""Real vLLM on a CPU, asked by way of vllm-router: models whose layers look back differently.

Gemma3-like: a sliding window and full attention. Qwen3-Next-like: a recurrent state and full
attention. Both run under the name that vllm-ascend has for such models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from kvhandoff.cli.servers import Server, router_server, wait_ready
from kvhandoff.ids import Endpoint
from tests.vllm import lab
from tests.vllm.lab import ALIKE, FIRST, SECOND

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")
pytest.importorskip("kvhandoff_cpu_lab", reason="tools/cpu_lab is not installed (make setup)")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

HYBRID = {
    "kv_connector": "MooncakeHybridConnector",
    "kv_connector_module_path": "kvhandoff.vllm.connector",
}
PCP = {"gemma3": 2, "qwen3_next": 1}
"""Replicas of the first prefill engine; vLLM runs no recurrent layers with PCP."""
CACHING = ("--enable-prefix-caching",)


@dataclass
class Engines:
    """A prefill and a decode engine with a router before them."""

    bench: lab.Bench
    prefill: Server
    desk: Endpoint
    decode: Server
    stack: ExitStack

    def route(self, prompts: list[list[int]]) -> list[list[int]]:
        """Tokens of all prompts, asked at once by way of a router of their own."""
        router = router_server(self.prefill, self.decode, self.bench.lab.logs / "router.log")
        router.start()
        try:
            for _ in wait_ready([router], lab.READY_SECONDS):
                pass
            return lab.at_once(lambda prompt: lab.route(router, prompt), prompts)
        finally:
            router.stop()


@pytest.fixture(scope="module", params=["gemma3", "qwen3_next"])
def engines(
    request: pytest.FixtureRequest, benches: Callable[[str], lab.Bench]
) -> Iterator[Engines]:
    bench = benches(request.param)
    with ExitStack() as stack:
        prefill, desk = bench.lab.prefill("prefill", PCP[bench.name], **HYBRID)
        decode = bench.lab.decode("decode", *CACHING, **HYBRID)
        for server in (prefill, decode):
            stack.callback(server.stop)
        lab.start(prefill, decode)
        yield Engines(bench, prefill, desk, decode, stack)


def test_plain_answers_vary(engines: Engines) -> None:
    """Otherwise equality below would show nothing."""
    assert len({tuple(ids) for ids in engines.bench.expected["first"]}) >= 15


def test_tokens_equal_plain_vllm(engines: Engines) -> None:
    """Prompts around block and window borders; usage of P and of its desk ends at nothing."""
    engines.bench.check(engines.route(FIRST), "first")
    report = lab.settled(engines.desk, engines.prefill)
    counters = report.counters
    assert counters["held"] == counters["completed"] + counters.get("released", 0) == len(FIRST)
    assert counters["completed"] >= len(FIRST) - 1
    assert not set(counters) & {"expired", "late", "unknown", "refused"}


def test_tokens_equal_plain_vllm_where_decode_has_computed_a_prefix(engines: Engines) -> None:
    """D reads only what it lacks of prompts that begin like one of its own."""
    if engines.bench.name == "gemma3":
        pytest.skip("of a window, vLLM caches only where it expects another prompt to go on")
    lab.complete(engines.decode, ALIKE[0])
    hits = engines.decode.metric("vllm:prefix_cache_hits_total")
    answers = [engines.bench.expected["alike"][0], *engines.route(ALIKE[1:])]
    engines.bench.check(answers, "alike")
    assert engines.decode.metric("vllm:prefix_cache_hits_total") > hits
    lab.settled(engines.desk, engines.prefill)


def test_tokens_equal_plain_vllm_where_decode_has_read_a_prefix(engines: Engines) -> None:
    """The second set shares its first 64 tokens with the first, which D has read."""
    if engines.bench.name == "qwen3_next":
        pytest.skip("what is read of a state is that of a whole prompt, with which no other begins")
    hits = engines.decode.metric("vllm:prefix_cache_hits_total")
    engines.bench.check(engines.route(SECOND), "second")
    assert engines.decode.metric("vllm:prefix_cache_hits_total") > hits
    lab.settled(engines.desk, engines.prefill)


def test_tokens_equal_plain_vllm_with_pcp1(engines: Engines) -> None:
    """Another prefill engine with a single replica, on the same ports; D is not touched."""
    if PCP[engines.bench.name] == 1:
        pytest.skip("the tests before ran with a single replica")
    engines.prefill.stop()
    prefill, desk = engines.bench.lab.prefill("prefill-pcp1", 1, desk=engines.desk.port, **HYBRID)
    engines.stack.callback(prefill.stop)
    lab.start(prefill)
    engines.prefill, engines.desk = prefill, desk
    engines.bench.check(engines.route(FIRST), "first")
    report = lab.settled(desk, prefill)
    assert report.counters.get("expired", 0) == 0
