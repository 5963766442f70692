# SPDX-License-Identifier: Apache-2.0
"""Threads. They hold no rules of their own: they feed events to a lifecycle and do its effects."""
