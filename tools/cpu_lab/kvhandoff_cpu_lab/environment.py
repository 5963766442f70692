# SPDX-License-Identifier: Apache-2.0
"""The environment variables of a vLLM server on a CPU machine."""

from __future__ import annotations


def cpu_environment(kv_cache_gib: int = 1) -> dict[str, str]:
    """Variables to add to a server's environment, to be set before its process starts.

    ``kv_cache_gib`` is per worker and vLLM reads it as an integer, so 1 is the smallest. For a
    smaller cache (to see blocks reused or a request preempted, or to save the seconds that
    zeroing it takes) pass ``--num-gpu-blocks-override N`` to the server; it then decides alone.
    """
    return {
        # Prefill context parallelism exists in model runner V2 only.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # V2 launches Triton kernels; without a GPU they can only be interpreted.
        "TRITON_INTERPRET": "1",
        # Several workers share few cores here: vLLM's binding would give each its own cores and
        # refuse to start when there are not enough, and more threads would only fight.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        # A lab run must not depend on, or talk to, anything outside the machine.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
