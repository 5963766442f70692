# SPDX-License-Identifier: Apache-2.0
"""What all tests share: hypothesis's profile, and a last word that names what failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiles import load_profile

load_profile()

_MAX_REASON = 300


def pytest_unconfigure(config: pytest.Config) -> None:
    """The very last lines: one for each failed test, so that the tail of a log tells all."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    for report in [*reporter.getreports("failed"), *reporter.getreports("error")]:
        crash = getattr(report.longrepr, "reprcrash", None)
        where = f"{Path(crash.path).name}:{crash.lineno}: " if crash else ""
        reason = " ".join((crash.message if crash else str(report.longrepr)).split())
        reporter.write_line(f"FAILED {report.nodeid} - {where}{reason[:_MAX_REASON]}")
