"""An update for real: wheels, the installer, environments, their programs. Only the release is a small one."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_update import HERE, Signer

from starsd.edge.image_deb import write_release
from starsd.edge.image_wheels import read_wheelhouse
from starsd.edge.update import update
from starsd.edge.update_slots import Slots, UpdateError

pytestmark = pytest.mark.slow
MAIN = "stub_of_starsd:main"
PROGRAM = """import sys

def main():
    print("starsd-edge VERSION", *sys.argv[1:])
    return STATUS if "doctor" in sys.argv else 0
"""


def pip_wheel() -> Path:
    """The one that Python brings along."""
    spec = importlib.util.find_spec("ensurepip")
    found = sorted((Path(spec.origin).parent / "_bundled").glob("pip-*.whl")) if spec and spec.origin else []
    if not found:
        pytest.skip("this Python brings no wheel of pip")
    return found[-1]


def write_wheel(folder: Path, version: str, status: int) -> None:
    """A wheel named starsd, whose doctor ends with `status`, and with settings of its own for the edge's unit."""
    info = f"starsd-{version}.dist-info"
    files = {
        "stub_of_starsd.py": PROGRAM.replace("VERSION", version).replace("STATUS", str(status)),
        "starsd/edge/units/starsd-edge.conf": f"# {version}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: starsd\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\nstarsd = {MAIN}\nstarsd-edge = {MAIN}\n",
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"starsd-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def make_release(folder: Path, signer: Signer, version: str, status: int = 0) -> Path:
    wheels = folder / f"wheels-{version}"
    wheels.mkdir()
    write_wheel(wheels, version, status)
    shutil.copy(pip_wheel(), wheels)
    file = folder / f"starsd-{version}.tar"
    write_release(read_wheelhouse(wheels, HERE), file)
    signer.sign(file)
    return file


def says(slots: Slots) -> str:
    return subprocess.run(
        [slots.link / "bin/starsd-edge", "x"], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_releases_are_installed_tried_and_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("PIP_NO_INDEX", "0")  # what the installer must not heed
    signer = Signer()
    key, slots = signer.public(tmp_path / "key"), Slots(tmp_path / "opt")
    before = os.umask(0o077)  # of root, on some systems
    try:
        update(make_release(tmp_path, signer, "0.1.0"), key, slots, machine="aarch64")
    finally:
        os.umask(before)
    private = [path for path in (slots.folder / "a").rglob("*") if path.stat().st_mode & 0o044 != 0o044]
    assert private == []  # the edge's user reads all of it
    assert (slots.folder / "a").stat().st_mode & 0o777 == 0o755
    assert (says(slots), slots.version("a")) == ("starsd-edge 0.1.0 x", "0.1.0")
    assert list((slots.folder / "a").rglob("__pycache__/stub_of_starsd.*.pyc"))
    assert (slots.link / "units/starsd-edge.conf").read_text() == "# 0.1.0\n"
    update(make_release(tmp_path, signer, "0.2.0"), key, slots, machine="aarch64")
    assert (says(slots), slots.current()) == ("starsd-edge 0.2.0 x", "b")
    assert (slots.link / "units/starsd-edge.conf").read_text() == "# 0.2.0\n"
    assert not os.path.isabs(os.readlink(slots.link / "units"))
    with pytest.raises(UpdateError, match=r"the self-test of the release failed: starsd-edge 0\.3\.0 doctor --json"):
        update(make_release(tmp_path, signer, "0.3.0", status=1), key, slots, machine="aarch64")
    assert says(slots) == "starsd-edge 0.2.0 x"
    wheels = tmp_path / "wheels-0.2.0"
    with (wheels / "starsd-0.2.0-py3-none-any.whl").open("ab") as file:
        file.write(b" ")
    house = read_wheelhouse(wheels, HERE)
    write_release(house, tmp_path / "spoilt.tar")
    raw = (tmp_path / "spoilt.tar").read_bytes()
    listed = next(wheel.sha256 for wheel in house.wheels if wheel.name == "starsd").encode()
    (tmp_path / "spoilt.tar").write_bytes(raw.replace(listed, listed[::-1]))
    signer.sign(tmp_path / "spoilt.tar")
    with pytest.raises(UpdateError, match="the release cannot be installed: "):
        update(tmp_path / "spoilt.tar", key, slots, machine="aarch64")
    assert says(slots) == "starsd-edge 0.2.0 x"
