"""The shell scripts: sound, and a set-up that works once and then stays out of the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]

# Stands for Python: says that it is 3.11, and "makes an environment" whose python notes what it is asked to do.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
--version) echo "Python 3.11.9" ;;
"-m venv"*)
    echo venv >>"$LOG"
    for last; do :; done
    mkdir -p "$last/bin"
    cp "$0" "$last/bin/python"
    ;;
*pip*) echo "$*" >>"$LOG"; echo "WARNING: or error"; exit ${FAKE_PIP:-0} ;;
esac
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text().splitlines()
    subprocess.run(["bash", "-n", str(script)], check=True)
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([checker, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


class Clone:
    """A folder with the set-up script, a fake Python and a log of what that was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
        (folder / "pyproject.toml").write_text("[project]\n")
        (folder / "constraints.txt").write_text("numpy==2.4.6\n")
        self.python = folder / "python3"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        path = f"{self.folder}:{os.environ['PATH']}"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
        return subprocess.Popen(
            ["bash", str(self.folder / "scripts" / "setup.sh")],
            env={**environment, "PATH": path, "LOG": str(self.log), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self, **variables: str) -> tuple[int, str]:
        """Exit status and stderr; nothing may come on stdout."""
        with self.start(**variables) as process:
            out, err = process.communicate()
        assert out == ""
        return process.returncode, err

    def done(self) -> list[str]:
        """What was done since the last call: `venv`, or what pip was to install."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.partition("constraints.txt ")[2] or line for line in lines]


ALL = ["venv", "pip setuptools", "--no-build-isolation -e .[dev]"]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "a clone")


def test_set_up_works_once_and_then_does_nothing(clone: Clone) -> None:
    status, err = clone.set_up()
    assert (status, err) == (0, "setup: making .venv with Python 3.11.9, some minutes the first time\n")
    assert clone.done() == ALL
    assert clone.set_up() == (0, "")
    assert clone.done() == []


def test_set_up_follows_the_constraints(clone: Clone) -> None:
    clone.set_up()
    clone.done()
    (clone.folder / "constraints.txt").write_text("numpy==2.4.7\n")
    assert clone.set_up() == (0, "setup: updating .venv\n")
    assert clone.done() == ALL[1:]


def test_set_up_after_a_failure_starts_over(clone: Clone) -> None:
    status, err = clone.set_up(FAKE_PIP="3")
    assert status == 1
    assert err.splitlines()[1:] == ["WARNING: or error"]
    clone.done()
    assert clone.set_up()[0] == 0
    assert clone.done() == ALL


def test_set_up_in_a_moved_folder_starts_over(clone: Clone) -> None:
    clone.set_up()
    moved = clone.folder.with_name("moved")
    clone.folder.rename(moved)
    clone.folder, clone.log = moved, moved / "log"
    clone.done()
    assert clone.set_up()[0] == 0
    assert clone.done() == ALL


def test_two_set_ups_at_once_do_the_work_once(clone: Clone) -> None:
    if shutil.which("flock") is None:
        pytest.skip("flock is not installed")
    both = [clone.start() for _ in range(2)]
    for process in both:
        process.communicate()
    assert [process.returncode for process in both] == [0, 0]
    assert clone.done() == ALL


def test_set_up_refuses_another_python(clone: Clone) -> None:
    old = clone.folder / "old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.18 || exit 1\n')
    old.chmod(0o755)
    status, err = clone.set_up(PYTHON=str(old))
    assert (status, err) == (1, f"setup: PYTHON is {old} (Python 3.9.18), expected Python 3.10 to 3.13\n")
    assert not (clone.folder / ".venv").exists()


def test_set_up_takes_a_versioned_python_when_python3_does_not_fit(clone: Clone) -> None:
    clone.python.rename(clone.folder / "python3.12")
    clone.python.write_text("#!/bin/sh\nexit 1\n")
    clone.python.chmod(0o755)
    assert clone.set_up()[0] == 0
    assert clone.done() == ALL


# Stands for starsd: notes what it is asked, and answers when it is told to.
FAKE_STARSD = """#!/bin/sh
echo "$*" >>"$LOG"
touch "$LOG.begun"
trap 'kill $!; echo cleaned >>"$LOG"; exit 130' INT
sleep ${PAUSE:-0} &
wait $!
echo '{"edges":4,"identical":true}'
exit ${STATUS:-0}
"""


def start_demo(folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "starsd").write_text(FAKE_STARSD)
    (programs / "starsd").chmod(0o755)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "setup.sh").write_text('echo set up >>"$LOG"')
    shutil.copy(ROOT / "scripts" / "demo.sh", folder / "scripts")
    # whoever runs the tests may ignore SIGINT, and what is started would, too
    return subprocess.Popen(
        ["env", "--default-signal=INT", "bash", str(folder / "scripts" / "demo.sh"), *options],
        env={**os.environ, "LOG": str(folder / "log"), **variables},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("status", [0, 1])
def test_demo_sets_up_and_passes_on(status: int, tmp_path: Path) -> None:
    with start_demo(tmp_path, "--rtt", "20", "--head", "a b", STATUS=str(status)) as process:
        lines = process.communicate()[0].splitlines()
    assert process.returncode == status
    assert json.loads(lines[-1]) == {"edges": 4, "identical": True}
    assert (tmp_path / "log").read_text().splitlines() == ["set up", "demo --rtt 20 --head a b"]


def test_demo_is_interrupted_as_its_command_is(tmp_path: Path) -> None:
    with start_demo(tmp_path, PAUSE="60") as process:
        started = time.monotonic()
        while not (tmp_path / "log.begun").exists():
            assert time.monotonic() < started + 30
            time.sleep(0.02)
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)  # until everybody who could still write is gone
    assert process.returncode == 130
    assert (tmp_path / "log").read_text().splitlines() == ["set up", "demo", "cleaned"]
