# SPDX-License-Identifier: Apache-2.0
"""How recurrent layers (Mamba, gated delta net, ...) lay out a state, and how it is cut by head.

A block holds one state: a convolution's last inputs, then the recurrent state, then padding. With
tensor parallelism each rank has its share of the *heads* of each part, and the convolution has
several parts one behind the other, so a share of the bytes is not a share of the state::

    mamba 1    conv [x]          by channel        ssm by channel
    mamba 2    conv [x, B, C]    by head, group    ssm by head
    GDN        conv [q, k, v]    by k head, v head  state by v head

(``vllm/model_executor/layers/mamba/mamba_utils.py``.) Each part becomes a layer of its own, named
``<layer>/<part>``. Other recurrent layers are one part, which goes with equal TP sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import MambaSpec

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.layout import LayerLayout
from kvhandoff.model.topology import HeadRange, heads_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


class Place(NamedTuple):
    """Which layer, in which KV cache group, on which tensor parallel rank."""

    name: str
    group: int
    tp: int
    tp_size: int


@dataclass(frozen=True)
class _Part:
    """A part of a state that is cut by head; lengths in bytes.

    ``slots`` slots (rows of a convolution that is stored row by row) hold ``content`` bytes of
    each of ``heads`` heads, of ``total`` in the model.
    """

    name: str
    offset: int
    heads: int
    content: int
    total: int
    slots: int = 1
    slot_stride: int = 0


def describe_state(
    vllm_config: VllmConfig, place: Place, spec: MambaSpec, view: torch.Tensor
) -> Iterator[LayerLayout]:
    """The parts of a layer's states.

    Args:
        view: ``[B, 1, 1, C]``, one state in bytes for each block.

    Raises:
        UnsupportedSetup: if vLLM's view is not what its spec says.
    """
    size = view.element_size()
    rows, content = view.shape[0], prod(view.shape[1:]) * size
    if content < spec.state_content_size_bytes or view.stride(-1) != 1:
        raise UnsupportedSetup.because(
            f"the state of layer {place.name!r} has an unknown shape",
            found=f"{tuple(view.shape)} with strides {view.stride()}",
            expected=f"{spec.state_content_size_bytes} dense bytes for each block",
            change="use a vLLM release that this kvhandoff release names",
        )
    for part in _parts(vllm_config, place, spec):
        yield LayerLayout(
            name=f"{place.name}/{part.name}",
            group=place.group,
            heads=_held(part, place, spec.tp_replicated),
            total_heads=part.total,
            block_tokens=spec.block_size,
            row_tokens=spec.block_size,
            slots=part.slots,
            rows=rows,
            base=view.data_ptr() + part.offset,
            row_stride=view.stride(0) * size,
            head_stride=part.content,
            token_stride=part.slot_stride or part.heads * part.content,
            content=part.content,
            state=True,
        )


def _held(part: _Part, place: Place, replicated: bool) -> HeadRange:
    if replicated:
        return HeadRange(0, part.heads)
    return heads_of(part.total, place.tp_size, place.tp)


def _parts(vllm_config: VllmConfig, place: Place, spec: MambaSpec) -> list[_Part]:
    widths = _convolution(vllm_config, place, spec)
    if not widths or spec.tp_replicated or len(spec.shapes) != 2:
        shards = 1 if spec.tp_replicated else place.tp_size
        return [_Part("state", 0, 1, spec.state_content_size_bytes, total=shards)]
    conv, recurrent = spec.shapes
    item = spec.dtypes[0].itemsize
    dim_first = is_conv_state_dim_first()
    dim, length = conv if dim_first else reversed(conv)
    parts, at = [], 0
    for name, heads, width, total in widths:
        parts.append(
            _Part(
                f"conv.{name}",
                offset=at * item * (length if dim_first else 1),
                heads=heads,
                content=width * item * (length if dim_first else 1),
                slots=1 if dim_first else length,
                slot_stride=0 if dim_first else dim * item,
                total=total,
            )
        )
        at += heads * width
    heads = recurrent[0]
    parts.append(
        _Part(
            "state",
            offset=prod(conv) * item,
            heads=heads,
            content=prod(recurrent[1:]) * spec.dtypes[1].itemsize,
            total=heads * place.tp_size,
        )
    )
    return parts


def _convolution(
    vllm_config: VllmConfig, place: Place, spec: MambaSpec
) -> list[tuple[str, int, int, int]]:
    """Name, heads here, channels of a head, and heads of the model, of each part in order.

    Empty if it is not known how this kind of layer is cut.
    """
    if len(spec.shapes) != 2 or len(spec.shapes[0]) != 2:
        return []
    dim = spec.shapes[0][0 if is_conv_state_dim_first() else 1]
    recurrent, tp = spec.shapes[1], place.tp_size
    if spec.mamba_type == Kind.MAMBA1 and recurrent[0] == dim:
        return [("x", dim, 1, dim * tp)]
    if spec.mamba_type == Kind.MAMBA2 and len(recurrent) == 3:
        heads, head_dim, state = recurrent
        groups, rest = divmod(dim - heads * head_dim, 2 * state)
        if groups < 1 or rest:
            return []
        total = groups * tp
        if groups == 1 and _groups_of(vllm_config) == 1:
            total = 1  # each rank has a copy of the only group
        return [
            ("x", heads, head_dim, heads * tp),
            ("B", groups, state, total),
            ("C", groups, state, total),
        ]
    if spec.mamba_type == Kind.GDN_ATTN and len(recurrent) == 3:
        heads, head_v, head_k = recurrent
        keys, rest = divmod(dim - heads * head_v, 2 * head_k)
        if keys < 1 or rest:
            return []
        return [
            ("q", keys, head_k, keys * tp),
            ("k", keys, head_k, keys * tp),
            ("v", heads, head_v, heads * tp),
        ]
    return []


def _groups_of(vllm_config: VllmConfig) -> int:
    """Groups of B and C in the whole model; 0 if its configuration does not say."""
    config = vllm_config.model_config.hf_text_config
    for name in ("mamba_n_groups", "n_groups", "mamba_num_groups", "ssm_n_groups"):
        if value := getattr(config, name, None):
            return int(value)
    return 0
