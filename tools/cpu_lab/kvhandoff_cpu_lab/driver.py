# SPDX-License-Identifier: Apache-2.0
"""The driver half of the Triton backend named ``cpu``.

vLLM's model runner V2 calls Triton kernels for its bookkeeping and refuses to start on a CPU build
unless Triton lists a backend of that name. With ``TRITON_INTERPRET=1`` the kernels run in Triton's
interpreter, which never asks the driver to compile or launch anything; the driver only has to be
there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


def has_accelerator() -> bool:
    """Whether torch sees any device besides the CPU."""
    import torch

    return torch.cuda.is_available() or torch.accelerator.is_available()


class CpuInterpreterDriver(DriverBase):
    """Stands in for a device driver while Triton kernels are interpreted."""

    @classmethod
    def is_active(cls) -> bool:
        """Active only for interpreted kernels on a machine without an accelerator.

        Triton fails when two drivers call themselves active, so a wrong yes here would break
        every GPU process that shares the environment. The variable is looked at first because it
        costs nothing and settles the matter for almost all of them.
        """
        return os.environ.get("TRITON_INTERPRET") == "1" and not has_accelerator()

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only a compiled launcher needs C++ types, and there is none."""
        raise NotImplementedError(
            "kvhandoff-cpu-lab interprets Triton kernels, set TRITON_INTERPRET=1"
        )

    def get_current_target(self) -> GPUTarget:
        """The target that libraries query to choose between code paths."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """Tensors of interpreted kernels live in host memory."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., float | list[float]]:
        """Let autotuned kernels pick a configuration by wall-clock time.

        Triton's own benchmark needs device events. One call is enough: the interpreter makes all
        configurations about equally slow, so the choice does not matter, only that one is made.
        """

        def benchmark(
            call: Callable[[], Any], *, quantiles: Sequence[float] | None = None, **_: Any
        ) -> float | list[float]:
            start = time.perf_counter()
            call()
            milliseconds = (time.perf_counter() - start) * 1e3
            return milliseconds if quantiles is None else [milliseconds] * len(quantiles)

        return benchmark
