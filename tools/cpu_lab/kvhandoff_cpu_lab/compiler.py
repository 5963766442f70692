# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the Triton backend named ``cpu``: present, and never asked to compile."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class CpuInterpreterBackend(BaseBackend):
    """Satisfies Triton's backend discovery; interpreted kernels do not reach it."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Claim only the target of this package's own driver."""
        return target.backend == "cpu"

    def hash(self) -> str:
        """A key for Triton's compile cache, into which this backend puts nothing."""
        return "kvhandoff-cpu-lab"

    def parse_options(self, options: dict[str, Any]) -> object:
        """The interpreter takes launch options as they are."""
        return options

    def add_stages(self, stages: dict[str, Any], options: object, language: Language) -> None:
        """Refuse to compile: reaching this means that TRITON_INTERPRET was not set in time."""
        raise NotImplementedError(
            "kvhandoff-cpu-lab interprets Triton kernels and cannot compile them; "
            "set TRITON_INTERPRET=1 before triton is imported"
        )

    def load_dialects(self, context: Any) -> None:
        """No dialect is needed without compilation."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """No device library replaces any interface module."""
        return {}
