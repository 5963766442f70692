# SPDX-License-Identifier: Apache-2.0
"""Engines and models as a user writes them: ``tp=4,pcp=2``, ``mla:layers=61,latent=576``, or a
model's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhandoff.model.shapes import LAYOUTS, ModelShape
from kvhandoff.model.topology import ParallelSizes

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "float8_e4m3fn": 1, "fp8": 1,
}  # fmt: skip
_ALIASES = {"NHD": "LBNH", "HND": "LBHN"}
_MAX_FACT = 1 << 20


def parse_engine(text: str) -> tuple[ParallelSizes, tuple[int, ...]]:
    """Parallel sizes and a pipeline partition, from e.g. ``tp=2,pp=2,partition=30:31``.

    Raises:
        ValueError: for an unknown key or a value that is no positive number.
        UnsupportedSetup: for sizes that vLLM does not have.
    """
    facts = _pairs(text, {"tp", "pp", "pcp", "dcp", "partition"})
    partition = tuple(
        _number("partition", part) for part in facts.pop("partition", "").split(":") if part
    )
    return ParallelSizes(**{key: _number(key, value) for key, value in facts.items()}), partition


HEAD_SIZE = 128
MLA_LATENT = 576


def parse_model(text: str) -> ModelShape:
    """A model's cache, from ``gqa:heads=8,layers=4,head_size=128`` or ``mla:layers=61,latent=576``.

    Optional: ``dtype`` (default bfloat16); for gqa ``head_size`` (default 128) and
    ``query_heads``; for mla ``latent`` (default 576, as in DeepSeek models).

    Raises:
        ValueError: for an unknown kind or key, a missing one, or a value that is no number.
    """
    kind, _, rest = text.partition(":")
    known = {
        "gqa": ({"layers", "heads"}, {"head_size", "query_heads", "dtype"}),
        "mla": ({"layers"}, {"latent", "dtype"}),
    }.get(kind.strip())
    if known is None:
        raise ValueError(f"model kind {kind.strip()!r} is not gqa or mla")
    needed, optional = known
    facts = _pairs(rest, needed | optional)
    if missing := sorted(needed - facts.keys()):
        raise ValueError(f"model {text!r} lacks {', '.join(missing)}")
    size = _dtype_bytes(facts.pop("dtype", "bfloat16"))
    numbers = {key: _number(key, value) for key, value in facts.items()}
    if kind.strip() == "mla":
        return ModelShape(numbers["layers"], 1, numbers.get("latent", MLA_LATENT) * size, mla=True)
    return ModelShape(
        numbers["layers"],
        numbers["heads"],
        2 * numbers.get("head_size", HEAD_SIZE) * size,
        query_heads=numbers.get("query_heads", 0),
    )


def read_model_config(path: Path) -> tuple[ModelShape, list[str]]:
    """A model's cache from its ``config.json``, and what the file tells beyond that.

    Raises:
        ValueError: if the file is no such configuration, naming the key.
        OSError: if it cannot be read.
    """
    loaded = json.loads(path.read_text(encoding="utf-8"))
    config = loaded.get("text_config") or loaded if isinstance(loaded, dict) else None
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    dtype = config.get("dtype") or config.get("torch_dtype")
    dtype = dtype or loaded.get("dtype") or loaded.get("torch_dtype") or "bfloat16"
    size = _dtype_bytes(str(dtype).removeprefix("torch."))
    layers = _fact(config, "num_hidden_layers")
    notes = _remarks(config)
    if config.get("kv_lora_rank"):
        latent = _fact(config, "kv_lora_rank") + _fact(config, "qk_rope_head_dim")
        return ModelShape(layers, 1, latent * size, mla=True), notes
    query_heads = _fact(config, "num_attention_heads")
    heads = _fact(config, "num_key_value_heads", query_heads)
    head_size = config.get("head_dim") or _fact(config, "hidden_size") // query_heads
    shape = ModelShape(
        layers, heads, 2 * _number("head_dim", head_size) * size, query_heads=query_heads
    )
    return shape, notes


def parse_layout(text: str) -> str:
    """An axis order such as LBHN, from vLLM's name for it (``LBHNC``, ``NHD``, ``HND``).

    Raises:
        ValueError: for a layout that vLLM does not have.
    """
    name = text.strip().upper()
    order = _ALIASES.get(name, name.removesuffix("C"))
    if order not in LAYOUTS:
        expected = ", ".join(f"{layout}C" for layout in LAYOUTS)
        raise ValueError(f"layout {text!r} is none of {expected}, NHD, HND")
    return order


def _remarks(config: Mapping[str, Any]) -> list[str]:
    """What this model has that the table does not show."""
    notes = []
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ""})
    if kinds not in ([], ["full_attention"]):
        notes.append(f"all layers are counted as full attention, the model has {', '.join(kinds)}")
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        notes.append("all layers are counted as full attention, the model has a sliding window")
    if config.get("index_topk"):
        notes.append("the cache of the sparse-attention indexer is not counted")
    return notes


def _pairs(text: str, allowed: set[str]) -> dict[str, str]:
    facts: dict[str, str] = {}
    for item in text.split(","):
        if not item.strip():
            continue
        key, separator, value = (part.strip() for part in item.partition("="))
        if not separator or key not in allowed or key in facts:
            raise ValueError(
                f"{item.strip()!r} is not one of {', '.join(sorted(allowed))} with a value"
            )
        facts[key] = value
    return facts


def _number(key: str, value: object) -> int:
    text = str(value)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MAX_FACT:
        raise ValueError(f"{key} is {text[:40]!r}, not a number in 1..{_MAX_FACT}")
    return int(text[:9])


def _fact(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    return _number(key, value)


def _dtype_bytes(name: str) -> int:
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name!r} is none of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
