"""The trained module against the drafter that serves it: same rows, same chains, same log-probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_session import VOCAB
from torch.nn import functional as F
from train_helpers import WIDTH, fresh_head, target_folder

from starsd.export.checkpoint import EMBEDDING, Checkpoint
from starsd.export.train_head import Head
from starsd.export.train_save import save_head
from starsd.server.drafter import chain
from starsd.server.drafter_eagle import open_drafter

DRAFT = [*range(3, 60), *range(100, 171)]
STEPS = 5


@pytest.fixture(scope="module", params=["mapped", "full"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    base = tmp_path_factory.mktemp("head")
    target = target_folder(base / "target", initializer_range=0.2)
    draft = DRAFT if request.param == "mapped" else list(range(VOCAB))
    (base / "head").mkdir()
    save_head(base / "head", fresh_head(target, draft), Checkpoint(target), np.array(draft), 512)
    return base / "head", target, draft


def stored(target: Path, draft: list[int]) -> Head:
    """The head as saved: its values rounded to bfloat16."""
    return fresh_head(target, draft).to(torch.bfloat16).float()


def unrolled(head: Head, target: Path, tokens: np.ndarray, taps: np.ndarray, steps: int) -> torch.Tensor:
    """Log-probabilities (steps, n, draft vocab)."""
    embedding = torch.from_numpy(Checkpoint(target).tensor(EMBEDDING).copy())
    embedded = F.embedding(torch.from_numpy(tokens), embedding)[None]
    outputs = head.unroll(embedded, torch.from_numpy(taps)[None], steps)
    return torch.stack([head.logits(output[0]).log_softmax(-1) for output in outputs])


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_every_depth_is_what_the_drafter_computes(folders: tuple[Path, Path, list[int]], rows: int) -> None:
    """A chain drafted behind `rows` true rows, and the training-time test over the text that this chain gives."""
    folder, target, draft = folders
    rng = np.random.default_rng(rows)
    known = rng.integers(0, VOCAB, rows + 1)
    features = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    session = open_drafter(str(folder), str(target)).open()
    session.extend(features, known[1:])
    drafted = session.draft(chain(STEPS))

    text = np.concatenate([known, drafted.tokens[1:]])
    behind = rng.normal(size=(len(text) - rows, WIDTH)).astype(np.float32)  # later rows must not matter
    found = unrolled(stored(target, draft), target, text, np.concatenate([features, behind]), STEPS)
    sums = 0.0
    for depth in range(STEPS):
        row = found[depth, rows - 1]
        assert draft[int(row.argmax())] == drafted.tokens[1 + depth]
        sums += float(row.max())
        assert abs(sums - drafted.scores[1 + depth]) < 3e-5 * (1 + depth)


@torch.no_grad()
def test_depth_zero_is_every_row_of_the_drafter(folders: tuple[Path, Path, list[int]]) -> None:
    """Row i pairs feature i with token i + 1, and the server's row after i + 1 tokens is this one."""
    folder, target, draft = folders
    rng = np.random.default_rng(5)
    text, features = rng.integers(0, VOCAB, 13), rng.normal(size=(13, WIDTH)).astype(np.float32)
    found = unrolled(stored(target, draft), target, text, features, 1)[0]
    session = open_drafter(str(folder), str(target)).open()
    for row in range(12):
        session.extend(features[row : row + 1], text[row + 1 : row + 2])
        output = session._output  # type: ignore[attr-defined]
        ids, steps = session._layer.best(output, 7)  # type: ignore[attr-defined]
        np.testing.assert_allclose(found[row].topk(7).values, steps[0], atol=3e-5)
        assert found[row].topk(7).indices.tolist() == ids[0].tolist()


@torch.no_grad()
def test_outputs_depend_on_what_is_seen_only(tmp_path: Path) -> None:
    """Row i of depth j moves with feature i and token i + 1 + j, and with nothing behind them."""
    target = target_folder(tmp_path)
    head = fresh_head(target)
    rng = np.random.default_rng(1)
    text, features = rng.integers(0, VOCAB, 12), rng.normal(size=(12, WIDTH)).astype(np.float32)
    before = unrolled(head, target, text, features, 3)
    moved, other = features.copy(), text.copy()
    moved[6] += 1
    other[8] = (other[8] + 1) % VOCAB
    by_feature = (unrolled(head, target, text, moved, 3) - before).abs().amax(-1) > 1e-6
    by_token = (unrolled(head, target, other, features, 3) - before).abs().amax(-1) > 1e-6
    for depth in range(3):
        last = 12 - 1 - depth  # rows whose tokens exist
        assert by_feature[depth, :last].tolist() == [row >= 6 for row in range(last)]
        assert by_token[depth, :last].tolist() == [row >= 7 - depth for row in range(last)]


@torch.no_grad()
@pytest.mark.parametrize("columns", [[0], [11], [2, 3, 7, 11], list(range(12))])
def test_some_rows_are_those_of_all(tmp_path: Path, columns: list[int]) -> None:
    head = fresh_head(target_folder(tmp_path))
    draw = torch.Generator().manual_seed(2)
    embedded = torch.randn(3, 12, WIDTH // 3, generator=draw)
    taps = torch.randn(3, 12, WIDTH, generator=draw)
    every = list(head.unroll(embedded, taps, STEPS))
    some = list(head.unroll(embedded, taps, STEPS, torch.tensor(columns)))
    assert torch.equal(some[0], every[0])
    for depth in range(1, STEPS):
        assert some[depth].shape == (3, len(columns), WIDTH // 3)
        torch.testing.assert_close(some[depth], every[depth][:, columns], atol=1e-5, rtol=0)


def test_parameters_are_named_as_on_disk(tmp_path: Path) -> None:
    names = {name for name, _ in fresh_head(target_folder(tmp_path)).named_parameters()}
    layer = {f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"}
    layer |= {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    layer |= {f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    assert names == layer | {"fc.weight", "norm.weight", "lm_head.weight"}
