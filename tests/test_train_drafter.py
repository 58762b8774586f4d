"""`starsd-export train-drafter` as its users run it, and the folder that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_model import rewrite
from tiny_session import VOCAB
from train_helpers import data_file, target_folder

from starsd.export.cli import main
from starsd.export.train_data import read_chats
from starsd.export.train_drafter import choose_dtype
from starsd.export.train_recipe import Recipe
from starsd.server.drafter import chain, open_drafter
from starsd.server.recording import read_recording
from starsd.shared.errors import UsageError
from starsd.shared.phrases import read_phrases

SHORT = ["--draft-vocab", "128", "--steps-ahead", "4", "--epochs", "1", "--dtype", "fp32", "--held-out", "4"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("drafter") / "target", eos_token_id=[1, *range(20, 280, 4)])


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head trained on chats that the target wrote."""
    out = tmp_path_factory.mktemp("trained") / "head"
    assert main(["train-drafter", "--target", str(target), "--out", str(out), "--tokens", "3000", *SHORT]) == 0
    return out


def test_the_folder_is_an_eagle3_head(head: Path, target: Path) -> None:
    drafter = open_drafter("eagle", str(head), str(target))
    assert drafter.warnings == ()
    assert drafter.features.taps == (2, 4, 5)
    tensors = load_file(head / "model.safetensors")
    assert {str(t.dtype) for n, t in tensors.items() if n not in ("d2t", "t2d")} == {"torch.bfloat16"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    ids = tensors["d2t"] + torch.arange(128)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    chats = read_chats(head / "chats.npz", VOCAB)
    counts = np.bincount(chats.tokens[chats.roles == 2], minlength=VOCAB)
    assert counts[ids.numpy()].sum() > 0.9 * counts.sum()
    config = json.loads((head / "config.json").read_text())
    assert (config["draft_vocab_size"], config["rope_theta"], config["num_hidden_layers"]) == (128, 100_000.0, 1)
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 512)


def test_a_phrasebook_lies_beside_it(head: Path) -> None:
    assert len(read_phrases(head / "phrases.npz", VOCAB)) > 0


def test_the_recording_replays_as_it_says(head: Path, target: Path) -> None:
    """The drafter, fed the recording round by round, drafts chains that agree with it as often as is written there."""
    drafter = open_drafter("eagle", str(head), str(target))
    rounds = read_recording(head / "recording.npz", drafter.features.width, VOCAB)
    with np.load(head / "recording.npz", allow_pickle=False) as arrays:
        expected = arrays["chain_accepted"].tolist()
        assert arrays["r0_feat"].dtype == np.float16
    assert len(rounds) == 129
    assert len(expected) == 125
    text = [int(step.next_tokens[-1]) for step in rounds]
    session, found = drafter.open(), []
    for number, step in enumerate(rounds[:125]):
        session.extend(step.features, step.next_tokens)
        drafted = session.draft(chain(4)).tokens[1:].tolist()
        said = text[number + 1 : number + 5]
        found.append(next((i for i in range(4) if drafted[i] != said[i]), 4))
    assert found == expected
    assert sum(found) > 0


def test_the_recording_is_the_targets_greedy_text(head: Path, target: Path) -> None:
    from starsd.edge.target_torch import open_folder
    from starsd.shared.config import Engine

    rounds = read_recording(head / "recording.npz", 96, VOCAB)
    with np.load(head / "recording.npz", allow_pickle=False) as arrays:
        prompt = arrays["prompt"].tolist()
    text = [int(step.next_tokens[-1]) for step in rounds]
    reference = open_folder(target, Engine(threads=1))
    features = reference.prefill(prompt[:-1])
    known = [prompt[-1], *text[:-1]]
    logits = reference.score(known, list(range(-1, len(known) - 1)))
    assert logits.argmax(-1).tolist() == text
    features = np.concatenate([features, reference.commit(range(len(known)))])
    recorded = np.concatenate([step.features for step in rounds])
    np.testing.assert_allclose(recorded, features, rtol=2e-3, atol=1e-3)


def test_the_card_states_what_was_measured(head: Path) -> None:
    card = (head / "README.md").read_text()
    assert "# EAGLE-3 head for target" in card
    assert "| 4 | " in card
    assert "draft_vocab 128" in card
    assert "whole epochs" in card
    assert str(head) not in card


