# SPDX-License-Identifier: Apache-2.0
"""Real vLLM on a CPU: what a decode engine says after a handoff is what plain vLLM says."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhandoff.channel import Client
from kvhandoff.cli.servers import Server, ServerFailed
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import HeldKey, Open, Opened, Release
from tests.vllm import lab
from tests.vllm.lab import FIRST, SECOND

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")
models = pytest.importorskip("kvhandoff_cpu_lab.models")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@dataclass
class Engines:
    """What the tests of one model share, in the order in which they run."""

    lab: lab.Lab
    model: str
    expected: dict[str, list[list[int]]]
    prefill: Server
    desk: Endpoint
    decode: Server
    stack: ExitStack


@pytest.fixture(scope="module", params=["mla", "qwen3"])
def engines(
    request: pytest.FixtureRequest, benches: Callable[[str], lab.Bench]
) -> Iterator[Engines]:
    bench = benches(request.param)
    with ExitStack() as stack:
        prefill, desk = bench.lab.prefill("prefill-pcp2", 2)
        decode = bench.lab.decode("decode")
        for server in (prefill, decode):
            stack.callback(server.stop)
        lab.start(prefill, decode)
        yield Engines(bench.lab, bench.name, bench.expected, prefill, desk, decode, stack)


def test_plain_answers_vary(engines: Engines) -> None:
    """Otherwise equality below would show nothing."""
    assert len({tuple(ids) for ids in engines.expected["first"]}) >= 15


def test_tokens_equal_plain_vllm_with_pcp2(engines: Engines) -> None:
    """Short, longer than a block, long; all at once, so that both engines batch them."""
    answers = lab.at_once(
        lambda prompt: lab.hand_off(engines.prefill, engines.decode, prompt), FIRST
    )
    assert answers == engines.expected["first"]
    assert engines.decode.metric("vllm:external_prefix_cache_hits_total") > 0


def test_everything_is_read_once_and_freed(engines: Engines) -> None:
    report = lab.settled(engines.desk, engines.prefill)
    assert report.counters["held"] == report.counters["completed"] == len(FIRST)
    assert not set(report.counters) & {"expired", "late", "unknown", "refused", "released"}
    assert {reader.replica for record in report.recent for reader in record.readers} == {0, 1}
    requests = [record.request for record in report.recent]
    assert len(requests) == len(set(requests))


def test_block_count_is_not_divided_by_pcp(engines: Engines) -> None:
    """65 tokens are ceil(65 / block size) blocks, however many replicas there are."""
    params = lab.prefill(engines.prefill, FIRST[10])
    assert len(FIRST[10]) == 65
    key = HeldKey(params["remote_request_id"], params["ticket"])
    client = Client(key=lab.key_of(engines.prefill))
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    try:
        client.ask(engines.desk, Open(key, "count", 0, 1), 10, answers.put)
        opened = answers.get(timeout=15)
        assert isinstance(opened, Opened), opened
        client.ask(engines.desk, Release(key, "count"), 10, answers.put)
        answers.get(timeout=15)
    finally:
        client.close()
    assert len(opened.blocks[0]) == {16: 5, 32: 3}[engines.lab.block_size]
    lab.settled(engines.desk, engines.prefill)


def test_decode_engine_killed_and_replaced(engines: Engines) -> None:
    """Requests in flight are lost with their engine; the next one's are right, nothing leaks."""
    if engines.model != "mla":
        pytest.skip("one model shows it, a restart takes a minute")
    for prompt in SECOND[:4]:
        lab.prefill(engines.prefill, prompt)  # held for nobody
    in_flight = lab.prefill(engines.prefill, FIRST[-1])
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def ask_and_lose() -> None:
        try:
            answers.put(lab.complete(engines.decode, FIRST[-1], in_flight, tokens=200))
        except Exception as error:  # noqa: BLE001 - the server is killed under the request
            answers.put(error)

    thread = threading.Thread(target=ask_and_lose)
    thread.start()
    lab.wait_for(lambda: engines.decode.metric("vllm:num_requests_running") > 0, 30, "request runs")
    engines.decode.signal(signal.SIGKILL)
    thread.join(60)
    assert isinstance(answers.get(timeout=1), Exception)
    engines.decode = engines.lab.decode("decode-2")
    engines.stack.callback(engines.decode.stop)
    lab.start(engines.decode)
    answers_again = [lab.hand_off(engines.prefill, engines.decode, prompt) for prompt in FIRST[:10]]
    assert answers_again == engines.expected["first"][:10]
    report = lab.settled(engines.desk, engines.prefill, seconds=lab.LEASE + 5)
    assert report.counters["expired"] >= 4


def test_tokens_equal_plain_vllm_with_pcp1(engines: Engines) -> None:
    """Another prefill engine on the same ports, under the name that vllm-ascend uses.

    D is not touched: it finds out by itself that the desk belongs to another engine now. The two
    sets of prompts share a prefix, so that D has hits where it caches prefixes (GQA).
    """
    engines.prefill.stop()
    prefill, desk = engines.lab.prefill(
        "prefill-pcp1",
        1,
        desk=engines.desk.port,
        kv_connector="MooncakeConnectorV1",
        kv_connector_module_path="kvhandoff.vllm.connector",
    )
    engines.stack.callback(prefill.stop)
    lab.start(prefill)
    answers = lab.at_once(lambda prompt: lab.hand_off(prefill, engines.decode, prompt), SECOND)
    assert answers == engines.expected["second"]
    report = lab.settled(desk, prefill)
    assert report.counters["completed"] + report.counters.get("released", 0) == len(SECOND)
    assert report.counters.get("expired", 0) == 0


def test_consumer_with_pcp_is_refused_in_one_sentence(tmp_path: Path) -> None:
    from kvhandoff_cpu_lab.environment import cpu_environment

    path = tmp_path / "model"
    models.MAKERS["mla"](path)
    server = lab.Lab(path, tmp_path, cpu_environment(), 16).decode(
        "decode-pcp2", "--prefill-context-parallel-size", "2"
    )
    try:
        with pytest.raises(ServerFailed) as failure:
            lab.start(server)
    finally:
        server.stop()
    assert "a decode engine cannot use prefill context parallelism: found" in str(failure.value)
    assert "remove --prefill-context-parallel-size from the decode engine" in str(failure.value)
