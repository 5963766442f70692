# SPDX-License-Identifier: Apache-2.0
"""Lab tooling: vLLM with prefill context parallelism on a machine without a GPU.

The package is also a Triton backend: Triton imports ``kvhandoff_cpu_lab.driver`` and
``kvhandoff_cpu_lab.compiler`` whenever ``triton`` itself is imported, in every environment that
has the package installed. That is why this module imports nothing.
"""
