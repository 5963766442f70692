# SPDX-License-Identifier: Apache-2.0
"""Greedy sampling without Triton's interpreter.

vLLM's sampler runs one Triton program per 1024 entries of the vocabulary, greedy or not.
Interpreted, that is most of a decode step of a small model with a real vocabulary. Greedy sampling
is an argmax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def greedy_first(
    gumbel_sample: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Wrap vLLM's ``gumbel_sample``: batches that are greedy throughout take the argmax."""

    @functools.wraps(gumbel_sample)
    def sample(
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        greedy = not temperature[expanded_idx_mapping.long()].any()
        if greedy and kwargs.get("logits_cache") is None:
            return logits.argmax(dim=-1)
        return gumbel_sample(logits, expanded_idx_mapping, temperature, *args, **kwargs)

    return sample
