"""Whole runs on a tiny target: they learn, they resume exactly, they stop when told, and leave a loadable head."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_session import VOCAB
from train_helpers import QUICK, data_file, quick_sources, target_folder

from starsd.export import train_checkpoint, train_loop
from starsd.export.train_drafter import Result, train_drafter
from starsd.export.train_recipe import Recipe
from starsd.server.eagle_heads import load_head
from starsd.shared.errors import UsageError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("loop") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data_file(tmp_path_factory.mktemp("data") / "chats.npz")


def train(
    target: Path, out: Path, data: Path, recipe: Recipe = QUICK, **changes: Any
) -> tuple[Result, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    return train_drafter(str(target), out, recipe, quick_sources(data, **changes), rows.append), rows


def head_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_it_learns_what_the_target_would_say(target: Path, data: Path, tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(QUICK, epochs=4, draft_vocab=VOCAB, learning_rate=1e-3)
    result, rows = train(target, tmp_path / "head", data_file(tmp_path / "more.npz", 160), recipe)
    held = [row for row in rows if row["event"] == "held_out"]
    assert [row["epoch"] for row in held] == list(range(5))
    assert held[0]["rows"] > 50
    assert held[0]["per_depth"][0] < 0.4  # what the initial weights, the last layer of the target, know already
    assert min(result.per_depth) > 0.45
    a, b, c = result.per_depth
    assert result.tau == pytest.approx(1 + a * (1 + b * (1 + c)), abs=1e-3)
    losses = [row["losses"][0] for row in rows if row["event"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    weights = load_head(str(tmp_path / "head"), str(target))
    assert weights.spec.layout == "EAGLE-3"
    assert weights.spec.taps == (2, 4, 5)
    assert weights.spec.draft_vocab == VOCAB
    assert not weights.spec.warnings


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_resumed_equals_uninterrupted(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Stopped by a signal after three steps and again after seven, each in the middle of an epoch."""
    recipe = msgspec.structs.replace(QUICK, later_share=share)
    whole, _ = train(target, tmp_path / "whole", data, recipe)
    assert whole.steps > 10
    for after, number, expected in ((3, signal.SIGINT, KeyboardInterrupt), (7, signal.SIGTERM, SystemExit)):
        with monkeypatch.context() as patch:
            stop_after(patch, after, number)
            with pytest.raises(expected) as stopped:
                train(target, tmp_path / "parts", data, recipe)
        if expected is SystemExit:
            assert stopped.value.code == 128 + signal.SIGTERM
        state = json.loads((tmp_path / "parts" / "checkpoint" / "state.json").read_text())
        assert state["position"]["step"] == after
        assert not (tmp_path / "parts" / "model.safetensors").exists()
    resumed, rows = train(target, tmp_path / "parts", data, recipe)
    assert "prepared" not in {row["event"] for row in rows}  # the target's answers are there already
    assert (resumed.steps, resumed.per_depth) == (whole.steps, whole.per_depth)
    expected_tensors = head_of(tmp_path / "whole")
    assert all(torch.equal(tensor, expected_tensors[name]) for name, tensor in head_of(tmp_path / "parts").items())


def stop_after(patch: pytest.MonkeyPatch, steps: int, number: int) -> None:
    """Send this process a signal when a run has taken so many steps in all."""
    plain = train_loop.Trainer._step

    def step(self: train_loop.Trainer, group: Any, share: float) -> torch.Tensor:
        out = plain(self, group, share)
        if self.position.step + 1 == steps:
            signal.raise_signal(number)
        return out

    patch.setattr(train_loop.Trainer, "_step", step)


def test_signals_are_as_before_afterwards(target: Path, data: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(target, tmp_path / "head", data, msgspec.structs.replace(QUICK, epochs=1))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interrupted_checkpoint_leaves_the_one_before(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            train(target, out, data)

    def dies(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half of a checkpo")
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(train_checkpoint, "save_file", dies)
        with pytest.raises(OSError, match="the power went"):
            train(target, out, data)
    assert json.loads((out / "checkpoint" / "state.json").read_text())["position"]["step"] == 4
    resumed, _ = train(target, out, data)
    whole, _ = train(target, tmp_path / "whole", data)
    assert resumed.per_depth == whole.per_depth


def test_another_recipe_or_target_or_data_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    train(target, out, data)
    with pytest.raises(UsageError, match=r"a checkpoint of another recipe: epochs 3 \(was 2\): choose another --out"):
        train(target, out, data, msgspec.structs.replace(QUICK, epochs=3))
    with pytest.raises(UsageError, match=r"checkpoint .* is of another target or other data"):
        train(target, out, data_file(tmp_path / "other.npz", seed=1))
    other = target_folder(tmp_path / "other", initializer_range=0.09)
    with pytest.raises(UsageError, match=r"checkpoint .* is of another target or other data"):
        train(other, out, data)
    for file in (out / "checkpoint").iterdir():
        file.unlink()
    with pytest.raises(UsageError, match=r"cache was made from another target, data or options"):
        train(other, out, data)


def test_minutes_end_a_run_and_fit_its_schedule(target: Path, data: Path, tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(QUICK, epochs=0, minutes=0.05)
    result, rows = train(target, tmp_path / "head", data, recipe)
    assert result.steps > 0
    assert 3 <= result.seconds < 20
    shares = [row["share"] for row in rows if "share" in row]
    assert shares == sorted(shares)
    assert shares[-1] > 0.5


def test_taps_beyond_the_budget_are_computed_again(target: Path, data: Path, tmp_path: Path) -> None:
    """The same head comes out, but for the bfloat16 rounding of stored taps."""
    kept, _ = train(target, tmp_path / "kept", data)
    bounded, _ = train(target, tmp_path / "bounded", data, cache_gb=30_000 / 1e9)
    assert 0 < (tmp_path / "bounded/cache/taps.bin").stat().st_size <= 30_000
    assert (tmp_path / "kept/cache/taps.bin").stat().st_size > 100_000
    assert bounded.steps == kept.steps
    a, b = head_of(tmp_path / "kept"), head_of(tmp_path / "bounded")
    for name, tensor in a.items():
        if tensor.is_floating_point():
            np.testing.assert_allclose(tensor.float(), b[name].float(), atol=0.05)


def test_bf16_learns_too(target: Path, data: Path, tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(QUICK, epochs=2, dtype="bf16", draft_vocab=VOCAB)
    result, rows = train(target, tmp_path / "head", data_file(tmp_path / "more.npz", 160), recipe)
    assert next(row for row in rows if row["event"] == "held_out")["per_depth"][0] < 0.4
    assert result.per_depth[0] > 0.5
