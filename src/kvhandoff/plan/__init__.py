# SPDX-License-Identifier: Apache-2.0
"""Who reads which bytes from whom: pure functions from holdings to descriptors."""
