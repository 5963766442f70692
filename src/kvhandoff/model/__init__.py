# SPDX-License-Identifier: Apache-2.0
"""What exists: parallel sizes, coordinates, who holds which part of the KV cache, and where."""
