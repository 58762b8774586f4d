"""The process that asks a device's sensors: `python -m starsd.edge.telemetry_child`, a Reading a line of JSON.

It ends when its standard input does, which its parent's end brings about, however that comes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from starsd.edge import telemetry_jtop, telemetry_nvidia
from starsd.edge.telemetry_board import Board
from starsd.edge.telemetry_files import Files
from starsd.edge.telemetry_reading import NOTHING, Reading, merge
from starsd.edge.telemetry_system import System

RETRY = 60.0  # seconds until a source that failed is asked again
FRESH = 3  # periods of a source that its last word is good for
NICE = 10


class Source(Protocol):
    """Something whose `sample` may take long, or raise anything; it is asked every so many seconds."""

    name: str

    @property
    def every(self) -> float: ...

    def sample(self) -> Reading: ...


class Aside:
    """Asks a source in a thread of its own, so that one that hangs holds up nothing."""

    def __init__(self, source: Source, retry: float = RETRY, now: Callable[[], float] = time.monotonic) -> None:
        self._source, self._retry, self._now = source, retry, now
        self._said: tuple[float, Reading] | None = None
        threading.Thread(target=self._run, name=source.name, daemon=True).start()

    @property
    def latest(self) -> Reading:
        said = self._said
        fresh = said is not None and self._now() - said[0] <= FRESH * self._source.every
        return said[1] if said is not None and fresh else NOTHING

    def _run(self) -> None:
        while True:
            began = self._now()
            try:
                self._said = self._now(), self._source.sample()
                pause = self._source.every
            except Exception:  # what a strange library or command does is not our end
                pause = self._retry
            time.sleep(max(0.05, pause - (self._now() - began)))


def readings(files: Files, every: float) -> Iterator[Reading]:
    """Without end; each is taken when it is asked for. NVIDIA's driver is asked where a board tells less than all."""
    board, system = Board(files), System(files)
    first = board.sample()
    asides = [Aside(found)] if (found := telemetry_jtop.find(every)) is not None else []
    others: list[Aside] = []
    if first.power_w is None or first.gpu_load is None:
        driver = telemetry_nvidia.find(every)
        others = [Aside(driver)] if driver is not None else []
    while True:
        told = [aside.latest for aside in asides]
        yield merge([*told, board.sample(), *(other.latest for other in others), system.sample()])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="telemetry_child", description=__doc__)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between readings")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where /proc and /sys are")
    options = parser.parse_args(argv)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    out = os.dup(sys.stdout.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # libraries may print
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for reading in readings(Files(options.root), options.every):
        try:
            os.write(out, msgspec.json.encode(reading) + b"\n")
        except OSError:  # nobody listens
            return 0
        time.sleep(options.every)
    return 0


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)  # whatever other threads are at


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # in a terminal
        sys.exit(main())
