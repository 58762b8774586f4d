"""A trained head as others load it: the official EAGLE-3 folder, a model card, and a recording to test it by.

    config.json, model.safetensors   as SafeAILab's EAGLE-3 heads: bfloat16, `d2t` offsets int64, `t2d` bool
    README.md                        the model card
    recording.npz                    RECORDED greedy tokens of the target behind a prompt that was held out

The recording has the layout of `tests/golden/README.md` (*trees_*.npz*), one committed token a round, so that
`starsd-server draft --recording` replays it: `prompt` (P,), `root0`, `r0_feat` (P, width), and for round k = 1 … 128
`r{k}_feat` (1, width), `r{k}_accepted_tokens` (1,) and `r{k}_bonus`. Besides, `chain_accepted` int64 (129 - J,): how
many tokens of this head's chain of J are the target's own, drafted after round 0, 1, …, in float32 from the stored
bfloat16 weights: whoever loads the head can replay it and compare. Features are float16, float32 where that overflows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch.nn import functional as F

from starsd.export.checkpoint import Checkpoint
from starsd.export.staging import replace, size_text
from starsd.export.train_data import Ints, Role
from starsd.export.train_head import Head
from starsd.export.train_loop import Acceptance
from starsd.export.train_recipe import Recipe
from starsd.export.train_store import Rows
from starsd.export.train_target import BatchTarget

RECORDED = 128
LONGEST_PROMPT = 256
_TRIES = 4
_COPIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


def save_head(folder: Path, head: Head, checkpoint: Checkpoint, draft_ids: Ints, window: int) -> int:
    """Write config.json and model.safetensors, each whole or not at all; bytes of the latter. The config comes first:
    with weights of an earlier run of the same recipe it is as right."""
    replace(folder / "config.json", (json.dumps(config(head, checkpoint, window), indent=2) + "\n").encode())
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in head.named_parameters()}
    vocab = checkpoint.shape.vocab
    if len(draft_ids) < vocab:
        ids = torch.from_numpy(draft_ids)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    content: bytes = save(tensors, {"format": "pt"})
    replace(folder / "model.safetensors", content)
    return len(content)


def config(head: Head, checkpoint: Checkpoint, window: int) -> dict[str, Any]:
    """Of an official EAGLE-3 head, with a window as Hugging Face's configs write one. RoPE has the target's base and
    no scaling, which official loaders refuse."""
    shape = head.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": checkpoint.shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "rms_norm_eps": shape.eps,
        "rope_theta": checkpoint.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": True,
        "sliding_window": window,
        **{name: checkpoint.config[name] for name in _COPIED if name in checkpoint.config},
    }


def record(target: BatchTarget, rows: Rows, held: Ints) -> tuple[dict[str, NDArray[Any]], Ints, NDArray[Any]]:
    """The recording's arrays; the text they are of, prompt and RECORDED + 1 tokens, int64; its features, one row less.

    The prompt is that of a held-out chat with a long answer, such that the target does not end before RECORDED tokens
    where one of _TRIES does so.
    """
    chats = rows.chats
    starts = {int(c): int(np.argmax(chats.roles[chats.rows(int(c))] == Role.ANSWER)) for c in held}
    usable = [c for c, start in starts.items() if 1 < start <= LONGEST_PROMPT]
    usable = usable or [c for c, start in starts.items() if start > 1] or [int(held[0])]
    usable.sort(key=lambda c: starts[c] - int(chats.lengths[c]))
    ends = _ends(target.checkpoint)
    best: tuple[int, Ints, NDArray[np.float32]] | None = None
    for chat in usable[:_TRIES]:
        prompt = chats.tokens[chats.rows(chat)][: max(2, min(starts[chat], LONGEST_PROMPT))]
        text, features = _continue(target, prompt)
        stops = np.isin(text[len(prompt) :], ends)
        lasts = int(np.argmax(stops)) if stops.any() else RECORDED + 1
        if best is None or lasts > best[0]:
            best = (lasts, text, features)
        if lasts > RECORDED:
            break
    assert best is not None
    _, text, features = best
    halves = features.astype(np.float16)
    stored = halves if np.isfinite(halves).all() else features
    length = len(text) - RECORDED - 1
    arrays: dict[str, NDArray[Any]] = {"prompt": text[:length], "root0": text[length], "r0_feat": stored[:length]}
    for k in range(1, RECORDED + 1):
        at = length + k - 1
        arrays[f"r{k}_feat"], arrays[f"r{k}_accepted_tokens"] = stored[at : at + 1], text[at : at + 1]
        arrays[f"r{k}_bonus"] = text[at + 1]
    return arrays, text, stored


def _continue(target: BatchTarget, prompt: Ints) -> tuple[Ints, NDArray[np.float32]]:
    """The prompt with RECORDED + 1 greedy tokens behind it, and the features of all but the last."""
    decoder = target.decoder(1, len(prompt) + RECORDED)
    text, features = prompt.tolist(), []
    for at in range(len(prompt) + RECORDED):
        place = torch.tensor([at], device=target.device)
        taps, last = decoder.step(torch.tensor(text[at : at + 1], device=target.device), place, at)
        features.append(taps.float().cpu())
        if at + 1 == len(text):
            text.append(int(target.logits(last).argmax()))
    return np.array(text, np.int64), torch.cat(features).numpy()


@torch.no_grad()
def chain_accepted(
    head: Head, embedding: torch.Tensor, draft_ids: Ints, text: Ints, features: NDArray[Any], depths: int
) -> Ints:
    """See the module's docstring: for each round, drafts of a chain of `depths` that the target agrees with."""
    stored = copy.deepcopy(head).cpu().to(torch.bfloat16).float()
    tokens = torch.from_numpy(text[:-1])
    embedded = F.embedding(tokens, embedding.float().cpu())[None]
    taps = torch.from_numpy(features.astype(np.float32))[None]
    first = len(text) - RECORDED - 2  # the last row of round 0
    rounds = RECORDED + 1 - depths
    alive, counts = torch.ones(rounds, dtype=torch.bool), torch.zeros(rounds, dtype=torch.int64)
    for depth, output in enumerate(stored.unroll(embedded, taps, depths)):
        guess = torch.from_numpy(draft_ids)[stored.logits(output[0, first : first + rounds]).argmax(-1)]
        own = torch.from_numpy(text[first + 2 + depth : first + 2 + depth + rounds])
        alive &= guess == own
        counts += alive
    found: Ints = counts.numpy()
    return found


