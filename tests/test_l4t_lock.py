"""The lock file: which archives are unpacked, and that nobody takes half of them for the whole."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fake_bsp import recorder

from starsd.edge.cli import main
from starsd.edge.l4t_lock import check_archives, encode, locked, make_lock, read_lock
from starsd.shared.errors import HashMismatchError, UsageError

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="a root file system is unpacked by root")


def make_tar(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w:bz2") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.mode = 0o755
            archive.addfile(info, io.BytesIO())
    return path


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two of them, in a folder of the current one."""
    folder = tmp_path / "here/downloads"
    folder.mkdir(parents=True)
    make_tar(folder / "Jetson.tbz2", "Linux_for_Tegra/", "Linux_for_Tegra/rootfs/", "Linux_for_Tegra/flash.sh")
    make_tar(folder / "Sample.tbz2", "./", "./usr/", "./usr/sh", "./etc/")
    monkeypatch.chdir(tmp_path / "here")
    return folder


LOCK = ["image", "lock", "downloads/Jetson.tbz2", "downloads/Sample.tbz2"]
UNPACK = ["image", "unpack", "--archives", "downloads", "--dest", "jetson"]  # as docs/jetson.md has it


def test_a_lock_file_pins_both_archives(archives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bsp, rootfs = archives / "Jetson.tbz2", archives / "Sample.tbz2"
    assert main(LOCK) == 0
    assert capsys.readouterr().out == "starsd-lock.json\n"
    lock = read_lock(Path("starsd-lock.json"))
    assert lock == make_lock(bsp, rootfs)
    assert lock.hashes() == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (bsp, rootfs)}
    assert check_archives(lock, archives) == (bsp, rootfs)
    rootfs.write_bytes(b"another tree")
    with pytest.raises(HashMismatchError, match=r"Sample.tbz2 has SHA-256 \w{64}, expected \w{64}"):
        check_archives(lock, archives)
    rootfs.unlink()
    with pytest.raises(UsageError, match="is missing, expected the archive that the lock file pins"):
        check_archives(lock, archives)


def test_a_lock_file_is_kept(archives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LOCK) == main(LOCK) == 0
    kept = Path("starsd-lock.json").read_bytes()
    make_tar(archives / "Sample.tbz2", "./", "./bin/")
    assert main(LOCK) == 1
    message = "starsd-lock.json pins other archives, expected none: remove it, or name another with --lock\n"
    assert capsys.readouterr().err.endswith(message)
    assert Path("starsd-lock.json").read_bytes() == kept


def test_archives_that_are_none_or_in_the_others_place_are_not_pinned(archives: Path) -> None:
    bsp, rootfs = archives / "Jetson.tbz2", archives / "Sample.tbz2"
    first = "expected the driver package, which has Linux_for_Tegra, first, and the sample root file system second"
    with pytest.raises(UsageError, match=f"Sample.tbz2 has 'usr' at its top, {first}"):
        make_lock(rootfs, bsp)
    with pytest.raises(UsageError, match=f"Jetson.tbz2 has 'Linux_for_Tegra' at its top, {first}"):
        make_lock(bsp, bsp.with_name("Jetson.tbz2"))
    bsp.rename(archives / "Jetson (1).tbz2")
    with pytest.raises(UsageError, match=r"Jetson \(1\)\.tbz2 has more than letters, digits and any of . _ - in its"):
        make_lock(archives / "Jetson (1).tbz2", rootfs)
    for raw in (b"", b"BZh9 and no more", rootfs.read_bytes()[:-30]):
        bsp.write_bytes(raw)
        with pytest.raises(UsageError, match=r"Jetson\.tbz2 cannot be read, expected an archive of NVIDIA's: "):
            make_lock(bsp, rootfs)
    make_tar(bsp, "./")
    with pytest.raises(UsageError, match=r"Jetson\.tbz2 is empty, expected an archive of NVIDIA's"):
        make_lock(bsp, rootfs)
    with pytest.raises(UsageError, match="missing is no file, expected an archive of NVIDIA's"):
        make_lock(archives / "missing", rootfs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "cannot be read: Object missing required field `bsp`"),
        (
            '{"bsp": {"file": "../a", "sha256": "00"}, "rootfs": {"file": "b", "sha256": "00"}}',
            r"pins '\.\./a', expected a",
        ),
    ],
)
def test_lock_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lock").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_lock(tmp_path / "lock")


@ROOT_ONLY
def test_what_is_pinned_is_unpacked(archives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LOCK) == 0
    capsys.readouterr()
    assert main([*UNPACK, "--dry-run", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    dest = archives.parent / "jetson"
    assert not dest.exists()
    scratch = f"{dest}/.starsd-unpacking"
    assert [row["argv"] for row in rows] == [
        ["mkdir", scratch],
        ["tar", "-xpf", str(archives / "Jetson.tbz2"), "-C", scratch],
        ["tar", "-xpf", str(archives / "Sample.tbz2"), "-C", f"{scratch}/Linux_for_Tegra/rootfs"],
        ["mv", "-T", f"{scratch}/Linux_for_Tegra", f"{dest}/Linux_for_Tegra"],
    ]
    assert main(UNPACK) == 0
    assert capsys.readouterr().out == f"{dest}/Linux_for_Tegra\n"
    assert (dest / "Linux_for_Tegra/rootfs/usr/sh").is_file()
    assert sorted(path.name for path in dest.iterdir()) == [".starsd.lock", "Linux_for_Tegra", "unpack.log"]
    assert locked(dest / "Linux_for_Tegra") == read_lock(Path("starsd-lock.json")).hashes()
    assert main(UNPACK) == 1
    assert capsys.readouterr().err.endswith("jetson/Linux_for_Tegra exists already, expected nothing there\n")


@ROOT_ONLY
@pytest.mark.parametrize("killed", [True, False])
def test_half_a_package_is_never_taken_for_the_whole(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Killed, or out of room, while the root file system is unpacked."""
    assert main(LOCK) == 0
    then = 'case "$2" in *Sample*) kill -9 $PPID;; esac' if killed else 'case "$2" in *Sample*) exit 2;; esac'
    recorder(tmp_path / "bin/tar", tmp_path / "calls", f'/usr/bin/env -u PATH tar "$@"; {then}')
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        script = "import sys; from starsd.edge.cli import main; sys.exit(main(sys.argv[1:]))"
        done = subprocess.run([sys.executable, "-c", script, *UNPACK], check=False, capture_output=True)
    assert done.returncode == (-9 if killed else 1), done.stderr
    dest = archives.parent / "jetson"
    assert not (dest / "Linux_for_Tegra").exists()
    assert (dest / ".starsd-unpacking").exists() == killed
    assert main(UNPACK) == 0
    assert (dest / "Linux_for_Tegra/rootfs/usr/sh").is_file()
    assert not (dest / ".starsd-unpacking").exists()


def test_a_package_remembers_its_lock(archives: Path) -> None:
    assert locked(archives) == {}
    lock = make_lock(archives / "Jetson.tbz2", archives / "Sample.tbz2")
    (archives / "starsd-lock.json").write_bytes(encode(lock))
    assert locked(archives) == lock.hashes()
