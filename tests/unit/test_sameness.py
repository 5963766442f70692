# SPDX-License-Identifier: Apache-2.0
"""Models are the same if their weights are, prompts if what they mean is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhandoff.vllm import sameness


def model_at(path: Path | str, revision: str | None = None) -> Any:
    return SimpleNamespace(model=str(path), revision=revision)


def write(path: Path, weights: bytes) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text("{}")
    return path


def test_weights_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    """Neither the path nor other files count."""
    first = write(tmp_path / "first", b"weights" * 100_000)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    (second / "README.md").write_text("a model")
    assert sameness.weights_of(model_at(first)) == sameness.weights_of(model_at(second))


@pytest.mark.parametrize("weights", [b"waights" * 100_000, b"weights" * 100_001, b""])
def test_fine_tunes_differ(tmp_path: Path, weights: bytes) -> None:
    """With equal configurations, by the beginning or the size of a file."""
    base = write(tmp_path / "base", b"weights" * 100_000)
    tuned = write(tmp_path / "tuned", weights)
    assert sameness.weights_of(model_at(base)) != sameness.weights_of(model_at(tuned))


def test_a_file_is_a_model(tmp_path: Path) -> None:
    """GGUF models are named by their file."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    found = sameness.weights_of(model_at(file))
    file.write_bytes(b"GGUG")
    assert sameness.weights_of(model_at(file)) != found


@pytest.mark.parametrize("method", [*sameness.CACHELESS_DRAFTS, None])
def test_drafts_without_a_cache_do_not_count(method: str | None) -> None:
    """One side may draft from n-grams and the other one not."""
    speculative = None if method is None else SimpleNamespace(method=method)
    assert sameness._draft_of(SimpleNamespace(speculative_config=speculative)) == ""  # type: ignore[arg-type]


def test_a_draft_model_counts_by_its_weights(tmp_path: Path) -> None:
    """Not by its path."""
    drafts = []
    for name in ("here", "there"):
        draft = model_at(write(tmp_path / name, b"draft"))
        speculative = SimpleNamespace(method="eagle", draft_model_config=draft)
        config: Any = SimpleNamespace(speculative_config=speculative)
        drafts.append(sameness._draft_of(config))
    assert drafts[0] == drafts[1] != ""


def prompt(*tokens: int, **changes: Any) -> Any:
    plain = {
        "prompt_token_ids": list(tokens),
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
    }
    return SimpleNamespace(**(plain | changes))


def image(identifier: str, offset: int = 0) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))


def adapter(name: str, path: Path | str = "hub/adapter") -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def test_adapters_count_by_their_weights(tmp_path: Path) -> None:
    """Wherever they lie, and also when one was replaced in place."""
    found = []
    for place, weights in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        path = write(tmp_path / place, weights)
        found.append(sameness.prompt_digest(prompt(1, lora_request=adapter("x", path)), 1))
    assert found[0] == found[1] != found[2]
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    again = sameness.prompt_digest(prompt(1, lora_request=adapter("x", tmp_path / "a")), 1)
    assert again == found[2]


def test_prompts_that_differ_have_other_digests() -> None:
    """In tokens, images, their places and order, or the adapter."""
    prompts = [
        prompt(1, 2, 3),
        prompt(1, 2, 4),
        prompt(1, 2, 3, mm_features=[image("a")]),
        prompt(1, 2, 3, mm_features=[image("a", 1)]),
        prompt(1, 2, 3, mm_features=[image("b")]),
        prompt(1, 2, 3, mm_features=[image("a"), image("b", 2)]),
        prompt(1, 2, 3, mm_features=[image("a;2:b")]),
        prompt(1, 2, 3, lora_request=adapter("a")),
        prompt(1, 2, 3, lora_request=adapter("b")),
    ]
    digests = [sameness.prompt_digest(each, 3) for each in prompts]
    assert len(set(digests)) == len(prompts)
    assert "" not in digests


def test_only_the_tokens_that_are_handed_off_count() -> None:
    """D's prompt may be longer than what P computed."""
    assert sameness.prompt_digest(prompt(1, 2, 3), 2) == sameness.prompt_digest(prompt(1, 2), 2)


@pytest.mark.parametrize(
    "unknown",
    [
        prompt(prompt_token_ids=None, prompt_embeds=object()),
        prompt(1, 2, 3, prompt_embeds=object()),
        prompt(1, 2, 3, mm_features=[image("renderer0-mm-7-image-0")]),
    ],
    ids=["embeddings", "tokens and embeddings", "an image that is not hashed"],
)
def test_what_cannot_be_told_apart_has_no_digest(unknown: Any) -> None:
    """Another process gives the same number to another image."""
    assert sameness.prompt_digest(unknown, 3) == ""


@pytest.mark.parametrize(
    ("multimodal", "caching", "hashed"),
    [
        (None, False, True),
        (SimpleNamespace(mm_processor_cache_gb=4), False, True),
        (SimpleNamespace(mm_processor_cache_gb=0), True, True),
        (SimpleNamespace(mm_processor_cache_gb=0), False, False),
    ],
)
def test_engines_that_do_not_hash_images_say_so(
    multimodal: Any, caching: bool, hashed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At start, with the setting to change."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    sameness.warn_of_unhashed_images(config)
    assert ("--mm-processor-cache-gb" in caplog.text) is not hashed
