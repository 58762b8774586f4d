"""The process that asks a device's sensors: `python -m starsd.edge.telemetry_child`, a Reading a line of JSON, or with
--look one Look.

It ends when its standard input does, which its parent's end brings about, however that comes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from starsd.edge import telemetry_jtop, telemetry_nvidia
from starsd.edge.telemetry_board import Board
from starsd.edge.telemetry_files import Files
from starsd.edge.telemetry_look import LOOK_SECONDS, Look, explain
from starsd.edge.telemetry_reading import NOTHING, Reading, merge
from starsd.edge.telemetry_system import System

RETRY = 60.0  # seconds until a source that failed is asked again
FRESH = 3  # periods of a source that its last word is good for
NICE = 10
PAUSE = 0.25  # seconds between looks at what sources have said
LOOK_EVERY = 1.0  # seconds, for sources that have a rhythm


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
        self.name, self.failed = source.name, ""  # why it has said nothing the last time
        threading.Thread(target=self._run, name=source.name, daemon=True).start()

    @property
    def latest(self) -> Reading:
        said = self._said
        fresh = said is not None and self._now() - said[0] <= FRESH * self._source.every
        return said[1] if said is not None and fresh else NOTHING

    @property
    def answered(self) -> bool:
        return self._said is not None

    def _run(self) -> None:
        while True:
            began = self._now()
            try:
                self._said = self._now(), self._source.sample()
                pause = self._source.every
            except Exception as error:  # what a strange library or command does is not our end
                self.failed = " ".join(str(error).split())[:200] or type(error).__name__
                pause = self._retry
            time.sleep(max(0.05, pause - (self._now() - began)))


class Sensors:
    """All sources of a machine. NVIDIA's driver is asked where a board tells less than all."""

    def __init__(self, files: Files, every: float) -> None:
        self._board, self._system = Board(files), System(files)
        first = self._board.sample()
        enough = first.power_w is not None and first.gpu_load is not None
        jtop, driver = telemetry_jtop.find(every), None if enough else telemetry_nvidia.find(every)
        self.absent: dict[str, str] = {}  # sources that there are none of, and why
        if jtop is None:
            self.absent[telemetry_jtop.Jtop.name] = "jetson-stats is not installed"
        if driver is None and not enough:
            self.absent[telemetry_nvidia.Driver.name] = "neither nvidia-ml-py nor nvidia-smi is installed"
        self.jtop = Aside(jtop) if jtop is not None else None
        self.driver = Aside(driver) if driver is not None else None

    def read(self) -> Reading:
        before = [self.jtop.latest] if self.jtop else []
        after = [self.driver.latest] if self.driver else []
        return merge([*before, self._board.sample(), *after, self._system.sample()])


def readings(files: Files, every: float) -> Iterator[Reading]:
    """Without end; each is taken when it is asked for."""
    sensors = Sensors(files, every)
    while True:
        yield sensors.read()


def look(files: Files, seconds: float = LOOK_SECONDS) -> Look:
    """One reading, once all sources have answered, or so many seconds after; and why what is unknown is so."""
    sensors = Sensors(files, LOOK_EVERY)
    asides = {aside.name: aside for aside in (sensors.jtop, sensors.driver) if aside is not None}
    sensors.read()
    until = time.monotonic() + seconds
    time.sleep(PAUSE)  # a processor's load is that since the last time
    while time.monotonic() < until and any(not aside.answered and not aside.failed for aside in asides.values()):
        time.sleep(PAUSE)
    silent = {
        name: aside.failed or f"says nothing for {seconds:g} s" for name, aside in asides.items() if not aside.answered
    }
    return explain(sensors.read(), {**sensors.absent, **silent}, [name for name in asides if name not in silent])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="telemetry_child", description=__doc__)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between readings")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where /proc and /sys are")
    parser.add_argument("--look", action="store_true", help="one look, with reasons, instead")
    options = parser.parse_args(argv)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    out = os.dup(sys.stdout.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # libraries may print
    if options.look:
        os.write(out, msgspec.json.encode(look(Files(options.root))) + b"\n")
        _end()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for reading in readings(Files(options.root), options.every):
        try:
            os.write(out, msgspec.json.encode(reading) + b"\n")
        except OSError:  # nobody listens
            _end()
        time.sleep(options.every)
    return 0


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    _end()


def _end() -> NoReturn:
    """Whatever other threads are at, and with commands that they wait for where this process leads its session."""
    if os.getsid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # in a terminal
        sys.exit(main())
