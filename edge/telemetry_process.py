"""Telemetry from a child process: started, listened to, and started again when it ends or falls silent.

Nothing here waits for it but a thread of its own, so a sensor that hangs slows no answer.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from starsd.edge.children import end_all
from starsd.edge.telemetry import Telemetry
from starsd.edge.telemetry_reading import Reading
from starsd.shared.clock import REAL

EVERY = 1.0  # seconds between readings
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before it is started again
STEADY = 30.0  # seconds after which one that worked is started again soon
SILENT = 15.0  # seconds without a reading that are too many
LONGEST_LINE = 65_536  # bytes
COMMAND = (sys.executable, "-m", "starsd.edge.telemetry_child", "--every", str(EVERY))


class ProcessTelemetry(Telemetry):
    """Starts the child at once; `close` ends it. Where it cannot be had, nothing is known and nothing else happens."""

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        *,
        now: Callable[[], float] = REAL.now,
        first_wait: float = FIRST_WAIT,
        silent: float = SILENT,
    ) -> None:
        super().__init__(now)
        self.starts = 0
        self._command, self._first_wait, self._silent = list(command), first_wait, silent
        self._closing = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if (child := self._child) is not None:
            end_all(child)
        self._thread.join(1.0)

    def _run(self) -> None:
        wait = self._first_wait
        while not self._closing.is_set():
            began = REAL.now()
            self._listen()
            if REAL.now() - began > STEADY:
                wait = self._first_wait
            self._closing.wait(wait)
            wait = min(LONGEST_WAIT, 2 * wait)

    def _listen(self) -> None:
        """Start the child and hear it out, to its end or ours."""
        try:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # its end is the child's
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us, and it can be ended whole
            )
        except OSError:
            return
        self._child = child
        self.starts += 1
        with child:
            try:
                assert child.stdout is not None
                self._read(child.stdout.fileno())
            finally:
                end_all(child)  # with a command that it waits for
                self._child = None

    def _read(self, source: int) -> None:
        """Take in readings until there are no more, none comes for too long, or what comes are no lines."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while not self._closing.is_set() and selector.select(self._silent):
                if not (data := os.read(source, LONGEST_LINE)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(msgspec.MsgspecError):
                        self.saw(msgspec.json.decode(line, type=Reading))
                if len(rest) > LONGEST_LINE:
                    return
