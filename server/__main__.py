"""`starsd-server`, and `python -m starsd.server`."""

from __future__ import annotations

import signal
import sys

from starsd.shared.entry import start

ORDERS = (signal.SIGHUP, signal.SIGUSR1)  # that a running server obeys


def main() -> int:
    return start("starsd-server", "starsd.server.cli", ORDERS if sys.argv[1:2] == ["run"] else ())


if __name__ == "__main__":
    sys.exit(main())
