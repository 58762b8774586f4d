"""`starsd-export` as a program: results on stdout, the rest on stderr, one line when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import rewrite, write_folder

from starsd.export.cli import main
from starsd.shared import manifest
from starsd.shared.families import MODEL_TYPES


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(tmp_path_factory.mktemp("cli") / "m"))


def test_one_object_on_stdout(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["onnx", source, "--precision", "int8", "--taps", "1,5", "--last-hidden", "--context", "64", "--json"]
    assert main([*argv, "--out", str(tmp_path / "b")]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert out.count("\n") == 1
    assert row.keys() == {"bundle", "precision", "bytes", "seconds", "peak_memory_mb", "quality"}
    assert (row["bundle"], row["precision"]) == (str(tmp_path / "b"), "int8")
    assert row["quality"].keys() == {"kl", "top1", "tokens"}
    assert "writing layers done" in err
    made = manifest.read(tmp_path / "b")
    assert (made.features.taps, made.features.last_hidden, made.shape.context) == ((1, 5), True, 64)


def test_a_path_on_stdout_and_figures_beside(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", source, "--precision", "int8", "--out", str(tmp_path / "b")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'b'}\n"
    assert "peak memory" in err
    assert "% of argmaxes equal, KL 0.0" in err
    assert main(["onnx", source, "--no-check", "--precision", "int8", "--taps", "", "--out", str(tmp_path / "b")]) == 0
    assert "argmaxes" not in capsys.readouterr().err
    assert manifest.read(tmp_path / "b").features.taps == ()


def test_the_default_is_the_store_and_eagle3s_taps(
    source: str, starsd_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["onnx", source, "--precision", "fp32"]) == 0
    place = Path(capsys.readouterr().out.strip())
    assert place.is_relative_to(starsd_home / "bundles")
    assert manifest.read(place).features.taps == (2, 3, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "int3"], "precision is 'int3', expected one of fp32, fp16, int8, int4"),
        (["--flavour", "tensorrt"], "flavour is 'tensorrt', expected one of ort, portable, decomposed"),
        (["--taps", "1,x"], "taps are '1,x', expected layer numbers like 2,15,27"),
        (["--taps", "9"], "taps are [9], expected ascending layers from 0 to 6"),
        (
            ["--calibration", "c.npz", "--precision", "fp16"],
            "calibration is of no use to ort fp16, expected flavour ort and precision int8 or int4",
        ),
        (["--context", "-1"], "context is -1, expected 16 to 512 tokens, or 0 for all"),
    ],
)
def test_failures_are_one_line(
    source: str, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["onnx", source, *options, "--out", str(tmp_path / "b"), "--json"]) == 1
    assert capsys.readouterr() == ("", f"starsd-export: {message}\n")
    assert not (tmp_path / "b").exists()


def test_models_that_are_unknown_or_refused(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", "llama-9t"]) == 1
    assert capsys.readouterr().err.startswith(
        "starsd-export: model 'llama-9t' is unknown, expected one of smollm2-135m"
    )
    bad = rewrite(Path(source), tmp_path / "m", {"model_type": "mamba"})
    assert main(["onnx", str(bad), "--precision", "fp32", "--out", str(tmp_path / "b")]) == 1
    expected = "starsd-export: model type 'mamba' is not supported, expected one of " + ", ".join(MODEL_TYPES) + "\n"
    assert capsys.readouterr() == ("", expected)
