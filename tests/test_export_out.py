"""Where a bundle may go, and whose tokenizer it may have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import VOCAB, export, rewrite, write_folder
from tokenizers import Tokenizer

from starsd.export.bundle import Options, export_onnx
from starsd.shared import manifest
from starsd.shared.errors import ModelError, StorageError, UsageError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("out") / "m")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_bundles_and_empty_folders_are_replaced(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "sub").mkdir(parents=True)
    (mine / "notes.txt").write_text("precious")
    with pytest.raises(UsageError, match="mine is neither empty nor a bundle, expected a folder that may be replaced"):
        export_onnx(str(source), Options(precision="fp32"), mine)
    assert (mine / "notes.txt").read_text() == "precious"
    with pytest.raises(UsageError, match=r"notes.txt is no folder, expected one that may be made or replaced"):
        export_onnx(str(source), Options(precision="fp32"), mine / "notes.txt")
    message = r"notes.txt is no folder, expected one that may be made or replaced$"
    with pytest.raises(UsageError, match=message):
        export_onnx(str(source), Options(precision="fp32"), mine / "notes.txt" / "below" / "b")
    for _ in range(2):  # into a new folder, and over the bundle that is there then
        export_onnx(str(source), Options(precision="fp32"), tmp_path / "b")
    path = tmp_path / "b" / "manifest.json"
    raw = {key: value for key, value in json.loads(path.read_text()).items() if key != "quality"}
    path.write_text(json.dumps({**raw, "format": 1, "gone": []}))  # of another version of starsd
    export_onnx(str(source), Options(precision="fp32"), tmp_path / "b")
    assert manifest.read(tmp_path / "b").format == manifest.FORMAT


@pytest.mark.parametrize(
    "content",
    [
        b'{"name": "My page", "start_url": "/", "icons": []}',
        b'{"manifest_version": 3, "format": 2, "files": {}}',
        b"[1]",
        b"\xff",
        b'{"a":' * 100_000,
    ],
)
def test_a_folder_with_another_manifest_stays(content: bytes, tmp_path: Path) -> None:
    """Web pages and browser extensions have a file of that name too."""
    (tmp_path / "manifest.json").write_bytes(content)
    (tmp_path / "index.html").write_text("precious")
    with pytest.raises(UsageError, match=r" is neither empty nor a bundle, expected a folder that may be replaced$"):
        export_onnx("smollm2-135m", Options(precision="fp32"), tmp_path)
    assert names(tmp_path) == ["index.html", "manifest.json"]


def test_places_with_long_names(source: Path, tmp_path: Path) -> None:
    assert manifest.GRAPH_FILE in names(export(source, tmp_path / ("b" * 250)))
    with pytest.raises(StorageError, match=r"file name too long.*choose a shorter name"):
        export(source, tmp_path / ("b" * 256))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_tokenizer_of_another_model(precision: str, tmp_path: Path) -> None:
    """With more tokens than the model has rows, whatever the export would have measured."""
    small = write_folder(tmp_path / "small", vocab_size=100)
    tokens = Tokenizer.from_file(str(small / "tokenizer.json")).get_vocab_size()
    message = rf"^tokenizer of {small} has {tokens} tokens, the model has rows for 100$"
    with pytest.raises(ModelError, match=message):
        export_onnx(str(small), Options(precision=precision), tmp_path / "b")
    assert names(tmp_path) == ["small"]


def test_added_tokens_beyond_the_rows(source: Path, tmp_path: Path) -> None:
    """Padding that nobody resized the model for is never read; a marker of the chat template is."""
    for text, refused in (("<pad>", False), ("<user>", True)):
        copy = rewrite(source, tmp_path / text.strip("<>"), {})
        tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
        spare = VOCAB - tokenizer.get_vocab_size()
        tokenizer.add_special_tokens([*(f"<spare{i}>" for i in range(spare)), text])
        assert tokenizer.token_to_id(text) == VOCAB
        tokenizer.save(str(copy / "tokenizer.json"))
        if refused:
            template = {"chat_template": "<user>{{ messages[0].content }}"}
            (copy / "tokenizer_config.json").write_text(json.dumps(template))
            with pytest.raises(ModelError, match=rf" has {VOCAB + 1} tokens, the model has rows for {VOCAB}$"):
                export(copy, tmp_path / "b")
        else:
            assert export(copy, tmp_path / "a", "int8", check=True).is_dir()
