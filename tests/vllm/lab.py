# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers for tests: one prefill and one decode engine at a time, tiny models."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvhandoff.cli.servers import HOST, Server, free_port, http, vllm_server, wait_ready
from kvhandoff.cli.status import fetch_status
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import StatusReport
from kvhandoff.protocol.trust import KEY_VARIABLE, Trust

READY_SECONDS = 420.0
NEW_TOKENS = 5
LEASE = 60.0
FIRST_LEASE = 20.0
PATIENT = {"handshake_timeout": 20.0, "answer_timeout": 20.0}
"""Two engines on two cores can keep a desk waiting for longer than the defaults allow."""
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 129, 200, 300, 700)

Params = dict[str, Any]


def prompts(offset: int, *, shared: int = 0) -> list[list[int]]:
    """18 prompts of many lengths; the first ``shared`` tokens of the longer ones do not depend on
    ``offset``, so that two sets share a prefix."""
    made = []
    for number, length in enumerate(LENGTHS):
        common = shared if length > shared else 0
        made.append(
            [
                ((number if j < common else number * 7 + offset) * 11 + j * 37) % 250
                for j in range(length)
            ]
        )
    return made


@dataclass
class Lab:
    """Starts servers of one model."""

    model: Path
    logs: Path
    environment: Mapping[str, str]
    block_size: int | None
    dtype: str = "float32"

    def server(
        self, name: str, transfer: Mapping[str, object] | None = None, *arguments: str
    ) -> Server:
        common = [
            "--served-model-name", "m", "--enforce-eager", "--dtype", self.dtype,
            "--max-model-len", "1024", "--max-num-seqs", "18",
            "--num-gpu-blocks-override", "512",
        ]  # fmt: skip
        if self.block_size is not None:
            common += ["--block-size", str(self.block_size)]
        return vllm_server(
            name,
            self.model,
            self.logs / f"{name}.log",
            transfer=transfer,
            arguments=[*common, *arguments],
            environment=self.environment,
        )

    def prefill(
        self, name: str, pcp: int, *arguments: str, desk: int | None = None, **transfer: object
    ) -> tuple[Server, Endpoint]:
        """A prefill engine and the address of its desk."""
        port = desk or free_port()
        config = {
            "kv_connector": "KVHandoffConnector",
            "kv_role": "kv_producer",
            "kv_port": port,
            # Nothing renews before a request has reached D's scheduler, and steps are slow here.
            "kv_connector_extra_config": {"lease": LEASE, "first_lease": FIRST_LEASE, **PATIENT},
        } | transfer
        server = self.server(name, config, "--prefill-context-parallel-size", str(pcp), *arguments)
        return server, Endpoint(HOST, port)

    def decode(self, name: str, *arguments: str, **transfer: object) -> Server:
        config = {
            "kv_connector": "KVHandoffConnector",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": PATIENT,
        } | transfer
        return self.server(name, config, *arguments)


FIRST = prompts(0, shared=64)
SECOND = prompts(1000, shared=64)
"""Two sets that share the first 64 tokens of their longer prompts."""

ALIKE = [[(j * 37 + max(0, j - 400) * n) % 250 for j in range(450 + 50 * n)] for n in range(4)]
"""Four prompts that share their first 401 tokens, which is more than a block of any model here."""

SETS = {"first": FIRST, "second": SECOND, "alike": ALIKE}


@dataclass(frozen=True)
class Plain:
    """What plain vLLM answers to one prompt.

    Attributes:
        ids: greedy token ids.
        sure: how many of them, from the first one on, are so far ahead of the second best token
            that rounding cannot have chosen them. What follows a token that could as well have
            been another one says nothing about the cache.
    """

    ids: list[int]
    sure: int


DOUBT = {"float32": 0.0, "bfloat16": 0.2}
"""Least lead, in logprob, of a token that counts. In bfloat16, logits of the lab's models are
multiples of 1/32, and another order of the same additions (a prompt computed in two steps instead
of one) moves them by several of these."""


@dataclass
class Bench:
    """A model in the lab, with what plain vLLM answers to all sets of prompts.

    Attributes:
        server: plain vLLM, which may start beside others; it is asked and stopped when its answers
            are needed for the first time.
    """

    lab: Lab
    name: str
    server: Server

    @functools.cached_property
    def plain(self) -> dict[str, list[Plain]]:
        """Plain vLLM's answers by name of a set."""
        doubt = DOUBT[self.lab.dtype]
        try:
            start(self.server)
            return {
                name: at_once(lambda prompt: ask_plain(self.server, prompt, doubt), prompts)
                for name, prompts in SETS.items()
            }
        finally:
            self.server.stop()

    @property
    def expected(self) -> dict[str, list[list[int]]]:
        """Token ids of all plain answers."""
        return {name: [each.ids for each in answers] for name, answers in self.plain.items()}

    def check(self, answers: Sequence[list[int]], name: str) -> None:
        """Answers to the prompts of a set are plain vLLM's, as far as those are sure."""
        plain = self.plain[name]
        sure = sum(each.sure for each in plain)
        assert sure >= len(plain) * NEW_TOKENS // 3, f"only {sure} tokens of plain vLLM are sure"
        assert [ids[: each.sure] for ids, each in zip(answers, plain, strict=True)] == [
            each.ids[: each.sure] for each in plain
        ]


