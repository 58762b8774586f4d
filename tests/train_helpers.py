"""A tiny target that can be learnt, chats for it, and short recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_model import write_folder
from tiny_session import VOCAB

from starsd.export.checkpoint import Checkpoint
from starsd.export.train_data import Chats, Role, joined, write_chats
from starsd.export.train_drafter import head_rope
from starsd.export.train_head import Head, HeadShape, initialise
from starsd.export.train_recipe import Recipe, Sources

LAYERS, WIDTH = 8, 96
QUICK = Recipe(
    draft_vocab=128,
    steps_ahead=3,
    soft_labels=8,
    epochs=2,
    batch_tokens=120,
    warm_up=4,
    held_out=6,
    learning_rate=3e-3,
    dtype="fp32",
)


def target_folder(folder: Path, **changes: Any) -> Path:
    """Eight layers that change little: what comes next depends mostly on the newest token, which can be learnt."""
    return write_folder(folder, **{"num_hidden_layers": LAYERS, "initializer_range": 0.08, **changes})


def random_chats(count: int, seed: int = 0, shortest: int = 12, longest: int = 30) -> Chats:
    """Chats of random tokens from a third of the vocabulary: 3 of the template, 3 of the user, the rest an answer."""
    rng = np.random.default_rng(seed)
    chats = []
    for _ in range(count):
        tokens = [5, 6, 7, *rng.integers(10, VOCAB // 3, int(rng.integers(shortest, longest)) - 3).tolist()]
        roles = [Role.TEMPLATE] * 3 + [Role.USER] * 3 + [Role.ANSWER] * (len(tokens) - 6)
        chats.append((tokens, [int(role) for role in roles]))
    return joined(chats)


def data_file(path: Path, count: int = 40, **options: Any) -> Path:
    write_chats(path, random_chats(count, **options))
    return path


def fresh_head(folder: Path, draft: list[int] | None = None, seed: int = 3) -> Head:
    """A head for the target in `folder`, every parameter moved away from where training starts."""
    source = Checkpoint(folder)
    ids = torch.tensor(draft if draft is not None else list(range(source.shape.vocab)))
    head = Head(HeadShape.of(source, len(ids)), head_rope(source))
    initialise(head, source, ids, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    return head


def quick_sources(data: Path, **changes: Any) -> Sources:
    return Sources(**{"data": data, "checkpoint_seconds": 1e9, **changes})