def test_rows_of_json_and_nothing_else(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = data_file(tmp_path / "chats.npz")
    command = ["train-drafter", "--target", str(target), "--data", str(data), "--out", str(tmp_path / "o"), *SHORT]
    assert main([*command, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("event") for row in rows] == ["prepared", "held_out", "train", "held_out", None]
    assert rows[0]["chats"] == 40
    assert len(rows[1]["per_depth"]) == len(rows[2]["losses"]) == 4
    assert rows[-1]["per_depth"] == rows[3]["per_depth"]
    assert rows[-1]["bytes"] == (tmp_path / "o" / "model.safetensors").stat().st_size
    assert main([*command, "--json"]) == 0  # finished: nothing is trained again
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("event") for row in again] == [None]
    assert again[0]["tau"] == rows[-1]["tau"]


def test_prompts_are_answered(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": 1, "turns": ["user said"]}\n{"id": 2, "prompt": "this is"}\n')
    options = ["--tokens", "1500", "--prompts", str(prompts), *SHORT]
    assert main(["train-drafter", "--target", str(target), "--out", str(tmp_path / "o"), *options]) == 0
    chats = read_chats(tmp_path / "o" / "chats.npz", VOCAB)
    starts = {tuple(chats.tokens[chats.rows(i)][: int(np.argmax(chats.roles[chats.rows(i)] == 2))]) for i in range(3)}
    assert 1 <= len(starts) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "{data}", "--prompts", "{data}"], "got --data and --prompts, expected one of them"),
        (["--data", "{data}", "--tokens", "60"], "there are 3 chats of 4 tokens or more, expected at least 8"),
        (["--data", "{large}"], "token ids run from"),
        (["--data", "{data}", "--device", "nowhere"], "device 'nowhere' cannot be used"),
        (["--data", "{data}", "--dtype", "fp8"], "dtype is 'fp8', expected one of auto, bf16, fp32"),
        (["--data", "{data}", "--steps-ahead", "0"], "steps_ahead is 0, expected at least 1"),
        (["--data", "{data}", "--later-share", "0"], "later_share is 0.0, expected more than 0 and at most 1"),
        (["--data", "{data}", "--epochs", "-1"], "epochs is -1, expected 0 or more"),
    ],
)
def test_one_line_says_what_is_wrong(
    options: list[str], message: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large.npz"
    np.savez(large, tokens=np.full(40, 500), offsets=np.arange(0, 41, 4), answer_start=np.ones(10, int))
    files = {"data": str(data_file(tmp_path / "chats.npz")), "large": str(large)}
    filled = [option.format(**files) for option in options]
    assert main(["train-drafter", "--target", str(target), "--out", str(tmp_path / "o"), *filled]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_shallow_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shallow = target_folder(tmp_path / "target", num_hidden_layers=6)
    data = data_file(tmp_path / "chats.npz")
    command = ["train-drafter", "--target", str(shallow), "--data", str(data), "--out", str(tmp_path / "o"), *SHORT]
    assert main(command) == 1
    assert "target has 6 layers, expected at least 7" in capsys.readouterr().err


def test_a_broken_target_is_refused(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = rewrite(target, tmp_path / "broken", {}, {"model.norm.weight": None})
    data = data_file(tmp_path / "chats.npz")
    command = ["train-drafter", "--target", str(broken), "--data", str(data), "--out", str(tmp_path / "o"), *SHORT]
    assert main(command) == 1
    assert "lacks model.norm.weight" in capsys.readouterr().err


def test_the_dtype_is_chosen_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    from starsd.export import train_drafter

    for fast, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        monkeypatch.setattr(train_drafter, "_multiplying", lambda dtype, fast=fast: 1.0 if dtype == fast else 2.0)
        assert choose_dtype("auto", torch.device("cpu")) == name
    assert choose_dtype("bf16", torch.device("cpu")) == "bf16"
    assert choose_dtype("auto", torch.device("meta")) == "bf16"


def test_a_recipe_states_its_limits() -> None:
    with pytest.raises(UsageError, match=r"^longest is 7, expected at least 8$"):
        Recipe(longest=7)
