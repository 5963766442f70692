# SPDX-License-Identifier: Apache-2.0
"""What crosses a process border: messages, the description of an engine, request parameters."""
