# SPDX-License-Identifier: Apache-2.0
"""Print what an installed distribution requires, without the distributions named to leave out.

vLLM's CPU wheel pins PyTorch's CPU build by its local version (which PyPI does not serve) and
drags in torchvision, torchaudio and torchcodec builds that do not match it; with those installed,
importing transformers fails. So it is installed without dependencies, and this prints the rest.

Usage: requirements_of.py DISTRIBUTION LEFT_OUT...
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement


def main() -> None:
    distribution, *left_out = sys.argv[1:]
    for text in requires(distribution) or ():
        requirement = Requirement(text)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        marker = requirement.marker
        if name not in left_out and (marker is None or marker.evaluate({"extra": ""})):
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
