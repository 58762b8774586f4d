"""A small Linux_for_Tegra whose tools write down how they were called, and the system's commands as such fakes.

Run as a program it is one of those commands: `chroot` unpacks a .deb as dpkg would, as far as tests care.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

RELEASES = {"36": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic", "39": "# R39 (release), REVISION: 2.0"}
PASSWD = "root:x:0:0:root:/:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
SHADOW = "root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n"
GROUP = "root:x:0:\nshadow:x:42:\nsudo:x:27:\nvideo:x:44:ada\nnogroup:x:65534:\n"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJq3fVf1nUSBpkZGYtF2tRvQ3mHq0dH8dPZ5vG0p9QxL ada@desk\n"
FAKES = ("chroot", "mount", "umount")
END = "\037"  # of an argument
CONFIGS = ("jetson-orin-nano-devkit-super", "jetson-agx-orin-devkit", "jetson-agx-thor-devkit")


def make_bsp(folder: Path, release: str = "36", packages: tuple[str, ...] = ()) -> Path:
    """A package of that branch with a root file system, in `folder`/Linux_for_Tegra."""
    bsp = folder / "Linux_for_Tegra"
    for name in ("nv_tegra", "tools/kernel_flash", "bootloader"):
        (bsp / name).mkdir(parents=True)
    for name in ("apply_binaries.sh", "tools/l4t_flash_prerequisites.sh", "tools/kernel_flash/l4t_initrd_flash.sh"):
        recorder(bsp / name, bsp / "calls")
    for chip in ("t234", "t264"):
        (bsp / f"tools/kernel_flash/flash_l4t_{chip}_nvme.xml").touch()
    for config in CONFIGS:
        (bsp / f"{config}.conf").touch()
    branch = RELEASES[release].replace("# R", "").split()[0]
    (bsp / "nv_tegra/bsp_version").write_text(f"# version\nBSP_BRANCH={branch}\nBSP_MAJOR=4\nBSP_MINOR=3\n")
    make_tree(bsp / "rootfs", packages)
    return bsp


def make_tree(root: Path, packages: tuple[str, ...] = ()) -> None:
    for name in ("usr/bin", "usr/sbin", "etc/ssh", "etc/systemd/system", "var/lib/dpkg", "dev", "proc", "run", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    for name, text in (("passwd", PASSWD), ("shadow", SHADOW), ("group", GROUP)):
        (root / "etc" / name).write_text(text)
    (root / "etc/ssh/ssh_host_rsa_key").write_text("another device's")
    (root / "etc/systemd/system/default.target").symlink_to("/lib/systemd/system/nv-oem-config.target")
    (root / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    entries = [f"Package: {name}\nStatus: install ok installed\n" for name in ("base-files", *packages)]
    (root / "var/lib/dpkg/status").write_text("\n".join(entries))


def recorder(path: Path, calls: Path, then: str = "") -> Path:
    """A program that appends its name and arguments to `calls`, a line a call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nprintf \'%s{END}\' "${{0##*/}}" "$@" >>{calls}\necho >>{calls}\n{then}\n')
    path.chmod(0o755)
    return path


def calls_of(file: Path) -> list[list[str]]:
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [line.split(END)[:-1] for line in lines]


def fake_commands(folder: Path, calls: Path) -> Path:
    """A folder for the beginning of PATH."""
    for name in FAKES:
        then = f'exec {sys.executable} -S {__file__} "$@"' if name == "chroot" else ""
        recorder(folder / name, calls, then)
    return folder


def let_anyone_own(monkeypatch: Any) -> None:
    """Only root may give files away; for others nothing happens, and who owns a file is not looked at."""
    if os.geteuid() != 0:
        for name in ("chown", "fchown", "lchown"):
            monkeypatch.setattr(os, name, lambda *arguments: None)


def make_wheels(folder: Path, version: str = "0.1.0", **more: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / f"starsd-{version}-py3-none-any.whl").write_bytes(b"ours")
    (folder / "pip-25.0-py3-none-any.whl").write_bytes(b"pip")
    (folder / "numpy-2.2.0-cp310-cp310-manylinux_2_17_aarch64.manylinux2014_aarch64.whl").write_bytes(b"numbers")
    for name, content in more.items():
        (folder / name).write_bytes(content)
    return folder


def read_deb(path: Path) -> dict[str, bytes]:
    """The members of an ar archive."""
    raw, found = path.read_bytes(), {}
    assert raw.startswith(b"!<arch>\n")
    at = 8
    while at < len(raw):
        name, size = raw[at : at + 16].decode().strip(), int(raw[at + 48 : at + 58])
        found[name] = raw[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return found


def _chroot(root: Path, argv: list[str]) -> None:
    assert argv[:2] == ["/usr/bin/env", "-i"], argv
    assert argv[-3:-1] == ["dpkg", "--install"], argv
    data = read_deb(root / argv[-1].lstrip("/"))["data.tar"]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        if hasattr(tarfile, "fully_trusted_filter"):  # older Pythons trust everything anyway
            archive.extraction_filter = tarfile.fully_trusted_filter
        archive.extractall(root)
    current = root / "opt/starsd/current"
    name = "b" if current.is_symlink() and os.readlink(current) == "a" else "a"
    slot = root / "opt/starsd" / name
    for folder in (slot / "bin", slot / "units"):
        folder.mkdir(parents=True, exist_ok=True)
    for program in ("starsd", "starsd-edge"):
        (slot / "bin" / program).write_text("#!/bin/sh\n")
    for unit in (root / "usr/lib/systemd/system").glob("starsd-*.service"):
        (slot / f"units/{unit.stem}.conf").touch()
    (root / "opt/starsd/.starsd.lock").write_text(f"{os.getpid()}\n")
    current.unlink(missing_ok=True)
    current.symlink_to(name)


if __name__ == "__main__":
    _chroot(Path(sys.argv[1]), sys.argv[2:])
