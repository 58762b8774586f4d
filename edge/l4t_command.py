"""One command of NVIDIA's tools or of the system, as `--dry-run` shows it and as it is run: streamed, and logged."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from starsd.shared.errors import StarsdError, UsageError

KEPT_LINES = 5  # of a failed command's output, for its message
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

    Raises CommandError, with the last lines and the log's name, when it cannot start or fails. Whatever interrupts
    this function ends the command too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with log.open("a", encoding="utf-8") as file:
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
                text=True,
                errors="replace",
            )
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CommandError(f"{command.argv[0]} cannot be run in {command.cwd}: {reason}") from error
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    last.append(line.strip())
                    show(line.rstrip())
            except BaseException:
                process.terminate()
                raise
        file.write(f"# status {process.returncode}\n")
    if process.returncode:
        said = " / ".join(line for line in last if line) or "it said nothing"
        raise CommandError(f"{command.argv[0]} failed with status {process.returncode}: {said}; all of it is in {log}")


def must_be_root(what: str) -> None:
    """Raises UsageError for anyone else."""
    if os.geteuid() != 0:
        raise UsageError(f"{what} needs root, got user {os.geteuid()}: run it with sudo")
