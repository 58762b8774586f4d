"""How commands start and end: Ctrl-C and orders in their first moment, and readers that go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="tomllib came with Python 3.11")

ROOT = Path(__file__).parent.parent
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

# A command that takes long to import, as far as a signal that comes meanwhile can tell.
SLOW = """
import os, signal, sys
os.kill(os.getpid(), signal.{name})
print("imported", flush=True)

def main():
    from starsd.shared.entry import heard
    signal.signal(signal.{name}, lambda *_: print("obeyed", flush=True))
    heard((signal.SIGHUP, signal.SIGUSR1))
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
    return 7
"""


def started(folder: Path, name: str, hold: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """A command that gets the signal while it is imported."""
    (folder / "slow.py").write_text(SLOW.format(name=name))
    code = f"import signal, sys; from starsd.shared.entry import start; sys.exit(start('prog', 'slow', ({hold})))"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **options)  # type: ignore[call-overload,no-any-return]


def test_ctrl_c_during_the_imports(tmp_path: Path) -> None:
    done = started(tmp_path, "SIGINT")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nprog: interrupted\n")


def test_a_job_in_the_background_does_not_hear_ctrl_c(tmp_path: Path) -> None:
    done = started(tmp_path, "SIGINT", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stdout) == (7, "imported\nFalse\n")


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1"])
def test_orders_during_the_imports_wait_for_whoever_obeys_them(tmp_path: Path, name: str) -> None:
    done = started(tmp_path, name, "signal.SIGHUP, signal.SIGUSR1")
    assert (done.returncode, done.stdout) == (7, "imported\nobeyed\nTrue\n")
    done = started(tmp_path, name)
    assert (done.returncode, done.stdout) == (-signal.Signals[name], "")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_server_that_is_told_something_early_lives_on(number: signal.Signals) -> None:
    """It gets as far as its model, which is not there: an error of its own ends it."""
    command = [sys.executable, "-X", "importtime", "-m", "starsd.server", "run", "--dev", "--port", "0"]
    server = subprocess.Popen([*command, "--model", "no-such-model"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    assert any("msgspec" in line for line in server.stderr)  # imports are under way
    server.send_signal(number)
    said = server.stderr.read()
    assert (server.wait(60), said.splitlines()[-1].partition(":")[0]) == (1, "starsd-server"), said[-500:]


def test_every_command_starts_light() -> None:
    """Signals are heard before the libraries come."""
    places = {EntryPoint(name, value, "console_scripts").module for name, value in SCRIPTS.items()}
    assert len(places) == 4
    code = f"import sys, {', '.join(places)}; print(*sorted({{'msgspec', 'numpy', 'typer'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_command_says_its_own_name(name: str) -> None:
    module = EntryPoint(name, SCRIPTS[name], "console_scripts").module
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == name


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["models", "list"]])
def test_a_reader_that_has_gone_ends_a_command_quietly(argv: list[str], tmp_path: Path) -> None:
    end, start = os.pipe()
    os.close(end)
    (tmp_path / "models" / "some").mkdir(parents=True)
    environment = {**os.environ, "STARSD_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "starsd.scripts", *argv]
    with open(start, "w") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (141, "")
