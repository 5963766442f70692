# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU computes the same tokens with and without prefill context parallelism.

The tests of the connector compare tokens between differently split servers. They mean something
only if the split by itself changes no token, which is what is shown here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("vllm", "kvhandoff_cpu_lab")),
        reason="needs vLLM's CPU wheel and tools/cpu_lab",
    ),
]

START_TIMEOUT_S = 300
MAX_TOKENS = 12
# Shorter than the number of chunks that two ranks cut a prompt into, within one block, over
# several blocks of either size (16 and 128), and long enough to fill many.
PROMPT_LENGTHS = (1, 3, 40, 300, 1100)


class Server:
    """A running server, seen through its HTTP interface."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        """Whether the server answers its health check."""
        try:
            urllib.request.urlopen(self._url + "/health", timeout=5).close()
        except OSError:
            return False
        return True

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON request and return the JSON answer."""
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    def complete(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy completions, as token ids: the text of a random model loses bytes."""
        answer = self.post(
            "/v1/completions",
            {
                "model": "m",
                "prompt": prompts,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        return [choice["token_ids"] for choice in answer["choices"]]

    def chat(self, question: str) -> str:
        """The greedy answer to one question, through the model's chat template."""
        answer = self.post(
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            },
        )
        return answer["choices"][0]["message"]["content"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serve(model: Path, log: Path, pcp: int) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it at the end."""
    from kvhandoff_cpu_lab.environment import cpu_environment

    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "m", "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "16", "--num-gpu-blocks-override", "512"]
    command += ["--prefill-context-parallel-size", str(pcp)]
    environment = {**os.environ, **cpu_environment()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        server = Server(port)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.is_ready():
            tail = log.read_text(errors="replace")[-4000:]
            assert process.poll() is None, f"the server ended during its start:\n{tail}"
            assert time.monotonic() < deadline, f"the server did not start in time:\n{tail}"
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(model: Path, log: Path, pcp: int) -> dict[str, Any]:
    """What a server answers to prompts one at a time, in one batch, and in a chat."""
    generator = random.Random(1)
    alone, batch = (
        [[generator.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]
        for _ in range(2)
    )
    with serve(model, log, pcp) as server:
        return {
            "alone": [server.complete([prompt])[0] for prompt in alone],
            "batch": server.complete(batch),
            "chat": server.chat("What is the capital of France?"),
        }


@pytest.mark.timeout(4 * START_TIMEOUT_S)
@pytest.mark.parametrize("name", ["mla", "qwen3"])
def test_context_parallel_prefill_changes_no_token(name: str, tmp_path: Path) -> None:
    """Two ranks that share the prompts give the tokens of one rank that computes them whole."""
    from kvhandoff_cpu_lab.models import MAKERS

    model = MAKERS[name](tmp_path / name)
    whole = _answers(model, tmp_path / "pcp1.log", pcp=1)
    split = _answers(model, tmp_path / "pcp2.log", pcp=2)

    assert split == whole
    # Equal answers prove nothing if the model answers everything alike.
    outputs = whole["alone"] + whole["batch"]
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)
    assert sum(len(set(tokens)) for tokens in outputs) > len(outputs) * MAX_TOKENS / 2


@pytest.mark.parametrize("name", ["mla", "qwen3", "gemma3", "qwen3_next"])
def test_model_files_are_reproducible(name: str, tmp_path: Path) -> None:
    """Every machine makes the same bytes, and a model that is there is left alone."""
    from kvhandoff_cpu_lab.models import MAKERS

    first = MAKERS[name](tmp_path / "first")
    second = MAKERS[name](tmp_path / "second")
    written = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}

    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }
    MAKERS[name](tmp_path / "first")
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == written
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


@pytest.mark.parametrize(("variable", "gpu"), [("0", False), ("1", False), ("1", True)])
def test_triton_backend_is_active_only_when_interpreting_without_gpu(
    variable: str, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An active backend beside a GPU's would make Triton fail there."""
    import torch
    from triton.backends import backends

    monkeypatch.setenv("TRITON_INTERPRET", variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert backends["cpu"].driver.is_active() is (variable == "1" and not gpu)
