"""One command of NVIDIA's tools or of the system, as `--dry-run` shows it and as it is run: streamed, and logged."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec

from starsd.edge.children import end_all, lines_of
from starsd.shared.errors import StarsdError, StorageError, UsageError
from starsd.shared.signals import ended_by_signals

KEPT_LINES = 5  # of a failed command's output, for its message
PATIENCE = 10.0  # seconds for a command that is interrupted to tidy up
Runner = Callable[["Command"], None]


class CommandError(StarsdError):
    """A command that could not be started, or that ended with another status than 0."""


class Command(msgspec.Struct, frozen=True):
    """`argv` run in folder `cwd` with `env` on top of the environment. Nothing secret is ever in either."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str] = {}

    def __str__(self) -> str:
        """As a shell takes it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join(["cd", shlex.quote(self.cwd), "&&", *settings, shlex.join(self.argv)])


def run(command: Command, log: Path, show: Callable[[str], None] = lambda line: None) -> None:
    """Run to the end; every line goes to the end of `log` and to `show` as it comes.

    Raises CommandError, with the last lines and the log's name, when it cannot start or fails; StorageError when there
    can be no log. Whatever interrupts this function, SIGTERM and SIGHUP too, ends the command and all that it started.
    What a command leaves running when it ends is left alone.
    """
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with _opened(log) as file, ended_by_signals():
        file.write(f"$ {command}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                command.argv,
                cwd=command.cwd,
                env={**os.environ, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                close_fds=False,  # it holds the lock of image_alone, too
                start_new_session=True,  # so that it can be ended whole
            )
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CommandError(f"{command.argv[0]} cannot be run in {command.cwd}: {reason}") from error
        with process:
            try:
                for line in lines_of(process):
                    file.write(f"{line}\n")
                    file.flush()
                    last.append(line.strip())
                    show(line.rstrip())
                process.wait()  # it may have closed its output before
            except BaseException:
                _end(process, file)
                raise
        file.write(f"# status {process.returncode}\n")
    if process.returncode:
        said = " / ".join(line for line in last if line) or "it said nothing"
        raise CommandError(f"{command.argv[0]} failed with status {process.returncode}: {said}; all of it is in {log}")


def _end(process: subprocess.Popen[bytes], log: TextIO) -> None:
    """End it; what it says of its tidying up goes to the log alone: a terminal may be gone."""
    hearing = threading.Thread(target=lambda: log.writelines(f"{line}\n" for line in lines_of(process)))
    hearing.start()
    end_all(process, PATIENCE)
    hearing.join()
    log.write("# interrupted\n")


def _opened(log: Path) -> TextIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return open(log, "a", encoding="utf-8", opener=_for_us)
    except OSError as error:
        raise StorageError(f"log {log} cannot be written: {(error.strerror or str(error)).lower()}") from error


def _for_us(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def must_be_root(what: str) -> None:
    """Raises UsageError for anyone else."""
    if os.geteuid() != 0:
        raise UsageError(f"{what} needs root, got user {os.geteuid()}: run it with sudo")
