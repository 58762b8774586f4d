"""`starsd-server` as its users run it: one JSON object per line out, one line when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_helpers import GOLDEN, VARIANTS, golden_target, recording

from starsd.server.auth import device_of, read_tokens
from starsd.server.cli import main
from starsd.server.link import ModelHead
from starsd.server.run import models
from starsd.shared.errors import UsageError

FILE = "trees_T16_D4_K4"
SHAPE = ["--total", "16", "--depth", "4", "--top-k", "4"]


def arguments(variant: str, file: Path, *more: str) -> list[str]:
    folders = ["--head", str(GOLDEN / variant / "head"), "--target", str(golden_target(variant))]
    return ["draft", *folders, "--recording", str(file), *more]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_on_stdout(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(variant, GOLDEN / variant / f"{FILE}.npz", *SHAPE, "--json")) == 0
    output = capsys.readouterr()
    found = [json.loads(line) for line in output.out.splitlines()]
    arrays = recording(variant, FILE)
    assert [row["round"] for row in found] == [0, 1, 2, 3]
    for row in found:
        assert sorted(row) == ["parents", "round", "scores", "tokens"]
        assert row["tokens"] == arrays[f"r{row['round']}_draft_tokens"].tolist()
        assert row["parents"] == arrays[f"r{row['round']}_parents"].tolist()
        np.testing.assert_allclose(row["scores"], arrays[f"r{row['round']}_node_logprob"], atol=3e-5)
    assert output.err == ""


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("e3_gqa_d2t", GOLDEN / "e3_gqa_d2t" / f"{FILE}.npz", *SHAPE)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "round 0"
    assert len(lines) == 4 * 17


def needed(variant: str = "e3_gqa_d2t") -> dict[str, np.ndarray]:
    """Only what the command may read."""
    keep = ("_feat", "_accepted_tokens", "_bonus")
    arrays = recording(variant, FILE)
    return {name: a for name, a in arrays.items() if name in ("prompt", "root0") or name.endswith(keep)}


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_any_number_of_rounds_and_nothing_else_is_needed(
    rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {n: a for n, a in needed().items() if not n.startswith("r") or n == "root0" or int(n[1]) < rounds}
    np.savez(tmp_path / "r.npz", **kept)
    assert main(arguments("e3_gqa_d2t", tmp_path / "r.npz", *SHAPE, "--json")) == 0
    assert len(capsys.readouterr().out.splitlines()) == rounds


def test_more_than_ten_rounds_stay_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = needed()
    root = int(arrays["root0"])
    kept = {name: arrays[name] for name in ("prompt", "root0", "r0_feat")}
    for number in range(1, 13):
        kept[f"r{number}_feat"] = arrays["r0_feat"][number : number + 1]
        kept[f"r{number}_accepted_tokens"] = np.array([root])
        root = 40 + number
        kept[f"r{number}_bonus"] = np.array(root)
    np.savez(tmp_path / "r.npz", **kept)
    assert main(arguments("e3_gqa_d2t", tmp_path / "r.npz", *SHAPE, "--json")) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["tokens"][0] for row in found] == [int(arrays["root0"]), *range(41, 53)]


OBJECTS = np.array([{}, {}], dtype=object)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "lacks prompt"),
        ({"r0_feat": None}, "lacks r0_feat"),
        ({"r2_feat": None}, "lacks r2_feat"),
        ({"r2_bonus": None}, "lacks r2_bonus"),
        ({"r3_feat": None}, "lacks r3_feat"),
        ({"prompt": np.zeros((2, 2), int)}, "prompt is int64 of shape [2, 2], expected integers in one dimension"),
        ({"prompt": np.zeros(0, int)}, "prompt is int64 of shape [0], expected integers in one dimension"),
        ({"root0": np.array([1])}, "root0 is int64 of shape [1], expected one integer"),
        ({"root0": np.array(1.5)}, "root0 is float64 of shape [], expected one integer"),
        ({"root0": np.array(512)}, "root0 has ids 512 to 512, expected 0 to 511"),
        ({"r0_feat": np.zeros((3, 192), np.float32)}, "r0_feat is float32 of shape [3, 192], expected floats of shape"),
        ({"r0_feat": np.zeros((22, 64), np.float32)}, "r0_feat is float32 of shape [22, 64], expected floats of shape"),
        ({"r0_feat": np.full((22, 192), np.nan, np.float32)}, "features are not finite"),
        ({"r1_accepted_tokens": np.array([3, 3, 3])}, "r1_accepted_tokens starts with 3, expected the root"),
        ({"prompt": OBJECTS}, "cannot be read"),
    ],
)
def test_bad_recordings_are_one_line_on_stderr(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = {name: array for name, array in {**needed(), **changes}.items() if array is not None}
    np.savez(tmp_path / "r.npz", **merged)
    assert main(arguments("e3_gqa_d2t", tmp_path / "r.npz", *SHAPE, "--json")) == 1
    output = capsys.readouterr()
    assert output.err.startswith("starsd-server: ")
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert "Traceback" not in output.err


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_files_that_are_no_archives(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "r.npz").write_bytes(content)
    assert main(arguments("e1_mha_bias", tmp_path / "r.npz", "--json")) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_single_array_is_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "r.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert main(arguments("e1_mha_bias", tmp_path / "r.npz", "--json")) == 1
    assert "expected several named arrays" in capsys.readouterr().err


def test_wrong_heads_and_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = GOLDEN / "e1_mha_bias" / f"{FILE}.npz"
    assert main(arguments("e1_mha_bias", file, "--total", "90", "--depth", "2", "--top-k", "3")) == 1
    assert "depth 2 and top_k 3 give 22 nodes, expected 90" in capsys.readouterr().err
    assert (
        main(["draft", "--head", str(tmp_path), "--target", str(golden_target("e1_mha_bias")), "--recording", "x"]) == 1
    )
    assert capsys.readouterr().err.startswith("starsd-server: ")


def test_bare_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) != 1
    output = capsys.readouterr()
    assert "draft" in output.out + output.err


RUN = ["run", "--model", "smollm2-135m=head"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dev", "--host", "0.0.0.0"], "--dev listens on this machine only, got --host 0.0.0.0: use 127.0.0.1"),
        (["--dev", "--host", "example.org"], "--dev listens on this machine only, got --host example.org"),
        (["--dev", "--tokens", "x"], "got --dev and --tokens, expected one of them"),
        ([], "--tls-cert is missing: a server needs it unless it runs with --dev on 127.0.0.1"),
        (["--host", "0.0.0.0"], "--tls-cert is missing"),
        (["--tls-cert", "a"], "--tls-key is missing"),
        (["--tls-cert", "a", "--tls-key", "b"], "--tokens is missing"),
        (["--tls-cert", "a", "--tls-key", "b", "--tokens", "c"], "TLS files a and b cannot be used: "),
        (["--dev", "--head", "x"], "got --head beside several models or a head"),
        (["--dev", "--slots", "0"], "slots is 0, expected more than 0"),
        (["--dev", "--schedule", "lifo"], "schedule 'lifo' is unknown, expected one of batched, fifo"),
        (["--dev", "--workers", "0"], "workers is 0, expected 1 to 64"),
        (["--dev", "--port", "70000"], "port is 70000, expected 0 to 65535"),
    ],
)
def test_servers_that_do_not_start(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, *arguments]) == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"starsd-server: {message}")
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


def test_models_and_heads() -> None:
    assert models(["a"], None) == (ModelHead("a"),)
    assert models(["a=b=c", "d"], None) == (ModelHead("a", "b=c"), ModelHead("d"))
    assert models(["a"], "b") == (ModelHead("a", "b"),)
    with pytest.raises(UsageError, match="expected it with a single --model NAME"):
        models(["a", "d"], "b")


def test_a_worker_that_cannot_start_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = golden_target("e1_mha_bias")
    assert main(["run", "--model", f"{target}={tmp_path}", "--dev", "--port", "0", "--json"]) == 1
    output = capfd.readouterr()
    assert output.err.startswith(f"starsd-server: {tmp_path} has neither model.safetensors, ")
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


def test_tokens_are_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    assert main(["token", "orin-1", "--tokens", str(file)]) == 0
    token = capsys.readouterr().out.strip()
    assert device_of(f"Bearer {token}", read_tokens(file)) == "orin-1"
    assert main(["token", "orin-2", "--tokens", str(file), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert device_of(f"Bearer {row['token']}", read_tokens(file)) == row["device"] == "orin-2"
    assert main(["token", "no spaces", "--tokens", str(file)]) == 1
    assert "device name is 'no spaces'" in capsys.readouterr().err
