"""Server and exporter call a target by the same name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_model import export, write_folder

from starsd.shared import manifest
from starsd.shared.errors import ModelError
from starsd.shared.fingerprint import target_fingerprint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("id") / "m", shard="20KB")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_it_is_the_one_in_the_manifest(source: Path, precision: str, tmp_path: Path) -> None:
    made = manifest.read(export(source, tmp_path / "b", precision))
    assert len(list(source.glob("*.safetensors"))) > 1
    assert target_fingerprint(source, made.features) == made.fingerprint
    raw = manifest.read(export(source, tmp_path / "c", precision, last_hidden=True))
    assert target_fingerprint(source, raw.features) == raw.fingerprint != made.fingerprint


def test_weights_and_tokenizer_enter(source: Path, tmp_path: Path) -> None:
    features = manifest.FeatureSpec((2, 3, 4), False, 32)
    name = target_fingerprint(source, features)
    other = Path(shutil.copytree(source, tmp_path / "weights"))
    shard = sorted(other.glob("*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert target_fingerprint(other, features) != name
    other = Path(shutil.copytree(source, tmp_path / "text"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("\n", "\n "))  # the same tokenizer, written otherwise
    assert target_fingerprint(other, features) == name
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read: "):
        target_fingerprint(other, features)
    (other / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing, expected the target's tokenizer: pull the model"):
        target_fingerprint(other, features)


@pytest.mark.model
def test_the_default_model(smollm2_folder: Path, smollm2_bundle: object) -> None:
    assert callable(smollm2_bundle)
    made = manifest.read(smollm2_bundle("int8"))
    assert target_fingerprint(smollm2_folder, made.features) == made.fingerprint
