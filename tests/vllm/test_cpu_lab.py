# SPDX-License-Identifier: Apache-2.0
"""The lab's models are reproducible, and its Triton backend stays out of a GPU's way.

That splitting a prefill over two ranks changes no token is shown in ``test_end_to_end.py``, where
engines with and without prefill context parallelism are compared to plain vLLM.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("vllm", "kvhandoff_cpu_lab")),
        reason="needs vLLM's CPU wheel and tools/cpu_lab",
    ),
]


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
