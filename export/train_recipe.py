"""How a head is trained: every number of the recipe, once. Nothing here needs torch, so that `--help` is quick.

Sources: EAGLE-3 (arXiv 2503.01840) for the three taps, the training-time test and its weights of 0.8 ** step; the rest
was measured on the default model with the chats it wrote itself.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from starsd.shared.errors import UsageError

DTYPES = ("auto", "bf16", "fp32")


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides which weights come out. A checkpoint is continued only under the recipe it was made with."""

    draft_vocab: int = 8192  # the most frequent target ids; the whole vocabulary when it is no larger
    steps_ahead: int = 5  # of the training-time test: depth 0 reads true features, each later one the head's own output
    step_decay: float = 0.8  # weight of depth j is step_decay ** j
    # of a batch's columns that depths behind 0 are trained on, drawn anew for each batch; 1: all. Neighbouring rows of
    # a depth teach much the same, so that the time buys more as further batches
    later_share: float = 0.4
    soft_labels: int = 32  # the target's likeliest tokens that make a label
    user_weight: float = 0.2  # of predicting a user's words; the template's own tokens weigh 0, answers 1
    epochs: int = 0  # 0: as many as `minutes` allow, or 6
    minutes: float = 0.0  # for preparation and training; 0: no limit
    learning_rate: float = 8e-4
    floor_rate: float = 1e-5  # where the cosine ends
    warm_up: int = 30  # optimiser steps
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of a gradient
    batch_tokens: int = 0  # padded tokens an optimiser step sees; 0: 1,200 on a CPU, 4,800 elsewhere
    held_out: int = 48  # chats that are never trained on; at most one in eight
    longest: int = 1024  # tokens of a chat; what is longer is cut
    window: int = 512  # rows that the head looks back on when it drafts: chats are seldom longer, so it learned no more
    seed: int = 0
    dtype: str = "auto"  # bf16 where the device multiplies it faster than fp32

    def __post_init__(self) -> None:
        least = {"draft_vocab": 1, "steps_ahead": 1, "soft_labels": 1, "held_out": 1, "longest": 8, "window": 8}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least {smallest}")
        for name in ("epochs", "minutes", "batch_tokens", "user_weight", "warm_up"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 < self.later_share <= 1:
            raise UsageError(f"later_share is {self.later_share}, expected more than 0 and at most 1")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where the chats come from, and what the work may cost."""

    data: Path | None = None  # an .npz of chats or a folder of them; None: the target writes its own
    prompts: Path | None = None  # user turns to answer instead of turns the target makes up
    start: Path | None = None  # a head of the same target to go on from; None: the target's own last layer
    tokens: int = 0  # 0: all of `data`, or GENERATED
    device: str = "cpu"
    cache_gb: float = 8.0  # of taps on disk; the taps of chats beyond it are computed again when needed
    checkpoint_seconds: float = 180.0
    batch_chats: int = 0  # chats written at a time; 0: by device


GENERATED = 1_000_000  # tokens to write when nobody says how many
DEFAULT_EPOCHS = 6
RECIPE = Recipe()
SOURCES = Sources()


def difference(got: msgspec.Struct, expected: msgspec.Struct) -> str:
    """The fields in which two recipes differ: `epochs 3 (was 6), seed 1 (was 0)`; empty when they are equal."""
    a, b = msgspec.to_builtins(got), msgspec.to_builtins(expected)
    return ", ".join(f"{name} {a[name]} (was {b[name]})" for name in a if a[name] != b[name])
