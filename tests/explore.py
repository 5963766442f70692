# SPDX-License-Identifier: Apache-2.0
"""Random search over all property tests, for as long as one likes: ``make explore MINUTES=15``.

Each round has a seed of its own, which is printed before the round begins, so that whatever is
found can be found again. What it finds becomes an ``@example`` or a unit test.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import subprocess
import sys
import time

TESTS = (
    "tests/property",
    "tests/unit/test_fuzz.py",
    "tests/unit/test_needs.py",
    "tests/unit/test_pieces.py",
)
_TRIED = re.compile(r"(\d+) passing\b")


def run_round(seed: int) -> tuple[int, str]:
    """One run of the property tests: exit code and output."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "3600", "-p", "no:cacheprovider",
        "--hypothesis-show-statistics", f"--hypothesis-seed={seed}", *TESTS,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env=os.environ | {"HYPOTHESIS_PROFILE": "explore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def main() -> int:
    """Search until the time is over or something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.explore")
    parser.add_argument("minutes", type=float, help="begin no round after so many minutes")
    parser.add_argument("--seed", type=int, help="run one round, with this seed")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.minutes * 60
    rounds = tried = 0
    while True:
        seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
        print(f"round {rounds + 1}: seed {seed}", flush=True)
        code, output = run_round(seed)
        rounds += 1
        tried += sum(int(count) for count in _TRIED.findall(output))
        if code != 0:
            print(output)
            print(f"found after {tried:,} examples; again: python -m tests.explore 1 --seed {seed}")
            return code
        if arguments.seed is not None or time.monotonic() >= end:
            print(f"nothing found in {rounds} rounds, {tried:,} examples")
            return 0


if __name__ == "__main__":
    sys.exit(main())
