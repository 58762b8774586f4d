from __future__ import annotations

import importlib
import io
import json
from importlib.metadata import version
from pathlib import Path

import pytest

from starsd.scripts.cli import main


@pytest.fixture
def stored(starsd_home: Path) -> Path:
    for name, size in (("models/one/model.safetensors", 1000), ("bundles/one/ort-int4/model.onnx", 300)):
        path = starsd_home / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(size))
    return starsd_home


def test_list_prints_one_object_a_line(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [
        {
            "name": "one",
            "bytes": 1300,
            "model_bytes": 1000,
            "partial_bytes": 0,
            "bundles": [{"name": "ort-int4", "bytes": 300}],
        }
    ]
    assert err == ""


def test_list_for_people_shows_sizes_and_the_quota(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARSD_QUOTA_GB", "2")
    assert main(["models", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["one", "1.3", "kB"],
        ["model", "1.0", "kB"],
        ["ort-int4", "300", "bytes"],
        ["total", "1.3", "kB", "of", "2.0", "GB"],
    ]


def test_rm_with_yes_asks_nothing(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "rm", "--yes", "one/ort-int4", "one"]) == 0
    assert capsys.readouterr().out == "removed one/ort-int4, 300 bytes freed\nremoved one, 1.0 kB freed\n"
    assert not (stored / "models" / "one").exists()


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False)])
def test_rm_asks_first(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, gone: bool
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["models", "rm", "one"]) == 0
    assert "remove one (1.3 kB)?" in capsys.readouterr().err
    assert (stored / "models" / "one").exists() != gone


def test_rm_of_what_is_not_there_is_one_line_and_status_1(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "rm", "--yes", "two"]) == 1
    assert capsys.readouterr() == ("", "starsd: nothing is stored as 'two', expected one of: one\n")


def test_pull_of_a_local_folder_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["pull", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert main(["pull", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": str(tmp_path), "folder": str(tmp_path)}


def test_pull_of_an_unknown_name_is_one_line_and_status_1(
    starsd_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "smollm9"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("starsd: model 'smollm9' is unknown, expected one of smollm2-135m, hf:org/name or")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["starsd", "starsd-edge", "starsd-server", "starsd-export"])
def test_every_command_says_its_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = {"starsd": "scripts"}.get(command, command.removeprefix("starsd-"))
    assert importlib.import_module(f"starsd.{module}.cli").main(["--version"]) == 0
    assert capsys.readouterr() == (f"{command} {version('starsd')}\n", "")
