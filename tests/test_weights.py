"""Where tensors are: whole files, honest shards, and messages that name tensors and shapes."""

from __future__ import annotations

import json
import re
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
        (
            "model.safetensors",
            (18).to_bytes(8, "little") + b'{"__metadata__":5}',
            "has no safetensors header: Expected",
        ),
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
        ("model.safetensors", b"{" * 8 + b'{"a":' * 200_000, "is not whole: header of"),
        ("model.safetensors", (1_000_000).to_bytes(8, "little") + b'{"a":' * 200_000, "has no safetensors header: "),
        ("model.safetensors.index.json", b"{}", "cannot be read"),
        ("model.safetensors.index.json", b'{"weight_map":' * 100_000, "index.json cannot be read: "),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "a\\n\\u001b[31m"}}',
            r"names 'a\\n\\x1b\[31m', expected a file",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "' + b"a" * 5000 + b'"}}',
            f"names '{'a' * 80}', expected a file beside it",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}', "expected a file beside it"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        tensor_index(tmp_path)


def headed(folder: Path, header: str, values: int) -> Path:
    """A safetensors file of this header and so many bytes of values."""
    raw = header.encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(values))
    return folder


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ('"F16","shape":[2],"data_offsets":[0,8]', None, "a of type F16 and shape [2] in 8 bytes, expected 4"),
        ('"F32","shape":[2],"data_offsets":[0,4]', None, "a of type F32 and shape [2] in 4 bytes, expected 8"),
        ('"F4","shape":[3],"data_offsets":[0,1]', None, "a of type F4 and shape [3] in 1 bytes, expected 1.5"),
        ('"F32","shape":[-1,-2],"data_offsets":[0,8]', None, "a of shape [-1, -2], expected no size below 0"),
        (
            '"F32","shape":[2],"data_offsets":[0,8]',
            '"F32","shape":[2],"data_offsets":[0,8]',
            "b from byte 0 on, expected it from 8, behind the one before it",
        ),
        (
            '"F32","shape":[2],"data_offsets":[0,8]',
            '"F32","shape":[2],"data_offsets":[12,20]',
            "b from byte 12 on, expected it from 8, behind the one before it",
        ),
        (
            '"F32","shape":[2],"data_offsets":[0,8]',
            '"F32","shape":[2],"data_offsets":[8,16]',
            "model.safetensors has 124 bytes, expected 132",
        ),
        ('"F32","shape":[2.5],"data_offsets":[0,8]', None, "has no safetensors header: Expected `int`, got `float`"),
        ('"F32","shape":[2],"data_offsets":["0","8"]', None, "has no safetensors header: Expected `int`, got `str`"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, a: str, b: str | None, message: str) -> None:
    """Each would read values that are another tensor's, or of another type."""
    header = f'{{"a":{{"dtype":{a}}}' + (f',"b":{{"dtype":{b}}}' if b else "") + "}"
    with pytest.raises(ModelError, match=re.escape(message)):
        tensor_index(headed(tmp_path, header, 8))


def test_types_that_are_not_known_are_for_their_reader(tmp_path: Path) -> None:
    header = '{"__metadata__":{"format":"pt"},"b":{"dtype":"Q9","shape":[3],"data_offsets":[8,12]},"a":'
    index = tensor_index(headed(tmp_path, header + '{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}', 12))
    assert [(name, entry.dtype, entry.shape) for name, entry in index.items()] == [
        ("b", "Q9", (3,)),
        ("a", "C64", (1,)),
    ]


def test_the_single_file_goes_before_an_index(tmp_path: Path) -> None:
    """As in transformers: an index that an earlier save left behind is no part of the model."""
    save_file({"a": np.zeros(2)}, tmp_path / "old.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "old.safetensors"}}))
    assert tensor_index(tmp_path)["a"].file.name == "old.safetensors"
    save_file({"a": np.zeros(2)}, tmp_path / "model.safetensors")
    assert tensor_index(tmp_path)["a"].file.name == "model.safetensors"


def test_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no model folder: config.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelError, match=r"config.json cannot be read: "):
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
    with pytest.raises(ModelError, match=r"has 'a\\n\\x1b' \[1\] that nothing uses$"):
        check_tensors("model", {"a\n\x1b": (1,)}, {})
    with pytest.raises(ModelError, match=r"lacks t0 \[1\], .*t5 \[1\] and 3 more$"):
        check_tensors("model", {}, {f"t{i}": (1,) for i in range(9)})
