"""`starsd`, and `python -m starsd.scripts`."""

from __future__ import annotations

import sys

from starsd.shared.entry import start


def main() -> int:
    return start("starsd", "starsd.scripts.cli")


if __name__ == "__main__":
    sys.exit(main())
