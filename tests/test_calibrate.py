"""Calibration: the very inputs that linear layers read, and bundles that are nearer to fp32 for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import ENGINE, export, write_folder
from tiny_session import VOCAB
from torch_helpers import tokens
from transformers import AutoModelForCausalLM

from starsd.edge.target_onnx import open_bundle
from starsd.edge.target_torch import open_folder
from starsd.export import calibrate as module
from starsd.export.calibrate import calibrate
from starsd.export.checkpoint import Checkpoint
from starsd.export.rotate import RotatedCheckpoint
from starsd.export.train_data import Chats, Role, joined, write_chats
from starsd.shared.errors import UsageError

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("calibrate") / "m")


def chats(count: int = 6) -> Chats:
    texts = [np.roll(tokens(40, VOCAB), 7 * i).tolist() for i in range(count)]
    return joined([(text, [Role.USER] * 5 + [Role.ANSWER] * (len(text) - 5)) for text in texts])


def read_inputs(source: Path, texts: Chats) -> dict[str, Any]:
    """What transformers' layers read over these texts: rows by weight."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows: dict[str, list[Any]] = {}
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):
            rows[f"{name}.weight"] = []
            part.register_forward_pre_hook(lambda _, args, name=name: rows[f"{name}.weight"].append(args[0][0]))
    with torch.no_grad():
        for chat in range(len(texts)):
            model(torch.tensor([texts.tokens[texts.rows(chat)].tolist()]))
    return {name: torch.cat(found).numpy() for name, found in rows.items()}


def test_sums_are_those_of_the_inputs(source: Path, tmp_path: Path) -> None:
    checkpoint, texts = Checkpoint(source), chats()
    got, rows = calibrate(checkpoint, texts, tmp_path), read_inputs(source, texts)
    assert set(got) == {name for name in rows if name.endswith("_proj.weight")} | {checkpoint.head}
    for name in (f"{LAYER}self_attn.k_proj.weight", f"{LAYER}self_attn.o_proj.weight", f"{LAYER}mlp.down_proj.weight"):
        difference = np.random.default_rng(1).normal(0, 1, checkpoint.tensor(name).shape).astype(np.float32)
        expected = float(np.square(rows[name] @ difference.T).sum())
        assert got[name].error(difference) == pytest.approx(expected, rel=1e-3)
    assert got[f"{LAYER}mlp.up_proj.weight"] is got[f"{LAYER}mlp.gate_proj.weight"]
    assert not list(tmp_path.iterdir())


def test_in_a_turned_basis_an_error_costs_the_same(source: Path, tmp_path: Path) -> None:
    """Outputs of the MLP's first matrices are the same in both: what is added to them is compared."""
    turned, texts = RotatedCheckpoint(source), chats()
    name = f"{LAYER}mlp.up_proj.weight"
    rows = read_inputs(source, texts)[name]
    error = float(np.square(rows @ Checkpoint.tensor(turned, name).T).sum())  # of all of the weight
    assert calibrate(turned, texts, tmp_path)[name].error(turned.tensor(name)) == pytest.approx(error, rel=1e-3)


def test_a_text_is_read_up_to_a_limit(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS", 50)
    monkeypatch.setattr(module, "LONGEST", 30)
    assert [len(text) for text in module._texts(chats(), 30)] == [30, 20]
    with pytest.raises(UsageError, match=r"^calibration chats hold no tokens$"):
        module._texts(joined([]), 30)
    monkeypatch.setattr(module, "MAX_MEGABYTES", -1)
    with pytest.raises(UsageError, match=r"^calibration of this model takes \d+ MB, expected at most -1$"):
        calibrate(Checkpoint(source), chats(), tmp_path)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_calibrated_bundle_is_nearer_to_fp32(precision: str, source: Path, tmp_path: Path) -> None:
    texts = chats(24)
    write_chats(tmp_path / "chats.npz", texts)
    reference = open_folder(source, ENGINE, taps=(1,), last_hidden=False)
    text = texts.tokens[texts.rows(2)].tolist()
    expected = scores(reference, text)
    errors = []
    for name, calibration in (("nearest", None), ("calibrated", tmp_path / "chats.npz")):
        bundle = export(source, tmp_path / name, precision, taps=(1,), calibration=calibration)
        errors.append(np.square(scores(open_bundle(bundle, ENGINE), text) - expected).mean())
    assert 0 < errors[1] < 0.9 * errors[0]


def scores(target: Any, text: list[int]) -> np.ndarray:
    """Logits of every token in one pass."""
    return np.asarray(target.score(text, list(range(-1, len(text) - 1))))


@pytest.mark.parametrize(("precision", "flavour"), [("fp32", "ort"), ("fp16", "ort"), ("int8", "portable")])
def test_what_calibration_is_for(precision: str, flavour: str, source: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.npz", chats())
    message = f"^calibration is of no use to {flavour} {precision}, expected flavour ort and precision int8 or int4$"
    with pytest.raises(UsageError, match=message):
        export(source, tmp_path / "out", precision, flavour=flavour, calibration=tmp_path / "chats.npz")
    assert not (tmp_path / "out").exists()


def test_chats_of_another_model_are_refused(source: Path, tmp_path: Path) -> None:
    other = joined([([1, 2, VOCAB + 5, 4], [Role.USER, Role.USER, Role.ANSWER, Role.ANSWER])])
    write_chats(tmp_path / "chats.npz", other)
    with pytest.raises(
        UsageError, match=rf"chats.npz: token ids run from 1 to {VOCAB + 5}, the target has 0 to {VOCAB - 1}"
    ):
        export(source, tmp_path / "out", "int8", calibration=tmp_path / "chats.npz")
