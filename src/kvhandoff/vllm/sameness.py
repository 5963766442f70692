# SPDX-License-Identifier: Apache-2.0
"""What has to be the same on both sides: models with their weights, and prompts with their images.

Everything here is independent of hosts and paths, and cheap: it runs while an engine starts, or on
the scheduler's thread.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvhandoff.protocol.catalog import Fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_VOLATILE = {"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Keys of a model's configuration that may differ between hosts that serve the same model."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SAMPLE = 1 << 16

CACHELESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix", "medusa"})
"""Ways of drafting that keep no KV: one side may use them and the other one not."""

_UNHASHED = re.compile(r"renderer\d+-mm-\d+-")
"""How vLLM names images that it does not hash (``renderers/base.py``): by a number of the process,
which another process gives to another image."""


def fingerprint(vllm_config: VllmConfig) -> Fingerprint:
    """What has to be equal on both sides, from configuration and files (so all ranks agree)."""
    model = vllm_config.model_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE}
    return Fingerprint(
        model=_digest(config),
        model_name=str(model.model),
        weights=weights_of(model),
        dtype=str(model.dtype),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        layers=_digest({"draft": _draft_of(vllm_config), "mla": model.use_mla}),
    )


def _draft_of(vllm_config: VllmConfig) -> str:
    """The drafting that keeps a cache of its own, by method and weights."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in CACHELESS_DRAFTS:
        return ""
    draft = speculative.draft_model_config
    return f"{speculative.method}:{'' if draft is None else weights_of(draft)}"


def weights_of(model: ModelConfig) -> str:
    """Digest of a model's weights: names, sizes and beginnings of its files.

    The beginning of a safetensors file names its tensors and holds some of the first one's values,
    so fine-tunes of one model differ. What has no local files counts by name and revision.
    """
    name, revision = str(model.model), model.revision
    path = Path(name) if Path(name).exists() else _downloaded(name, revision)
    if path is None:
        return f"{name}@{revision}"
    files = [path] if path.is_file() else [f for kind in _WEIGHTS for f in path.glob(kind)]
    return _digest_of_files(tuple((str(f), f.stat().st_mtime_ns) for f in sorted(files)))


def _downloaded(name: str, revision: str | None) -> Path | None:
    """Where the hub's client keeps a model, if it does."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - there are many ways of not having it
        logger.debug("%s is not on this machine: %s", name, error)
        return None


def hashes_images(vllm_config: VllmConfig) -> bool:
    """Whether vLLM tells images by their content; it saves itself the trouble without caches."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return (
        multimodal is None
        or multimodal.mm_processor_cache_gb != 0
        or bool(vllm_config.cache_config.enable_prefix_caching)
    )


def warn_of_unhashed_images(vllm_config: VllmConfig) -> None:
    """Say at start what would look like a fault later on."""
    if not hashes_images(vllm_config):
        logger.warning(
            "prompts with images are computed on the decode engine, as vLLM does not hash them "
            "here: set --mm-processor-cache-gb above 0 or --enable-prefix-caching"
        )


def prompt_digest(request: Request, tokens: int) -> str:
    """Digest of what the first ``tokens`` tokens of a prompt are.

    Images count by their content hash and adapters by their weights, as tokens alone do not tell.
    Empty for a prompt of which some part is embeddings, whose content nothing tells, and
    for one with images that vLLM does not hash. An empty digest is no other's equal.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return ""
    ids = np.asarray(request.prompt_token_ids[:tokens], dtype=np.int64)
    digest = blake2b(ids.tobytes(), digest_size=16)
    for feature in request.mm_features or ():
        if _UNHASHED.match(feature.identifier):
            return ""
        _add(digest, feature.mm_position.offset, feature.identifier)
    if request.lora_request is not None:
        _add(digest, "adapter", *_adapter(request.lora_request))
    return digest.hexdigest()


def _adapter(lora: Any) -> tuple[str, str]:
    """An adapter's name, and a digest of its files: others may carry the same name."""
    path = Path(lora.lora_path)
    files = sorted(f for kind in (*_WEIGHTS, "*.json") for f in path.glob(kind))
    changed = tuple((str(file), file.stat().st_mtime_ns) for file in files)
    return lora.lora_name, _digest_of_files(changed) if changed else str(lora.lora_path)


@functools.lru_cache(maxsize=1024)
def _digest_of_files(files: tuple[tuple[str, int], ...]) -> str:
    """By names, sizes and beginnings; files are named with the time of their last change."""
    digest = blake2b(digest_size=8)
    for name, _ in files:
        path = Path(name)
        with path.open("rb") as content:
            _add(digest, path.name, path.stat().st_size, content.read(_SAMPLE).hex())
    return digest.hexdigest()


def _digest(facts: object) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _add(digest: Any, *facts: object) -> None:
    """Facts one by one, so that none can look like the end of another."""
    for fact in facts:
        text = str(fact).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
