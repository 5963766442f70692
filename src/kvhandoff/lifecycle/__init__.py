# SPDX-License-Identifier: Apache-2.0
"""When things happen: state machines that take events and the time, and return effects.

They own no socket, thread or clock, so that every interleaving can be tried in a test.
"""
