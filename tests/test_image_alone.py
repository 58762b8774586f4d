"""One at a time: of two builds, flashes or updates the second is refused; a killed one is in nobody's way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from starsd.edge import image_alone
from starsd.edge.image_alone import NAME, alone
from starsd.shared.errors import StorageError, UsageError

HOLDER = """
import subprocess, sys
from pathlib import Path
from starsd.edge.image_alone import alone
with alone("build", Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", sys.argv[2]], close_fds=False)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path, child_seconds: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that has the lock, and a command of its that runs so long."""
    argv = [sys.executable, "-c", HOLDER, str(folder), child_seconds]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()


def test_the_second_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    with holder(tmp_path, "0") as (process, _):
        expected = f"another build is under way, process {process.pid}: wait for its end"
        for _ in range(2):
            with pytest.raises(UsageError) as refused, alone("build", tmp_path):
                pass
            assert str(refused.value) == expected
    with alone("build", tmp_path):
        assert (tmp_path / NAME).read_text() == f"{os.getpid()}\n"


def test_one_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    with holder(tmp_path, "0") as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        with alone("build", tmp_path):
            pass


def test_what_a_killed_one_started_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two of NVIDIA's scripts would work in one tree."""
    with holder(tmp_path, "60") as (process, child):
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken note
        monkeypatch.setattr(image_alone, "GRACE", 0.2)
        killed = f"another build, process {process.pid}, was killed, and what it started still runs: "
        told = f"{killed}wait for its end, or see fuser {tmp_path}/{NAME}"
        with pytest.raises(UsageError, match=told), alone("build", tmp_path):
            pass
        process.wait()
        with pytest.raises(UsageError, match=killed), alone("build", tmp_path):
            pass
        os.kill(child, signal.SIGTERM)
        monkeypatch.setattr(image_alone, "GRACE", 30.0)
        with alone("build", tmp_path):
            pass


def test_different_names_and_folders_do_not_meet(tmp_path: Path) -> None:
    with alone("build", tmp_path), alone("flash", tmp_path, "usb.lock"), alone("build", tmp_path / "new/folder"):
        assert (tmp_path / "new/folder" / NAME).is_file()


def test_it_is_let_go_of_however_it_ends(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), alone("build", tmp_path):
            raise KeyboardInterrupt


def test_the_lock_file_leads_nowhere_else(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("kept")
    folder.mkdir()
    for plant, message in (
        ((folder / NAME).symlink_to, "cannot be locked: too many levels of symbolic links"),
        ((folder / NAME).hardlink_to, "cannot be locked: it is no plain file, remove it"),
    ):
        plant(precious)
        with pytest.raises(StorageError, match=message), alone("build", folder):
            pass
        assert precious.read_text() == "kept"
        (folder / NAME).unlink()
    os.mkfifo(folder / NAME)
    with pytest.raises(StorageError, match="it is no plain file"), alone("build", folder):
        pass
    (tmp_path / "file").touch()
    in_the_way = r"file/\.starsd\.lock cannot be locked: file exists"
    with pytest.raises(StorageError, match=in_the_way), alone("build", tmp_path / "file"):
        pass


def test_others_may_not_write_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with alone("build", tmp_path):
            assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o644
    finally:
        os.umask(before)
