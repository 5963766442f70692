# SPDX-License-Identifier: Apache-2.0
"""What plain vLLM answers is computed once for each model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvhandoff.protocol.trust import KEY_VARIABLE
from tests.vllm import lab

BLOCK_SIZE = {"mla": 16, "qwen3": 32, "gemma3": 32}
"""Of models where vLLM does not choose it."""

KEYED = {"mla", "gemma3"}
"""Models whose engines have a shared key; the others have none."""

DTYPE = {"qwen3_next": "bfloat16"}
"""Of models whose CPU kernels do not take float32."""


@pytest.fixture(scope="session")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], lab.Bench]]:
    """Makes a model, and starts a server without any connector to be asked about it, once."""
    from kvhandoff_cpu_lab.environment import cpu_environment
    from kvhandoff_cpu_lab.models import MAKERS

    with ExitStack() as stack:

        @functools.cache
        def bench(name: str) -> lab.Bench:
            home = tmp_path_factory.mktemp(name)
            MAKERS[name](home / "model")
            laboratory = lab.Lab(
                home / "model",
                home / "logs",
                cpu_environment() | ({KEY_VARIABLE: "a key of the tests"} if name in KEYED else {}),
                BLOCK_SIZE.get(name),
                DTYPE.get(name, "float32"),
            )
            plain = laboratory.server("plain")
            stack.callback(plain.stop)
            plain.start()
            return lab.Bench(laboratory, name, plain)

        yield bench
