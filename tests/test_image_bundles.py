"""Bundles in an image: found, copied whole, part of its manifest, and audited."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from fake_bsp import KEY, fake_commands
from test_bundle import write_bundle
from test_image_build import build, make_order, state

from starsd.edge import image_manifest
from starsd.edge.cli import main
from starsd.edge.enrol import Device
from starsd.edge.image_bundles import Packed, bundle_steps, find_bundle, find_bundles
from starsd.edge.image_tree import Copy, apply, is_applied
from starsd.edge.image_verify import verify
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_PRECISION
from starsd.shared.errors import BundleError, HashMismatchError, UsageError

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make files of others, which is what is audited")
PLACE = "var/lib/starsd/bundles/tiny/ort-int4"
FILES = ["manifest.json", "model.onnx", "model.onnx.data", "tokenizer.json"]


@pytest.fixture
def bundle(starsd_home: Path) -> Path:
    """One in the store, beside an engine that was built from it here."""
    folder = write_bundle(starsd_home / "bundles/tiny/ort-int4")
    (folder / "model.engine").write_bytes(b"for another GPU")
    return folder


@pytest.fixture(autouse=True)
def _fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_commands(tmp_path / "bin", tmp_path / "Linux_for_Tegra/calls")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_bundle_is_found_by_folder_name_and_model(bundle: Path) -> None:
    for text in (str(bundle), "tiny/ort-int4"):
        found = find_bundle(text)
        assert (found.folder, found.name) == (bundle, "tiny/ort-int4")
        assert found.bytes == sum((bundle / name).stat().st_size for name in FILES[1:])
    folder = write_bundle(bundle.parent.parent / f"smollm2-135m/ort-{DEFAULT_PRECISION}", DEFAULT_PRECISION)
    assert find_bundle("smollm2-135m").folder == folder
    fp32 = write_bundle(bundle.parent.parent / "smollm2-135m/ort-fp32", "fp32")
    assert find_bundle("smollm2-135m", "fp32").folder == fp32
    message = r"hf:a/b has no bundle in int8 below .*home, expected one: run starsd-export onnx hf:a/b --precision int8"
    with pytest.raises(UsageError, match=message):
        find_bundle("hf:a/b", "int8")
    with pytest.raises(UsageError, match="model 'nothing' is unknown, expected one of smollm2-135m, hf:org/name or an"):
        find_bundle("nothing")
    with pytest.raises(UsageError, match="got bundle tiny/ort-int4 more than once, expected each once"):
        find_bundles(["tiny/ort-int4", str(bundle)])


def test_names_that_lead_elsewhere_are_refused(bundle: Path) -> None:
    about = msgspec.structs.replace(manifest.read(bundle), name="../../etc")
    manifest.write(about, bundle)
    with pytest.raises(BundleError, match=r"is of model '\.\./\.\./etc', expected a plain name: export it again"):
        find_bundle(str(bundle))


@pytest.mark.parametrize(
    ("device", "name", "serves"),
    [
        (Device(model="tiny/ort-int4"), "tiny", True),
        (Device(model="tiny/ort-int4", precision="int8"), "tiny", False),
        (Device(model="tiny"), "tiny", False),
        (Device(precision="int4"), "smollm2-135m", True),
        (Device(precision="fp32"), "smollm2-135m", False),
        (Device(), "smollm2-135m", DEFAULT_PRECISION == "int4"),
        (Device(model="hf:a/b", precision="int4"), "a--b", True),
    ],
)
def test_whether_a_bundle_is_what_a_device_opens(bundle: Path, device: Device, name: str, serves: bool) -> None:
    found = find_bundle(str(bundle))
    named = Packed(found.folder, msgspec.structs.replace(found.about, name=name), found.raw)
    assert named.serves(device) is serves


def test_a_copy_that_is_not_what_was_expected_leaves_nothing(tmp_path: Path, bundle: Path) -> None:
    copy = next(step for step in bundle_steps(find_bundles([str(bundle)])) if isinstance(step, Copy))
    copy = msgspec.structs.replace(copy, uid=os.geteuid(), gid=os.getegid(), path="x/model.onnx")
    root = tmp_path / "root"
    (root / "x").mkdir(parents=True)
    apply(root, copy)
    assert is_applied(root, copy)
    for content in (b"grapf", b"graph+"):
        (root / "x/model.onnx").write_bytes(content)
        assert not is_applied(root, copy)
    (bundle / "model.onnx").write_bytes(b"grape")
    with pytest.raises(HashMismatchError, match=r"model\.onnx has SHA-256 \w{64}, expected \w{64}"):
        apply(root, copy)
    assert [path.name for path in (root / "x").iterdir()] == ["model.onnx"]


@ROOT_ONLY
def test_an_image_brings_its_bundle(tmp_path: Path, bundle: Path) -> None:
    order = make_order(tmp_path, bundles=find_bundles(["tiny/ort-int4"]))
    first = build(order, tmp_path)
    assert sorted(path.name for path in (order.root / PLACE).iterdir()) == FILES
    assert manifest.read(order.root / PLACE, verify=True) == manifest.read(bundle)
    found = image_manifest.read(order.root)
    assert found is not None
    entries = {entry.path: entry for entry in found.entries}
    about = manifest.read(bundle)
    assert entries[f"{PLACE}/model.onnx"].sha256 == about.files["model.onnx"].sha256
    assert found.bundles == {"tiny/ort-int4": manifest.file_sha256(bundle / "manifest.json")}
    assert [one for one in verify(order.bsp, order.board) if one.error] == []
    before = state(order.root)
    assert (build(order, tmp_path), state(order.root)) == (first, before)
    build(msgspec.structs.replace(order, bundles=()), tmp_path)
    assert not (order.root / "var/lib/starsd").exists()


@ROOT_ONLY
def test_a_bundle_that_was_spoilt_is_found_out(tmp_path: Path, bundle: Path) -> None:
    order = make_order(tmp_path, bundles=find_bundles([str(bundle)]))
    build(order, tmp_path)
    place = order.root / PLACE
    (place / "model.onnx").write_bytes(b"grape")
    (place / "tokenizer.json").unlink()
    (place / "model.engine").touch()
    (order.root / "var/lib/starsd/models").mkdir()
    (order.root / "var/lib/starsd/models/link").symlink_to("/etc")
    (order.root / "var/lib/starsd-first-boot").mkdir()
    stranger = "is in no bundle of the image, expected nothing else in the edge's home"
    assert [(one.check, one.path, one.problem) for one in verify(order.bsp, order.board) if one.error] == [
        ("leftovers", f"{PLACE}/model.engine", stranger),
        ("leftovers", "var/lib/starsd/models/link", stranger),
        ("manifest", f"{PLACE}/model.onnx", "is not what was written: its SHA-256 differs from the manifest's"),
        ("manifest", f"{PLACE}/tokenizer.json", "is missing"),
        (
            "leftovers",
            "var/lib/starsd-first-boot",
            "is there, expected nothing: it is of the build, or of another device",
        ),
    ]
    build(order, tmp_path)
    assert manifest.read(place, verify=True).name == "tiny"


def test_the_command_takes_bundles_and_says_when_the_device_opens_another(
    tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order, key = make_order(tmp_path), tmp_path / "key.pub"
    key.write_text(KEY)
    argv = [
        "image",
        "build",
        "--l4t",
        str(order.bsp.folder),
        "--board",
        "orin-nano",
        "--ssh-key",
        str(key),
        "--dry-run",
    ]
    assert main([*argv, "--bundle", "tiny/ort-int4"]) == 0
    assert capsys.readouterr().err == (
        "starsd-edge: bundle tiny/ort-int4, 0 MB\n"
        "starsd-edge: no --bundle is what the device opens, smollm2-135m: its first boot fetches that one\n"
    )
    device = tmp_path / "device.json"
    device.write_text('{"model": "tiny/ort-int4"}')
    device.chmod(0o600)
    assert main([*argv, "--bundle", str(bundle), "--device-file", str(device)]) == 0
    assert capsys.readouterr().err == "starsd-edge: bundle tiny/ort-int4, 0 MB\n"
    (bundle / "model.onnx").unlink()
    assert main([*argv, "--bundle", str(bundle)]) == 1
    assert capsys.readouterr().err.endswith("model.onnx is missing, expected 5 bytes\n")
