# SPDX-License-Identifier: Apache-2.0
"""The connector against the API of the installed vLLM and, where it lies around, of another one.

vLLM 0.33 is a CUDA wheel; its Python files alone tell whether every method that it calls still has
the signature that we implement. ``KVHANDOFF_VLLM_SOURCE`` names a folder with an unpacked wheel.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")

BASE = Path("distributed/kv_transfer/kv_connector/v1/base.py")
OWN_HELPERS = {"scheduler", "worker"}


def sources() -> list[Path]:
    import vllm

    found = [Path(inspect.getfile(vllm)).parent]
    if other := os.environ.get("KVHANDOFF_VLLM_SOURCE"):
        found.append(Path(other) / "vllm")
    return found


def arguments(function: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in function.args.args]
    return names + ([f"**{function.args.kwarg.arg}"] if function.args.kwarg else [])


def methods(tree: ast.Module, *classes: str) -> dict[str, ast.FunctionDef]:
    return {
        item.name: item
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    }


@pytest.mark.parametrize("vllm", sources(), ids=str)
def test_methods_have_the_signatures_of_the_base_class(vllm: Path) -> None:
    from kvhandoff.vllm.connector import KVHandoffConnector

    base = methods(ast.parse((vllm / BASE).read_text()), "KVConnectorBase_V1", "SupportsHMA")
    ours = methods(
        ast.parse(Path(inspect.getfile(KVHandoffConnector)).read_text()), "KVHandoffConnector"
    )
    later = {"supports_sleep_mode"}  # vLLM 0.33
    unknown = set(ours) - set(base) - OWN_HELPERS - later - {"__init__"}
    assert not unknown, "methods that this vLLM does not call"
    for name in (set(ours) & set(base)) - {"__init__"}:
        assert arguments(ours[name]) == arguments(base[name]), name
    abstract = {
        name
        for name, method in base.items()
        if any(getattr(d, "id", "") == "abstractmethod" for d in method.decorator_list)
    }
    assert abstract <= set(ours)


def test_three_names_are_registered_and_resolve_to_classes_of_that_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvhandoff.vllm import CONNECTORS, register

    register()
    register()  # vLLM loads plugins in each process, and somebody may have been first
    for name in CONNECTORS:
        connector = KVConnectorFactory.get_connector_class_by_name(name)
        assert connector.__name__ == name
        assert connector.__module__ == "kvhandoff.vllm.connector"
