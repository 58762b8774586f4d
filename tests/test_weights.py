"""Where tensors are: whole files, honest shards, and messages that name tensors and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from starsd.shared.errors import ModelError
from starsd.shared.weights import check_tensors, read_config, tensor_index


def test_single_file(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int64)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = tensor_index(tmp_path)
    assert {name: (entry.dtype, entry.shape) for name, entry in index.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (4,)),
    }


def test_shards(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(2)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert {name: entry.file.name for name, entry in tensor_index(tmp_path).items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    save_file({"a": np.zeros(1), "b": np.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"tensor a is in both one.safetensors and two.safetensors"):
        tensor_index(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two.safetensors is missing, model.safetensors.index.json names it"):
        tensor_index(tmp_path)


def test_starts_are_where_the_values_are(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, entry in tensor_index(tmp_path).items():
        raw = (tmp_path / "model.safetensors").read_bytes()[entry.start :]
        assert raw.startswith(tensors[name].tobytes())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", "is not whole: header of 0 bytes in a file of 0"),
        ("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}", "header of 1099511627776 bytes in a file of 10"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "has no safetensors header"),
        ("model.safetensors", (7).to_bytes(8, "little") + b'{"a":1}', "has no safetensors header"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}x", "has 11 bytes, expected 10"),
        (
            "model.safetensors",
            (54).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}'[:54],
            "has no safetensors header",
        ),
        (
            "model.safetensors",
            (56).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}} ',
            "has tensor a at bytes",
        ),
        ("model.safetensors.index.json", b"{}", "cannot be read"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}', "expected a file beside it"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        tensor_index(tmp_path)


def test_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no model folder: config.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config(tmp_path) == {"a": 1}


def test_messages_name_tensors_and_shapes() -> None:
    check_tensors("model", {"a": (1, 2)}, {"a": (1, 2)})
    with pytest.raises(ModelError) as caught:
        check_tensors("head X", {"a": (1, 2), "b": (3,)}, {"a": (2, 1), "c": (4,)})
    assert str(caught.value) == (
        "head X does not fit its config: lacks c [4]; has b [3] that nothing uses; a has shape [1, 2], expected [2, 1]"
    )
    with pytest.raises(ModelError, match=r"lacks t0 \[1\], .*t5 \[1\] and 3 more$"):
        check_tensors("model", {}, {f"t{i}": (1,) for i in range(9)})
