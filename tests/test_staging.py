from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from starsd.export import staging
from starsd.export.staging import require_space, size_text, staged, storage_errors
from starsd.shared.errors import StorageError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_appears_when_done_and_replaces_what_was_there(tmp_path: Path) -> None:
    final = tmp_path / "models" / "one"
    with staged(final) as folder:
        assert folder.parent == final.parent
        (folder / "old").write_text("1")
        assert not final.exists()
    with staged(final) as folder:
        (folder / "new").write_text("2")
        assert names(final) == ["old"]
    assert names(tmp_path) == ["models", "new", "one"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_failure_leaves_all_as_it_was(tmp_path: Path, failure: type[BaseException]) -> None:
    final = tmp_path / "one"
    with staged(final) as folder:
        (folder / "old").write_text("1")

    def fail() -> None:
        with staged(final) as folder:
            (folder / "half").write_text("2")
            raise failure

    with pytest.raises(failure):
        fail()
    assert names(tmp_path) == ["old", "one"]


def test_replaces_where_the_file_system_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_exchange", lambda one, other: False)
    test_appears_when_done_and_replaces_what_was_there(tmp_path)


def test_names_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    for name in ("a" * 255, "ü" * 127):
        with staged(tmp_path / name) as folder:
            (folder / "file").write_text("1")
        assert names(tmp_path / name) == ["file"]
    with pytest.raises(StorageError, match=r"file name too long: choose a shorter name or point STARSD_HOME"):
        staged(tmp_path / ("a" * 256)).__enter__()
    assert len(list(tmp_path.iterdir())) == 2


def test_goes_to_where_a_link_points(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "one").symlink_to(tmp_path / "disk" / "one")
    with staged(tmp_path / "one") as folder:
        (folder / "file").write_text("1")
    assert names(tmp_path / "disk") == ["file", "one"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space left on device, 5 bytes needed: free some space"),
        (errno.EDQUOT, "disk quota exceeded, 5 bytes needed: free some space"),
        (errno.EFBIG, r"file too large, 5 bytes needed: allow larger files \(ulimit -f\)"),
        (errno.EROFS, "read-only file system, 5 bytes needed: make it writable"),
        (errno.EACCES, "permission denied, 5 bytes needed: make it writable"),
    ],
)
def test_full_or_forbidden_disk_is_a_storage_error(tmp_path: Path, number: int, message: str) -> None:
    def fail() -> None:
        with staged(tmp_path / "one", bytes_needed=5) as folder:
            (folder / "half").write_text("2")
            raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError, match=f"one: {message} or point STARSD_HOME elsewhere$"):
        fail()
    assert names(tmp_path) == []


def test_other_system_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), storage_errors(tmp_path):
        (tmp_path / "missing").read_text()


def test_space_is_checked_where_the_folder_will_be(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(StorageError, match=r"yet has .* free, expected 1000000000\.0 GB: free some space"):
        require_space(tmp_path / "not" / "yet", 10**18)
    with pytest.raises(StorageError), staged(tmp_path / "one", bytes_needed=10**18):
        pass
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_but_not_what_is_under_way(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\nfrom starsd.export.staging import staged\n"
        "with staged(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('1')\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "one")], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with staged(tmp_path / "two"):
            pass
        assert "half" in names(tmp_path)
        other.send_signal(signal.SIGKILL)
    with staged(tmp_path / "two"):
        pass
    assert names(tmp_path) == ["two"]


def _race(final: Path, mark: str, rounds: int) -> None:
    for _ in range(rounds):
        with staged(final) as folder:
            for name in ("a", "b", "c"):
                (folder / name).write_text(mark)


def test_racing_processes_leave_one_whole_folder_and_never_none(tmp_path: Path) -> None:
    final = tmp_path / "one"
    _race(final, "0", 1)
    context = multiprocessing.get_context("spawn")
    racers = [context.Process(target=_race, args=(final, mark, 40)) for mark in "12"]
    for racer in racers:
        racer.start()
    while any(racer.is_alive() for racer in racers):
        assert final.is_dir()
        time.sleep(0.001)
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert len({(final / name).read_text() for name in ("a", "b", "c")}) == 1
    assert names(tmp_path) == ["a", "b", "c", "one"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (92_871_040, "92.9 MB"), (999_960, "1.0 MB"), (10**13, "10000.0 GB")],
)
def test_sizes_read_well(count: int, text: str) -> None:
    assert size_text(count) == text
