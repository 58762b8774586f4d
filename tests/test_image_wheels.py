"""Wheelhouses, the package and the release: what goes in, and that the same gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fake_bsp import make_wheels, read_deb

from starsd.edge import image_wheels
from starsd.edge.cli import main
from starsd.edge.image_deb import UNITS, write_deb, write_release
from starsd.edge.image_wheels import (
    SOURCES,
    fill_commands,
    fill_wheelhouse,
    find_source,
    interpreter,
    read_wheelhouse,
    requirements,
    source_digest,
)
from starsd.edge.l4t_command import Command
from starsd.shared.errors import HashMismatchError, UsageError


def test_a_wheelhouse_is_read(tmp_path: Path) -> None:
    house = read_wheelhouse(make_wheels(tmp_path / "w"), "3.10")
    assert [wheel.name for wheel in house.wheels] == ["numpy", "pip", "starsd"]
    assert house.version == "0.1.0"
    digest = hashlib.sha256(b"ours").hexdigest()
    assert requirements(house).decode().splitlines()[1] == f"starsd==0.1.0 --hash=sha256:{digest}"
    (tmp_path / "w/pip-25.0-py3-none-any.whl").write_bytes(b"another")
    assert read_wheelhouse(tmp_path / "w", "3.10").digest != house.digest


@pytest.mark.parametrize(
    "name",
    [
        "a-1-py3-none-any.whl",
        "a_b-1.0.post1-py2.py3-none-any.whl",
        "a-1-cp310-cp310-manylinux2014_aarch64.whl",
        "a-1-cp39-abi3-manylinux_2_28_aarch64.whl",
        "a-1-1-cp310-none-manylinux_2_17_aarch64.manylinux2014_aarch64.whl",
    ],
)
def test_wheels_that_fit(tmp_path: Path, name: str) -> None:
    make_wheels(tmp_path / "w", **{name: b""})
    assert len(read_wheelhouse(tmp_path / "w", "3.10").wheels) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a-1-cp312-cp312-manylinux_2_17_aarch64.whl", "is for cp312-cp312, expected one for Python 3.10 on aarch64"),
        ("a-1-cp39-cp39-manylinux_2_17_aarch64.whl", "is for cp39-cp39, expected"),
        ("a-1-cp310-cp310-manylinux_2_17_x86_64.whl", "is for manylinux_2_17_x86_64, expected"),
        ("a-1-py2-none-any.whl", "is for py2-none, expected"),
        ("a.whl", "has no name of a wheel"),
        ("pip-26.0-py3-none-any.whl", "holds pip more than once, expected one version of each"),
    ],
)
def test_wheels_that_do_not_fit(tmp_path: Path, name: str, message: str) -> None:
    make_wheels(tmp_path / "w", **{name: b""})
    with pytest.raises(UsageError, match=message):
        read_wheelhouse(tmp_path / "w", "3.10")


@pytest.mark.parametrize("name", ["pip", "starsd"])
def test_a_wheelhouse_without_what_installs_it(tmp_path: Path, name: str) -> None:
    folder = make_wheels(tmp_path / "w")
    next(folder.glob(f"{name}-*")).unlink()
    with pytest.raises(UsageError, match=f"holds no wheel of {name}, expected starsd, pip and all they need"):
        read_wheelhouse(folder, "3.10")


def test_filling_asks_the_pip_of_the_devices_python(tmp_path: Path) -> None:
    build, download = fill_commands(tmp_path / "w", "3.99", "some/source")
    assert build.argv[:3] == ("python3.99", "-m", "pip")
    assert build.argv[5:] == ("wheel", "--no-deps", "--wheel-dir", str(tmp_path / "w/own"), str(tmp_path / "source"))
    assert {"--python-version", "3.99", "manylinux_2_28_aarch64", ":all:"} <= set(download.argv)
    assert download.argv[-2].startswith("starsd[export,update] @ file://")
    (download,) = fill_commands(tmp_path / "w", "3.99", "/x/starsd-9-py3-none-any.whl")
    assert download.argv[-2:] == ("starsd[export,update] @ file:///x/starsd-9-py3-none-any.whl", "pip")
    assert interpreter(f"3.{sys.version_info[1]}") == sys.executable


def test_filling_builds_a_copy_of_the_source(tmp_path: Path) -> None:
    source = tmp_path / "ours"
    for name in SOURCES:
        if "." in name or name == "LICENSE":
            (source / name).write_text("x")
        else:
            (source / name / "__pycache__").mkdir(parents=True)
            (source / name / "a.py").touch()
    seen: list[list[str]] = []

    def run(command: Command) -> None:
        seen.append(sorted(path.name for path in (tmp_path / "source").rglob("*")))
        make_wheels(tmp_path / "more")
        for path in (tmp_path / "more").iterdir():
            path.rename(tmp_path / "w" / path.name)
        (tmp_path / "more").rmdir()

    first = source_digest(str(source))
    house = fill_wheelhouse(tmp_path / "w", "3.10", str(source), run)
    assert house.version == "0.1.0"
    assert seen[0].count("a.py") == 5
    assert "__pycache__" not in seen[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "w"]
    (source / "edge/__pycache__/a.pyc").touch()
    assert source_digest(str(source)) == first
    (source / "edge/b.py").touch()
    assert source_digest(str(source)) not in (first, source_digest(str(source / "edge/b.py")), "")
    assert source_digest(str(tmp_path / "nothing")) == ""


def test_places_with_spaces_are_said_as_pip_reads_them(tmp_path: Path) -> None:
    ours = tmp_path / "o s"
    ours.mkdir()
    (ours / "pyproject.toml").write_text('[project]\nname = "starsd"\nversion = "9.8.7"\n')
    _, download = fill_commands(tmp_path / "a b/w", "3.99", str(ours))
    wanted = f"starsd[export,update] @ file://{tmp_path}/a%20b/w/own/starsd-9.8.7-py3-none-any.whl"
    assert download.argv[-2] == wanted


def test_the_source_is_ours_or_one_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Path(__file__).parent.parent
    assert find_source(None) == find_source(ours) == str(ours)
    monkeypatch.chdir(ours)
    assert find_source(Path()) == str(ours)
    wheel = tmp_path / "starsd-1-py3-none-any.whl"
    wheel.touch()
    assert find_source(wheel) == str(wheel)
    for other in (tmp_path, tmp_path / "missing", tmp_path / "missing.whl"):
        with pytest.raises(UsageError, match=rf"--source {other} has no edge, expected a wheel of starsd or a clone"):
            find_source(other)


def test_installed_apart_from_its_source_it_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image_wheels, "__file__", str(tmp_path / "site-packages/starsd/edge/image_wheels.py"))
    assert main(["image", "package", "--out", str(tmp_path / "out"), "--dry-run"]) == 1
    assert capsys.readouterr().err == (
        "starsd-edge: starsd runs apart from its source, expected --source FOLDER, a clone of its repository (or a "
        "wheel of it), or all wheels by --wheelhouse FOLDER\n"
    )
    for more in (["--wheelhouse", str(make_wheels(tmp_path / "w"))], ["--source", str(Path(__file__).parent.parent)]):
        assert main(["image", "package", "--out", str(tmp_path / "out"), "--dry-run", *more]) == 0


def data_of(deb: Path) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(read_deb(deb)["data.tar"]))


def test_the_package_holds_units_wheels_and_scripts(tmp_path: Path) -> None:
    house = read_wheelhouse(make_wheels(tmp_path / "w"), "3.10")
    write_deb(house, tmp_path / "x.deb")
    parts = read_deb(tmp_path / "x.deb")
    assert list(parts) == ["debian-binary", "control.tar.gz", "data.tar"]
    with tarfile.open(fileobj=io.BytesIO(parts["control.tar.gz"])) as control:
        text = control.extractfile("./control")
        assert text is not None
        fields = text.read().decode()
        assert control.getmember("./postinst").mode == 0o755
        script = control.extractfile("./postinst")
        assert script is not None
        assert b"\nexec 9>>/opt/starsd/.starsd.lock\nflock --nonblock 9 || " in script.read()
    assert "Version: 0.1.0\nArchitecture: arm64\n" in fields
    assert "Depends: python3 (>= 3.10), python3 (<< 3.11), " in fields
    with data_of(tmp_path / "x.deb") as data:
        members = {member.name: member for member in data.getmembers()}
    for unit in UNITS:
        assert members[f"./usr/lib/systemd/system/{unit}"].isreg()
        link = members[f"./usr/lib/systemd/system/{unit}.d/release.conf"]
        settings = f"../../../../../opt/starsd/current/units/{unit.removesuffix('.service')}.conf"
        assert link.linkname == settings
    assert (
        "./usr/share/starsd/wheelhouse/numpy-2.2.0-cp310-cp310-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"
        in members
    )
    assert members["./usr/bin/starsd-edge"].linkname == "/opt/starsd/current/bin/starsd-edge"
    assert members["./usr/lib/starsd/install-release"].mode == 0o755
    assert {(member.uid, member.gid, member.mtime) for member in members.values()} == {(0, 0, 1_700_000_000)}
    parents = [name.rpartition("/")[0] for name in members]
    assert all(parent in members or parent == "." for parent in parents)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "x.deb"]


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb, a program of Debian")
def test_debian_reads_the_package(tmp_path: Path) -> None:
    write_deb(read_wheelhouse(make_wheels(tmp_path / "w"), "3.10"), tmp_path / "x.deb")
    done = subprocess.run(["dpkg-deb", "-f", tmp_path / "x.deb", "Package"], capture_output=True, text=True, check=True)
    assert done.stdout == "starsd\n"
    subprocess.run(["dpkg-deb", "-x", tmp_path / "x.deb", tmp_path / "out"], check=True)
    assert (tmp_path / "out/usr/share/starsd/wheelhouse/starsd-0.1.0-py3-none-any.whl").read_bytes() == b"ours"


def test_the_same_wheels_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for number in range(2):
        folder = make_wheels(tmp_path / str(number))
        for path in folder.iterdir():
            path.chmod(0o600 + 0o44 * number)
        house = read_wheelhouse(folder, "3.10")
        write_deb(house, tmp_path / f"{number}.deb")
        write_release(house, tmp_path / f"{number}.tar")
        made.append([(tmp_path / f"{number}{end}").read_bytes() for end in (".deb", ".tar")])
    assert made[0] == made[1]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    write_release(house, tmp_path / "old.tar")
    assert (tmp_path / "old.tar").read_bytes() != made[0][1]


@pytest.mark.parametrize("said", ["abc", "", "-1", "1.5", "²", "9" * 12])
def test_a_time_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", said)
    house = read_wheelhouse(make_wheels(tmp_path / "w"), "3.10")
    with pytest.raises(UsageError, match=rf"SOURCE_DATE_EPOCH is '{said}', expected seconds since 1970"):
        write_deb(house, tmp_path / "x.deb")


def test_a_wheel_that_changes_meanwhile_spoils_no_package(tmp_path: Path) -> None:
    house = read_wheelhouse(make_wheels(tmp_path / "w"), "3.10")
    (tmp_path / "w/pip-25.0-py3-none-any.whl").write_bytes(b"pap")
    for write in (write_deb, write_release):
        with pytest.raises(HashMismatchError, match="changed while it was being used: start again"):
            write(house, tmp_path / "x")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["w"]


def test_the_command_makes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheels = make_wheels(tmp_path / "w")
    argv = [
        "image",
        "package",
        "--out",
        str(tmp_path / "out"),
        "--python",
        "3.10",
        "--wheelhouse",
        str(wheels),
        "--json",
    ]
    assert main(argv) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(row["file"]).name for row in rows] == ["starsd_0.1.0_arm64.deb", "starsd-0.1.0-cp310.tar"]
    with tarfile.open(rows[1]["file"]) as archive:
        about = archive.extractfile("./release.json")
        assert about is not None
        assert json.loads(about.read())["version"] == "0.1.0"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not on the path")
def test_the_installer_is_clean_shell() -> None:
    script = Path(__file__).parent.parent / "edge/units/install-release.sh"
    subprocess.run(["shellcheck", script], check=True)
