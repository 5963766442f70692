# SPDX-License-Identifier: Apache-2.0
"""Real vLLM on a CPU: what a decode engine says after a handoff is what plain vLLM says."""

from __future__ import annotations

import json
import queue
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhandoff.channel import Client
from kvhandoff.cli.servers import Server, ServerFailed, router_server, wait_ready
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


@pytest.fixture
def router(engines: Engines) -> Iterator[Server]:
    server = router_server(engines.prefill, engines.decode, engines.lab.logs / "router.log")
    server.start()
    try:
        for _ in wait_ready([server], lab.READY_SECONDS):
            pass
        yield server
    finally:
        server.stop()


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
    assert report.counters["held"] == len(FIRST)
    assert report.counters["completed"] == len(FIRST) - 1
    assert report.counters["released"] == 1, "D computes the only token of the shortest prompt"
    assert not set(report.counters) & {"expired", "unclaimed", "late", "unknown", "refused"}
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


def test_several_prompts_in_one_request(engines: Engines, router: Server) -> None:
    """P holds each of them; what nobody can ask for is freed after the first lease."""
    batch = lab.post(router, lab.body_of([]) | {"prompt": FIRST[9:12]})["choices"]
    assert [each["token_ids"] for each in batch] == engines.expected["first"][9:12]
    report = lab.settled(engines.desk, engines.prefill, seconds=lab.FIRST_LEASE + 10)
    assert report.counters["unclaimed"] == 2
    assert not set(report.counters) & {"expired", "late", "unknown"}


def test_clients_that_leave(engines: Engines, router: Server) -> None:
    """200 of them, at any time; nothing stays held, and nobody calls it a fault."""
    rng = random.Random(5)
    clients = [(rng.choice(SECOND[:14]), rng.uniform(0.05, 3.0)) for _ in range(200)]
    before = lab.log_of(engines.prefill).count("within its lease")
    stayed = lab.at_once(lambda client: lab.leave(router, *client), clients)
    assert not all(stayed)
    report = lab.settled(engines.desk, engines.prefill, seconds=lab.FIRST_LEASE + 20)
    assert report.counters.get("expired", 0) == 0
    assert lab.log_of(engines.prefill).count("within its lease") == before


def test_parameters_of_others_cost_only_their_own_request(engines: Engines) -> None:
    """A desk that is none, another engine, ticket or prompt; good ones beside."""
    if engines.model == "mla":
        pytest.skip("with a key none of these gets as far as a desk")
    with socket.create_server((lab.HOST, 0)) as hole:
        good = [lab.prefill(engines.prefill, prompt) for prompt in FIRST[2:12]]
        *mine, other = (lab.prefill(engines.prefill, FIRST[12]) for _ in range(4))
        forged = [
            mine[0] | {"remote_port": hole.getsockname()[1]},
            mine[1] | {"remote_engine_id": "another engine"},
            mine[2] | {"ticket": "f" * 32},
        ]
        asked = [(FIRST[12], params) for params in forged]
        asked += zip(FIRST[2:12], good, strict=True)
        bodies = [lab.body_of(prompt, params) for prompt, params in asked]
        outcomes = lab.at_once(lambda body: lab.ask(engines.decode, body), bodies)
    assert [status for status, _, _ in outcomes[:3]] == [500] * 3
    texts = [text for status, text, _ in outcomes[3:] if status == 200]
    answers = [json.loads(text)["choices"][0]["token_ids"] for text in texts]
    assert answers == engines.expected["first"][2:12]
    assert lab.complete(engines.decode, FIRST[13], other) == engines.expected["first"][13]
    lab.settled(engines.desk, engines.prefill, seconds=lab.FIRST_LEASE + 10)


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
    assert report.counters["unclaimed"] >= 4


def test_prefill_engine_killed_under_waiting_requests(engines: Engines) -> None:
    """Each of them ends soon, in an error, as the policy is to fail; D goes on."""
    unseen = [prompt[::-1] for prompt in SECOND[4:10]]  # of others D may have it all by itself
    params = [lab.prefill(engines.prefill, prompt) for prompt in unseen]
    engines.prefill.signal(signal.SIGKILL)
    bodies = [lab.body_of(*each) for each in zip(unseen, params, strict=True)]
    outcomes = lab.at_once(lambda body: lab.ask(engines.decode, body), bodies)
    assert [status for status, _, _ in outcomes] == [500] * 6
    print("seconds:", [round(seconds, 2) for _, _, seconds in outcomes])
    assert max(seconds for _, _, seconds in outcomes) < 30
    assert lab.complete(engines.decode, FIRST[3]) == engines.expected["first"][3]


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
