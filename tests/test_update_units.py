"""What an update brings of systemd's units, what it may not, and that both ways lead back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from test_update import Device, Signer, make_release

from starsd.edge.image_deb import SYSTEM, SYSUSERS, UNITS, settings_link, settings_target
from starsd.edge.update import update
from starsd.edge.update_slots import Slots, UpdateError
from starsd.edge.update_units import unit_problem


def ours() -> Path:
    return Path(str(resources.files("starsd.edge").joinpath("units")))


class Root(Device):
    """A device with its package installed, below a folder; the settings of each release name its version."""

    def __init__(self, folder: Path, signer: Signer) -> None:
        super().__init__(folder, signer)
        self.root, self.slots = folder, Slots(folder / "opt/starsd")
        for unit in UNITS:
            place = folder / settings_link(unit)
            place.parent.mkdir(parents=True)
            place.symlink_to(settings_target(unit))
            shutil.copy(ours() / unit, folder / SYSTEM / unit)
        (folder / SYSUSERS).parent.mkdir(parents=True)
        shutil.copy(ours() / "starsd-sysusers.conf", folder / SYSUSERS)
        self.spoil: Callable[[Path], object] = lambda units: None
        self.loaded: list[str] = []

    def install(self, wheelhouse: Path, slot: Path) -> None:
        super().install(wheelhouse, slot)
        shutil.rmtree(slot / "units", ignore_errors=True)
        shutil.copytree(ours(), slot / "units")
        (slot / "units/starsd-edge.conf").write_text(f"# {self.slots.version(slot.name)}\n")
        self.spoil(slot / "units")

    def settings(self) -> str:
        """What systemd reads beside the edge's unit."""
        place = self.root / settings_link("starsd-edge.service")
        return place.read_text() if place.exists() else ""

    def restart(self, link: Path) -> None:
        self.loaded.append(self.settings())
        super().restart(link)

    def bring(self, file: Path) -> None:
        update(
            file,
            self.key,
            self.slots,
            install=self.install,
            units=lambda slot, link: unit_problem(slot, link, self.root),
            self_test=self.self_test,
            restart=self.restart,
            machine="aarch64",
        )


@pytest.fixture
def device(tmp_path: Path) -> Root:
    signer = Signer()
    made = Root(tmp_path, signer)
    for version in ("0.1.0", "0.2.0", "0.3.0"):
        make_release(tmp_path, signer, version)
    made.bring(tmp_path / "starsd-0.1.0.tar")
    return made


def test_settings_of_units_come_with_a_release_and_go_with_it(device: Root, tmp_path: Path) -> None:
    assert device.settings() == "# 0.1.0\n"
    device.bring(tmp_path / "starsd-0.2.0.tar")
    assert (device.settings(), device.loaded) == ("# 0.2.0\n", ["# 0.1.0\n", "# 0.2.0\n"])
    device.does_not_start.add("0.3.0")
    with pytest.raises(UpdateError, match=r"0\.3\.0 did not come up, back at 0\.2\.0: starsd-edge\.service does not"):
        device.bring(tmp_path / "starsd-0.3.0.tar")
    assert device.settings() == "# 0.2.0\n"
    assert device.loaded[2:] == ["# 0.3.0\n", "# 0.2.0\n"]


def text(path: Path) -> None:
    path.write_text("other\n")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda units: text(units / "starsd-edge.service"), r"needs another starsd-edge\.service than this device has"),
        (lambda units: text(units / "starsd-new.service"), r"needs another starsd-new\.service than this device has"),
        (lambda units: (units / "starsd-edge.service").unlink(), r"has no starsd-edge\.service, which this device has"),
        (lambda units: text(units / "starsd-sysusers.conf"), "needs another user or other groups than this device has"),
        (shutil.rmtree, r"has no starsd-edge\.service, which this device has"),
    ],
    ids=["other unit", "new unit", "dropped unit", "other user", "no units"],
)
def test_a_release_that_takes_its_package_is_refused(
    device: Root, tmp_path: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    device.spoil = spoil
    with pytest.raises(
        UpdateError, match=rf"0\.2\.0 {problem}, which takes its package: run apt install \./starsd_0\.2"
    ):
        device.bring(tmp_path / "starsd-0.2.0.tar")
    assert (device.runs(), device.settings(), device.started) == ("0.1.0", "# 0.1.0\n", ["0.1.0"])
    device.spoil = lambda units: None
    device.bring(tmp_path / "starsd-0.2.0.tar")
    assert device.settings() == "# 0.2.0\n"


def test_a_package_whose_links_lead_elsewhere_takes_no_settings(device: Root) -> None:
    link = device.root / settings_link("starsd-edge.service")
    link.unlink()
    assert unit_problem(device.slots.folder / "a", device.slots.link, device.root) == (
        f"brings settings of starsd-edge.service, and {link} does not lead to them"
    )
    link.symlink_to(device.slots.link / "units/starsd-edge.conf")
    assert unit_problem(device.slots.folder / "a", device.slots.link, device.root) is None


def test_without_a_package_there_is_nothing_to_compare(device: Root, tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / SYSTEM / unit).unlink()
    device.spoil = shutil.rmtree
    device.bring(tmp_path / "starsd-0.2.0.tar")
    assert device.runs() == "0.2.0"


def test_every_unit_is_in_two_parts() -> None:
    """The package's says what starts it and nothing that a release may want to change."""
    found = {path.name for path in ours().iterdir() if path.suffix in (".service", ".conf")}
    assert found == {*UNITS, *(unit.replace(".service", ".conf") for unit in UNITS), "starsd-sysusers.conf"}
    for unit in UNITS:
        fixed = (ours() / unit).read_text()
        keys = [line.partition("=")[0] for line in fixed.splitlines() if line[:1] not in ("#", "[", "")]
        assert set(keys) <= {"Description", "Documentation", "WantedBy"}
        assert "ExecStart=" in (ours() / unit.replace(".service", ".conf")).read_text()
