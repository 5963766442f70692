# SPDX-License-Identifier: Apache-2.0
"""One-sided reads. Each transport is one small class behind :class:`base.Transport`."""