def start(*servers: Server) -> None:
    """Start those that do not run yet, and wait until all are ready."""
    for server in servers:
        if server.process is None:
            server.start()
    for server, _ in wait_ready(servers, READY_SECONDS):
        complete(server, [1, 2, 3])  # the first step of a CPU engine takes many seconds


def post(server: Server, body: Mapping[str, object], timeout: float = 300.0) -> dict[str, Any]:
    response = http().post(f"{server.url}/v1/completions", json=body, timeout=timeout)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _body(prompt: Sequence[int], tokens: int) -> dict[str, object]:
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def body_of(prompt: Sequence[int], params: Params | None = None) -> dict[str, object]:
    """What a client sends, or with parameters what a router sends to D."""
    body = _body(prompt, NEW_TOKENS)
    return body if params is None else body | {"kv_transfer_params": params}


def log_of(server: Server) -> str:
    """What a server has said so far."""
    return server.log.read_text(errors="replace")


def complete(
    server: Server, prompt: Sequence[int], params: Params | None = None, tokens: int = NEW_TOKENS
) -> list[int]:
    """Greedy token ids."""
    body = _body(prompt, tokens)
    if params is not None:
        body["kv_transfer_params"] = params
    ids: list[int] = post(server, body)["choices"][0]["token_ids"]
    assert len(ids) == tokens
    return ids


def ask_plain(server: Server, prompt: Sequence[int], doubt: float) -> Plain:
    """Greedy token ids, and how many of them lead by ``doubt``."""
    body = _body(prompt, NEW_TOKENS) | {"logprobs": 2, "return_tokens_as_token_ids": True}
    choice = post(server, body)["choices"][0]
    leads = []
    for best in choice["logprobs"]["top_logprobs"]:
        first, second = sorted(best.values(), reverse=True)[:2]
        leads.append(first - second)
    sure = next((n for n, lead in enumerate(leads) if lead < doubt), NEW_TOKENS)
    return Plain(choice["token_ids"], sure)


def ask(server: Server, body: Mapping[str, object]) -> tuple[int, str, float]:
    """Whatever comes of a completion: status, text, and seconds until it came."""
    began = time.monotonic()
    response = http().post(f"{server.url}/v1/completions", json=body, timeout=300.0)
    return response.status_code, response.text, time.monotonic() - began


def leave(server: Server, prompt: Sequence[int], seconds: float) -> bool:
    """Ask, and hang up after a while. Whether the answer was quicker."""
    try:
        http().post(f"{server.url}/v1/completions", json=_body(prompt, 40), timeout=seconds)
    except httpx.TimeoutException:
        return False
    return True


def prefill(server: Server, prompt: Sequence[int]) -> Params:
    """Let a prefill engine compute and hold a prompt."""
    body = _body(prompt, 1) | {
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}
    }
    params: Params = post(server, body)["kv_transfer_params"]
    assert params["do_remote_prefill"]
    return params


def hand_off(p: Server, d: Server, prompt: Sequence[int]) -> list[int]:
    return complete(d, prompt, prefill(p, prompt))


def route(router: Server, prompt: Sequence[int]) -> list[int]:
    """Greedy token ids by way of vllm-router, which asks P and then D."""
    ids: list[int] = post(router, _body(prompt, NEW_TOKENS))["choices"][0]["token_ids"]
    assert len(ids) == NEW_TOKENS
    return ids


def at_once(function: Any, items: Sequence[Any]) -> list[Any]:
    """Call for all items concurrently, so that the engines batch them."""
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items))


def kv_usage(server: Server) -> float:
    return server.metric("vllm:kv_cache_usage_perc")


def wait_for(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.2)


def settled(desk: Endpoint, server: Server, seconds: float = 15.0) -> StatusReport:
    """The desk's books once nothing is held and the engine's cache is empty."""
    key = key_of(server)
    wait_for(lambda: fetch_status(desk, key=key).held == 0, seconds, "the desk holds nothing")
    wait_for(lambda: kv_usage(server) == 0, seconds, "prefill engine's KV usage 0")
    return fetch_status(desk, key=key)


def key_of(server: Server) -> bytes | None:
    """The shared key that an engine was started with."""
    return Trust(server.environment.get(KEY_VARIABLE, "")).key
