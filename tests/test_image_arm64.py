"""An image of a real root file system for aarch64: our package installed in it, our programs run in it, by emulation.

    pytest -m arm64 tests/test_image_arm64.py

Debian makes the file system (mmdebstrap), which takes minutes; $STARSD_ARM64_TREE names a tar to keep it in. A Python
of its version has to be here too, since that one's pip knows which wheels it needs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from fake_bsp import KEY, make_bsp

from starsd.edge import image_manifest
from starsd.edge.enrol import Device
from starsd.edge.image_build import Builder, StageDone
from starsd.edge.image_bundles import Packed, find_bundles
from starsd.edge.image_deb import FIRST_BOOT, UNITS, settings_link
from starsd.edge.image_mounts import mounted, mounted_below
from starsd.edge.image_plan import Order
from starsd.edge.image_verify import verify
from starsd.edge.image_wheels import fill_wheelhouse, interpreter
from starsd.edge.l4t import open_bsp
from starsd.edge.l4t_boards import BOARDS
from starsd.edge.l4t_command import run

ROOT = Path(__file__).parent.parent
PACKAGES = "python3,systemd,sudo,openssh-client,libgomp1"
INSIDE = (
    "/usr/bin/env",
    "-i",
    "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/tmp",
    "LC_ALL=C.UTF-8",
    "STARSD_HOME=/tmp/starsd",
)

pytestmark = pytest.mark.arm64


class Image(NamedTuple):
    order: Order
    work: Path
    stages: list[StageDone]

    def run(self, *argv: str, network: bool = True) -> subprocess.CompletedProcess[str]:
        """A program of the image, in it; without `network` it has not even a way to this machine."""
        alone = [] if network else ["unshare", "--net"]
        command = [*alone, "chroot", str(self.order.root), *INSIDE, *argv]
        with mounted(self.order.root, lambda one: run(one, self.work / "test.log")):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "mounting takes root"
    for program in ("mmdebstrap", "qemu-aarch64-static"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if os.uname().machine != "aarch64" and not Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists():
        return "programs for aarch64 do not run here: update-binfmts --enable qemu-aarch64"
    return None


def _unpack_tree(root: Path, scratch: Path) -> None:
    kept = Path(os.environ.get("STARSD_ARM64_TREE") or scratch / "tree.tar")
    if not kept.is_file():
        debootstrap = ["mmdebstrap", "--architectures=arm64", "--variant=minbase", f"--include={PACKAGES}", "--quiet"]
        codename = next(
            line.partition("=")[2].strip('"')
            for line in Path("/etc/os-release").read_text().splitlines()
            if line.startswith("VERSION_CODENAME=")
        )
        subprocess.run([*debootstrap, codename, kept], check=True)
    shutil.rmtree(root)
    root.mkdir()
    subprocess.run(["tar", "-xpf", kept, "-C", root], check=True)
    resolver = root / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)  # mmdebstrap leaves this machine's
    resolver.symlink_to("../run/systemd/resolve/stub-resolv.conf")


def _tiny_bundle(place: Path) -> tuple[Packed, ...]:
    """What $STARSD_ARM64_BUNDLE names, else a small random model's; none where there is no torch to make one with."""
    if named := os.environ.get("STARSD_ARM64_BUNDLE"):
        return find_bundles([named])
    try:
        import tiny_model
    except ModuleNotFoundError:
        return ()
    return find_bundles([str(tiny_model.export(tiny_model.write_folder(place / "model"), place / "bundle"))])


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if "arm64" not in (request.config.getoption("-m") or ""):
        pytest.skip("takes minutes: ask for it with pytest -m arm64")
    if reason := _missing():
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("arm64")
    folder = make_bsp(place, "39")
    _unpack_tree(folder / "rootfs", place)
    bsp = open_bsp(folder)
    if shutil.which(interpreter(bsp.python)) is None:
        pytest.skip(f"the tree has Python {bsp.python}, which is not here")
    house = fill_wheelhouse(place / "wheels", bsp.python, str(ROOT), lambda one: run(one, place / "pip.log"))
    bundles = _tiny_bundle(place)
    device = Device(hostname="edge-7", token="hush-token")
    order = Order(
        bsp=bsp,
        board=BOARDS["orin-nano"],
        openrm=False,
        device=msgspec.structs.replace(device, model=bundles[0].name) if bundles else device,
        user="edge",
        keys=KEY.encode(),
        house=house,
        bundles=bundles,
    )
    stages: list[StageDone] = []
    Builder(order, place / "work", report=stages.append).build()
    yield Image(order, place / "work", stages)
    assert mounted_below(bsp.rootfs) == []
    shutil.rmtree(folder / "rootfs")


