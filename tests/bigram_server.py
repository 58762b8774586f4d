"""A real server whose drafter knows the model of `bigram`: in this process, or as one that can be killed and stopped.

python tests/bigram_server.py PORT      its address on stdout once it is ready; 0: any port
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
from bigram import bigram_head
from star import LIMITS, MarkedDrafter

from starsd.server.gateway import Gateway
from starsd.server.limits import ServerLimits
from starsd.server.link import ModelHead, WorkerConfig
from starsd.server.pool import Pool

NOTHING = ModelHead("bigram", "none")
REAL_LIMITS = msgspec.structs.replace(LIMITS, window=512, depth=7, nodes=29)


def _heads(drafter: MarkedDrafter) -> Any:
    """In place of `starsd.server.heads`, which would bring torch: seconds, each time."""
    loaded = types.SimpleNamespace(heads=(bigram_head(drafter),), projectors={}, warnings=())
    return types.SimpleNamespace(Loaded=types.SimpleNamespace, load_heads=lambda *_, **__: loaded)


@contextmanager
def serving(limits: ServerLimits = REAL_LIMITS) -> Iterator[tuple[Gateway, str, MarkedDrafter]]:
    """A gateway in this process, its address, and its drafter."""
    drafter = MarkedDrafter(limits.slots, limits.window)
    from server_helpers import running

    with (
        patch("starsd.server.worker.load_heads", _heads(drafter).load_heads),
        running(NOTHING, limits) as (gateway, url),
    ):
        yield gateway, url, drafter


class Child:
    """A server in a process of its own; `start` it again after its death, at the same address."""

    def __init__(self) -> None:
        self.url = ""
        self.start()

    def start(self) -> None:
        port = self.url.rpartition(":")[2] or "0"
        argv = [sys.executable, __file__, port]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("ws://")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def child() -> Iterator[Child]:
    made = Child()
    try:
        yield made
    finally:
        made.end()


async def _serve(port: int) -> None:
    sys.modules["starsd.server.heads"] = _heads(MarkedDrafter(8, REAL_LIMITS.window))
    gateway = Gateway(REAL_LIMITS, host="127.0.0.1", port=port)
    config = WorkerConfig(endpoint="inproc://workers", name="", folder="", models=(NOTHING,), limits=REAL_LIMITS)
    pool = Pool(config, 1, gateway)
    await pool.start()
    await gateway.listen(pool)
    print(f"ws://127.0.0.1:{gateway.address[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
