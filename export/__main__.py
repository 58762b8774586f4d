"""`starsd-export`, and `python -m starsd.export`."""

from __future__ import annotations

import sys

from starsd.shared.entry import start


def main() -> int:
    return start("starsd-export", "starsd.export.cli")


if __name__ == "__main__":
    sys.exit(main())