def write_recording(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the arrays as an .npz, whole or not at all."""
    partial = path.with_name(f".{path.stem}.tmp.npz")
    np.savez(partial, **dict[str, Any](arrays))
    partial.replace(path)


def write_card(
    folder: Path, *, name: str, recipe: Recipe, facts: Mapping[str, str], found: Acceptance, accepted: Sequence[int]
) -> None:
    """README.md: what the head is, how it was made and how well it did on held-out text."""
    depths = "\n".join(f"| {depth} | {share:.1%} |" for depth, share in enumerate(found.per_depth, start=1))
    settings = ", ".join(f"{key} {value}" for key, value in msgspec.to_builtins(recipe).items())
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    size = size_text((folder / "model.safetensors").stat().st_size)
    text = f"""---
library_name: starsd
tags: [eagle3, speculative-decoding]
---
# EAGLE-3 head for {name}

Drafts for {name} and for nothing else. bfloat16, {size}, the official EAGLE-3 layout: three taps (inputs of layers 2,
L // 2, L - 3), one layer, a draft vocabulary with `d2t` and `t2d`; embeddings are the target's.

{lines}

## Held-out acceptance

On {found.rows:,} places in chats that were not trained on, a chain along the chat's own tokens; a draft counts when it
is the target's likeliest token: **{found.tau:.2f} tokens a step**, bonus included.

| depth | accepted |
|---|---|
{depths}

`recording.npz` holds {RECORDED} greedy tokens of the target; this head's chains of {recipe.steps_ahead} agree with it
for {sum(accepted) / max(1, len(accepted)):.2f} tokens a round (`chain_accepted`).

## Made by

`starsd-export train-drafter`, self-distillation: the target's own chats, its {recipe.soft_labels} likeliest next tokens
as labels, a training-time test {recipe.steps_ahead} deep. Recipe: {settings}.
"""
    replace(folder / "README.md", text.encode())


def _ends(checkpoint: Checkpoint) -> list[int]:
    value = checkpoint.config.get("eos_token_id")
    return value if isinstance(value, list) else [value] if isinstance(value, int) else []
