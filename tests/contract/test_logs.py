# SPDX-License-Identifier: Apache-2.0
"""In vLLM's processes this package logs as vLLM does."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")

CODE = """
import logging
{before}
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
from kvhandoff.vllm import register
register()
logging.getLogger("kvhandoff.vllm.worker").info("hello from a worker")
logging.getLogger("kvhandoff.vllm.worker").debug("not told")
"""


def told(before: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if "hello" in line or "not told" in line]


def test_lines_have_vllms_format_and_level() -> None:
    """With process, level and time, once."""
    (line,) = told()
    assert re.fullmatch(r"\(\w+ pid=\d+\) INFO \S+ \S+ \[\S+\] hello from a worker", line)


def test_a_configuration_of_ones_own_is_left_alone() -> None:
    """Who has set up these logs gets them."""
    before = """
logger = logging.getLogger("kvhandoff")
logger.addHandler(logging.StreamHandler())
logger.setLevel(logging.INFO)
"""
    assert told(before) == ["hello from a worker"]
