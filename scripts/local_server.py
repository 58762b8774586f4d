"""A server of our own as a child process, for demos and benches: loopback, without TLS, on a free port."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import msgspec

from starsd.shared.errors import StarsdError

STOP_SECONDS = 5.0  # that it has to end by itself


class LocalServer:
    """Starts at once, and ends with the `with` block; `wait` returns when it is ready.

    It has a session of its own, so that Ctrl-C goes to us alone, who then end it.
    """

    def __init__(self, model: str, head: Path, schedule: str = "batched") -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
        argv = [sys.executable, "-m", "starsd.server.cli", "run", "--model", f"{model}={head}", "--dev", "--port", "0"]
        argv += ["--schedule", schedule, "--json"]
        self._child = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=self._said,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> str:
        """Its address, once it takes connections. Raises StarsdError with what kept it from that."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            status = self._child.wait()
            raise StarsdError(f"server did not start: {self._last_words() or f'exit status {status}'}")
        return str(msgspec.json.decode(line)["url"])

    def check(self) -> None:
        """Raises StarsdError when it has ended."""
        if (status := self._child.poll()) is not None:
            raise StarsdError(f"server ended: {self._last_words() or f'exit status {status}'}")

    def close(self) -> None:
        try:
            self._child.terminate()
            self._child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # whoever cannot wait, and presses Ctrl-C again, leaves nothing behind either
            self._child.kill()
            self._child.wait()
            if self._child.stdout is not None:
                self._child.stdout.close()
            self._said.close()

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _last_words(self) -> str:
        self._said.seek(0)
        found = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
        return found.removeprefix("starsd-server: ")
