"""A driver's command that hangs ends with the process that asked it, however that comes to its own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from telemetry_trees import plain_pc

from starsd.edge import telemetry_look
from starsd.edge.telemetry_look import take_a_look
from starsd.edge.telemetry_process import ProcessTelemetry

PARENT = """
import sys
from starsd.edge.telemetry_process import ProcessTelemetry

telemetry = ProcessTelemetry(sys.argv[1:])
sys.stdin.read()
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which an nvidia-smi that hangs writes its number."""
    number, program = tmp_path / "number", tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $$ >{number}.new && mv {number}.new {number}\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return number


def command(root: Path) -> list[str]:
    """Without NVIDIA's module, so that its command is asked."""
    code = (
        "import sys; sys.modules['pynvml'] = None; import importlib.util as found; find = found.find_spec; "
        "found.find_spec = lambda name: None if name in ('pynvml', 'jtop') else find(name); "
        "from starsd.edge.telemetry_child import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code, "--every", "0.05", "--root", str(plain_pc(root))]


def eventually(right: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not right():
        assert time.monotonic() < until
        time.sleep(0.02)


def has_ended(number: Path) -> bool:
    try:
        state = Path(f"/proc/{int(number.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def test_when_telemetry_is_closed(tmp_path: Path, hanging: Path) -> None:
    telemetry = ProcessTelemetry(command(tmp_path / "root"))
    try:
        eventually(hanging.exists)
        assert not has_ended(hanging)
    finally:
        telemetry.close()
    eventually(lambda: has_ended(hanging))


def test_when_the_edge_is_killed(tmp_path: Path, hanging: Path) -> None:
    argv = [sys.executable, "-c", PARENT, *command(tmp_path / "root")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as parent:
        eventually(hanging.exists)
        assert not has_ended(hanging)
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: has_ended(hanging))


def test_after_a_look(tmp_path: Path, hanging: Path) -> None:
    found = take_a_look([*command(tmp_path / "root"), "--look"])
    assert "nvidia-smi" in found.missing["power_w"] or "nvidia: says nothing for 5 s" in found.missing["power_w"]
    assert found.reading.memory_total is not None
    eventually(lambda: has_ended(hanging))


def test_after_a_look_that_took_too_long(tmp_path: Path, hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_look, "START_SECONDS", -4.0)
    found = take_a_look(["sh", "-c", "nvidia-smi & wait"])
    assert found.missing["power_w"] == "the process that asks sensors hangs"
    eventually(lambda: has_ended(hanging))
