"""A manifest says what its bundle is, and nothing that reading it would not survive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_bundle import write_bundle

from starsd.shared import manifest
from starsd.shared.errors import BundleError

SHAPE = {"layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "vocab": 1, "context": 64}
FEATURES = {"taps": [], "last_hidden": True, "hidden": 1}


def changed(folder: Path, **changes: Any) -> Path:
    bundle = write_bundle(folder)
    path = bundle / manifest.FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return bundle


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = manifest.read(write_bundle(tmp_path / "b"), verify=True)
    assert (found.name, found.precision, found.features.width) == ("tiny", "int4", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3, "z": 1}, "has format 3, expected 2: export the model again"),
        ({"precision": "int3"}, "has precision 'int3', expected one of fp32, fp16, int8, int4"),
        ({"flavour": "x"}, "has flavour 'x', expected one of ort"),
        ({"files": {}}, "names no model.onnx, model.onnx.data, tokenizer.json, expected every file of the bundle"),
        ({"unheard_of": 1}, "cannot be read: Object contains unknown field `unheard_of`"),
        ({"shape": {**SHAPE, "heads": -4}}, r"has shape\.heads -4, expected 1 to 16777216$"),
        ({"shape": {**SHAPE, "heads": 0}}, r"has shape\.heads 0, expected 1 to 16777216$"),
        ({"shape": {**SHAPE, "hidden": -64}}, r"has shape\.hidden -64, expected 1 to 16777216$"),
        ({"shape": {**SHAPE, "layers": 1001}}, r"has shape\.layers 1001, expected 1 to 1000$"),
        ({"shape": {**SHAPE, "context": 2**62}}, r"has shape\.context 4611686018427387904, expected 1 to 16777216$"),
        ({"shape": {**SHAPE, "window": -3}}, r"has shape\.window -3, expected 0 to 16777216$"),
        ({"shape": {**SHAPE, "heads": 3, "kv_heads": 2}}, "has 3 heads for 2 of K/V, expected a multiple of them$"),
        ({"features": {**FEATURES, "taps": [-1]}}, r"has taps \[-1\], expected ascending layers from 0 to 0$"),
        ({"features": {**FEATURES, "taps": [99]}}, r"has taps \[99\], expected ascending layers from 0 to 0$"),
        ({"features": {**FEATURES, "taps": [0, 0]}}, r"has taps \[0, 0\], expected ascending layers from 0 to 0$"),
        ({"features": {**FEATURES, "hidden": 0}}, r"has features\.hidden 0, expected 1 to 16777216$"),
        ({"eos": [-1]}, r"has end tokens \[-1\], expected ids from 0 to 16777215$"),
        ({"eos": [2**70]}, r"has end tokens \[1180591620717411303424\], expected ids from 0 to 16777215$"),
    ],
)
def test_manifests_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        manifest.read(changed(tmp_path / "b", **changes))


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", "x" * 5000, ""])
def test_files_lie_beside_the_manifest(tmp_path: Path, name: str) -> None:
    bundle = write_bundle(tmp_path / "b")
    files = json.loads((bundle / manifest.FILE_NAME).read_text())["files"]
    with pytest.raises(BundleError, match="expected files beside it"):
        manifest.read(changed(tmp_path / "c", files={**files, name: {"bytes": 0, "sha256": ""}}))


def test_what_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    found = manifest.read(write_bundle(tmp_path / "b"))
    broken = manifest.msgspec.structs.replace(found, quality=manifest.Quality(float("nan"), 1.0, 5))
    with pytest.raises(BundleError, match="cannot be written"):
        manifest.write(broken, tmp_path)


def test_what_cannot_be_is_not_written(tmp_path: Path) -> None:
    found = manifest.read(write_bundle(tmp_path / "b"))
    broken = manifest.msgspec.structs.replace(found, eos=(-1,))
    with pytest.raises(BundleError, match=r"^a manifest cannot be written: it has end tokens \[-1\], expected ids"):
        manifest.write(broken, tmp_path)


@pytest.mark.parametrize("raw", ['{"format":' * 100_000, '{"format":2,"x":' + "[" * 100_000])
def test_manifests_that_are_nested_without_end_are_told(raw: str, tmp_path: Path) -> None:
    (write_bundle(tmp_path / "b") / manifest.FILE_NAME).write_text(raw)
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read: "):
        manifest.read(tmp_path / "b")


def test_a_window_is_written_where_there_is_one(tmp_path: Path) -> None:
    """So manifests from before there were any are read, and those without are written, as they were."""
    bundle = write_bundle(tmp_path / "b")
    path = bundle / manifest.FILE_NAME
    assert "window" not in json.loads(path.read_text())["shape"]
    found = manifest.read(bundle)
    assert found.shape.window == 0
    shape = manifest.msgspec.structs.replace(found.shape, window=24)
    manifest.write(manifest.msgspec.structs.replace(found, shape=shape), bundle)
    assert manifest.read(bundle).shape.window == 24
