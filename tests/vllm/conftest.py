# SPDX-License-Identifier: Apache-2.0
"""What plain vLLM answers is computed once for each model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.vllm import lab

BLOCK_SIZE = {"mla": 16, "qwen3": 32}


@pytest.fixture(scope="session")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], lab.Bench]:
    """Makes a model and asks a server without any connector about it, once per session."""
    from kvhandoff_cpu_lab.environment import cpu_environment
    from kvhandoff_cpu_lab.models import MAKERS

    @functools.cache
    def bench(name: str) -> lab.Bench:
        home = tmp_path_factory.mktemp(name)
        MAKERS[name](home / "model")
        laboratory = lab.Lab(home / "model", home / "logs", cpu_environment(), BLOCK_SIZE[name])
        plain = laboratory.server("plain")
        try:
            lab.start(plain)
            expected = {
                key: lab.at_once(lambda prompt: lab.complete(plain, prompt), prompts)
                for key, prompts in (("first", lab.FIRST), ("second", lab.SECOND))
            }
        finally:
            plain.stop()
        return lab.Bench(laboratory, name, expected)

    return bench
