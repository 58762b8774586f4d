"""Whether rules that a stranger wrote can be compiled, found out in a process of its own.

A schema of a hundred bytes may take minutes of CPU time, gigabytes, or the whole process with it, and the library that
compiles it cannot be interrupted. So it is tried first in a child, which may die of it:

    parent ─► child     the tokenizer, its end tokens and the bounds, once; then rules, and what they are called
    child  ─► parent    once it is ready: an empty line; then what is wrong with the rules, empty if nothing is

Lines of JSON. What the child could compile, within bounds of CPU time and memory, any process can.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from starsd.edge import grammar_rules
from starsd.shared.errors import CapacityError, EngineError, StarsdError, UsageError

if TYPE_CHECKING:
    from starsd.edge.text import Text

CPU_SECONDS = 2  # of a trial; what people use takes milliseconds
MEMORY = 256 << 20  # bytes that a trial may take
START_SECONDS = 60.0  # for the child to be ready, on a machine that is busy
PATIENCE = 15.0  # seconds that a trial may last, as the child goes behind all others here
IDLE_SECONDS = 300  # after which the child ends; the next trial starts another
NICE = 5
_STATUS = Path("/proc/self/status")


class Trial:
    """One at a time; any thread. The child is started by the first `check`, and again after it died."""

    def __init__(self, text: Text, cpu_seconds: int = CPU_SECONDS, memory: int = MEMORY) -> None:
        """A trial may take whole seconds of CPU time, up to one more than given, and so many bytes."""
        self._text, self._cpu_seconds, self._memory = text, cpu_seconds, memory
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, rules: str, what: str) -> None:
        """Raise UsageError, which calls them `what`, where these rules are no good or take too much to compile.

        Raises CapacityError where the device is too busy to find that out, and EngineError where none can be tried.
        """
        with self._lock:
            if self._child is not None and self._child.poll() is not None:
                self._end()
            said = self._tried(rules, what)
            if said is None and self._ended_with() == -signal.SIGALRM:  # just before it was asked
                self._end()
                said = self._tried(rules, what)
            if said is None:
                busy = self._ended_with() is None
                self._end()
                if busy:
                    raise CapacityError(f"{what} was not compiled in {PATIENCE:g} seconds: try again later")
                raise UsageError(
                    f"{what} cannot be used: it takes more than {self._cpu_seconds} seconds or {self._memory >> 20} MB "
                    "to compile, expected a simpler one"
                )
            if said:
                raise UsageError(said)

    def stop(self) -> None:
        """Give up a check that another thread is at: it fails, whatever its rules. Without one nothing is lost."""
        if (child := self._child) is not None:
            child.kill()
            child.wait()

    def _tried(self, rules: str, what: str) -> str | None:
        """What the child says; None when it died or did not answer in time."""
        child = self._child or self._start()
        with contextlib.suppress(BrokenPipeError):
            _send(child, [rules, what])
            return _received(child, PATIENCE)
        return None

    def _ended_with(self) -> int | None:
        """The status of a child that said nothing; None while it is at work."""
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(0.1)
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "starsd.edge.grammar_trial"]
        pipe = subprocess.PIPE
        # What it has to say when it dies is full of what users wrote.
        self._child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        self._ended = weakref.finalize(self, _kill, self._child)
        with contextlib.suppress(BrokenPipeError):
            bounds = self._cpu_seconds, self._memory
            _send(self._child, [self._text.tokenizer.to_str(), sorted(self._text.eos), *bounds])
        if (said := _received(self._child, START_SECONDS)) != "":
            self._end()
            raise EngineError(f"grammars cannot be compiled: {said or 'the process for it did not start'}")
        return self._child

    def _end(self) -> None:
        self._child = None
        self._ended()


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()


def _send(child: subprocess.Popen[bytes], message: object) -> None:
    assert child.stdin is not None
    left = memoryview(msgspec.json.encode(message) + b"\n")
    while left:
        left = left[child.stdin.write(left) :]


def _received(child: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Its next line; None when that does not come."""
    assert child.stdout is not None
    end, came = time.monotonic() + seconds, bytearray()
    while not came.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, end - time.monotonic()))
        chunk = os.read(child.stdout.fileno(), 1 << 16) if ready else b""
        if not chunk:
            return None
        came += chunk
    return msgspec.json.decode(came, type=str)


def main() -> None:
    """The child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begin = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[str, list[int], int, int])
    written, ends, seconds, memory = begin
    try:
        table = grammar_rules.token_table(written, ends)
    except StarsdError as error:
        _say(str(error))
        return
    os.nice(NICE)
    if _STATUS.is_file():
        _limit(resource.RLIMIT_DATA, _data_bytes() + memory)
    _say("")
    while True:
        signal.alarm(IDLE_SECONDS)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if not line:
            return
        rules, what = msgspec.json.decode(line, type=tuple[str, str])
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + seconds + 1)
        try:
            grammar_rules.root(table, rules, what)
        except StarsdError as error:
            _say(str(error))
        else:
            _say("")


def _say(line: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _limit(of: int, most: int) -> None:
    """Only downwards from where it is: not everything may be raised again."""
    _, hard = resource.getrlimit(of)
    resource.setrlimit(of, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _data_bytes() -> int:
    """What this process has of its own, as the limit counts it."""
    found = [line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith("VmData:")]
    return int(found[0]) << 10


if __name__ == "__main__":
    main()
