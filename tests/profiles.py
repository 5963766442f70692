# SPDX-License-Identifier: Apache-2.0
"""How hypothesis searches: the same examples every time, or new ones for as long as wished.

``HYPOTHESIS_PROFILE`` names a profile. ``ci``, the default, is derandomized: whether a change
lands does not depend on chance. ``explore`` tries other examples in each run and
:data:`EXPLORE_FACTOR` times as many (``make explore``); what it finds becomes a fixed example.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

CI = "ci"
EXPLORE = "explore"
EXPLORE_FACTOR = 10
"""How many times the examples of ``ci`` one run of ``explore`` tries."""

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", CI)

_COMMON = settings(
    database=None,  # an example that failed once is written down, not remembered
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def load_profile() -> None:
    """Make the profile of this run the default of all property tests."""
    settings.register_profile(CI, _COMMON, derandomize=True)
    settings.register_profile(EXPLORE, _COMMON, derandomize=False, max_examples=examples(100))
    settings.load_profile(PROFILE)


def examples(count: int) -> int:
    """Examples to try in this run of a test that tries ``count`` in ``ci``."""
    return count * (EXPLORE_FACTOR if PROFILE == EXPLORE else 1)
