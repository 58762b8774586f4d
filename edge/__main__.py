"""`starsd-edge`, and `python -m starsd.edge`."""

from __future__ import annotations

import sys

from starsd.shared.entry import start


def main() -> int:
    return start("starsd-edge", "starsd.edge.cli")


if __name__ == "__main__":
    sys.exit(main())