def test_the_audit_finds_nothing(image: Image) -> None:
    assert [one for one in verify(image.order.bsp, image.order.board) if one.error] == []
    assert mounted_below(image.order.root) == []


def test_the_edge_is_confined(image: Image) -> None:
    """By systemd's own measure, 0 being nothing allowed and 10 everything."""
    argv = ["systemd-analyze", "security", "--offline=yes", f"--root={image.order.root}", "--threshold=25"]
    if shutil.which(argv[0]) is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([*argv, "starsd-edge.service"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_a_second_build_repeats_nothing(image: Image) -> None:
    manifest = image.order.root / image_manifest.PLACE
    before, stages = manifest.read_bytes(), list[StageDone]()
    Builder(image.order, image.work, report=stages.append).build()
    assert manifest.read_bytes() == before
    assert [one.stage for one in stages if one.done] == ["manifest"]


def test_the_doctor_says_that_the_edge_is_whole(image: Image) -> None:
    report = json.loads(image.run("/usr/bin/starsd", "doctor", "--json").stdout)
    assert (report["system"], report["extras"]["edge"], report["extras"]["export"]) == ("Linux aarch64", [], [])
    assert [problem for problem in report["problems"] if problem["broken"]] == []


def test_systemd_takes_units_and_settings(image: Image) -> None:
    """Offline: the settings are those of the release that `current` leads to."""
    if shutil.which("systemctl") is None:
        pytest.skip("systemctl is not installed")
    root = image.order.root
    for unit in UNITS:
        settings = (root / settings_link(unit)).resolve()
        assert settings == (root / "opt/starsd/a/units").resolve() / unit.replace(".service", ".conf")
        done = subprocess.run(["systemctl", f"--root={root}", "is-enabled", unit], capture_output=True, check=False)
        assert done.stdout == b"enabled\n", done.stderr


def test_the_first_boot_takes_no_network(image: Image) -> None:
    """On a device that has the bundle that its device file names. Last, since the tree is no image then."""
    if not image.order.bundles:
        pytest.skip("torch is not installed, which makes a small bundle")
    markers = image.order.root / FIRST_BOOT
    markers.mkdir()
    (markers / "compile").touch()  # minutes by emulation; without byte code everything runs, too
    done = image.run("/usr/bin/starsd-edge", "first-boot", "--port", "0", "--json", network=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    ended = {row["step"]: (row["state"], row["note"]) for row in rows if row["state"] != "runs"}
    assert ended["model"] == ("done", "it answers")
    assert {name for name, (state, _) in ended.items() if state == "skipped"} <= {"storage", "clock"}
    ask = ["runuser", "-u", "starsd", "--", "/usr/bin/starsd-edge", "generate", "--model", image.order.bundles[0].name]
    ask += ["--prompt", "Is this so?", "--policy", "plain", "--max-new-tokens", "3", "--threads", "1", "--json"]
    done = image.run("/usr/bin/env", "STARSD_HOME=/var/lib/starsd", *ask, network=False)
    row: dict[str, Any] = msgspec.json.decode(done.stdout)
    assert row["new_tokens"] == len(row["token_ids"]) > 0
