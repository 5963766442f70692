# SPDX-License-Identifier: Apache-2.0
"""What the docs say about tests and files is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?(?: -k ([\w-]+))?`")
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_tests_that_are_named_exist(path: Path) -> None:
    """By file and name; of a selection, at least the file."""
    for file, name, _ in TEST.findall(path.read_text(encoding="utf-8")):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(def|class) {name}\b|^{name} = ", text, re.M), (file, name)


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """Relative ones, in the repository."""
    for target, _ in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_every_statement_about_pcp_has_its_line() -> None:
    """All statements and situations, each with a test or the reason why it needs none."""
    text = (ROOT / "docs/pcp.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (S?[\d, ]+) \| .* \| (.+) \|$", text, re.M)
    numbers = [number.strip() for row, _ in rows for number in row.split(",")]
    assert numbers == [f"S{n}" for n in range(1, 29)] + [str(n) for n in range(1, 34)]
    assert all("tests/" in here or "see S" in here or "not run" in here for _, here in rows)
