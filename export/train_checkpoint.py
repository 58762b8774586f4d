"""A training run on disk, whole or not at all: weights and optimiser as safetensors, the rest as JSON; no pickles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from starsd.export.staging import staged
from starsd.export.train_head import Head
from starsd.export.train_recipe import Recipe
from starsd.shared.errors import UsageError

_TENSORS, _STATE = "state.safetensors", "state.json"
_PARTS = {"avg": "exp_avg", "square": "exp_avg_sq"}  # our prefix → AdamW's name


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run is. An epoch's batches and their order follow from the recipe's seed and `epoch`, the columns drawn
    for a batch from `batch` besides, and nothing else in training is random, so that this and the tensors are all there
    is to resume exactly."""

    step: int = 0  # optimiser steps taken
    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    seconds: float = 0.0  # spent on the run, preparation included
    prepared: float = 0.0  # of them, before the first step


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: str
    dtype: str
    recipe: Recipe
    position: Position


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read; `tensors` are named as `write` names them."""

    dtype: str
    recipe: Recipe
    position: Position
    tensors: dict[str, torch.Tensor]


def write(
    folder: Path,
    fingerprint: str,
    dtype: str,
    recipe: Recipe,
    position: Position,
    head: Head,
    optimiser: torch.optim.AdamW,
) -> None:
    """Replace the checkpoint in `folder`. Interrupted at any time, the earlier one is still there and whole."""
    tensors = {}
    for name, parameter in head.named_parameters():
        tensors[f"head.{name}"] = parameter.detach()
        for prefix, theirs in _PARTS.items():
            if parameter in optimiser.state:
                tensors[f"{prefix}.{name}"] = optimiser.state[parameter][theirs]
    with staged(folder) as partial:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial / _TENSORS)
        state = _State(fingerprint, dtype, recipe, position)
        (partial / _STATE).write_bytes(msgspec.json.encode(state))


def read(folder: Path, fingerprint: str) -> Saved | None:
    """The checkpoint in `folder`, None when there is none. Raises UsageError for one of another target or data."""
    if not (folder / _STATE).is_file():
        return None
    try:
        state = msgspec.json.decode((folder / _STATE).read_bytes(), type=_State)
        tensors = load_file(folder / _TENSORS)
    except (OSError, msgspec.MsgspecError, SafetensorError) as error:
        raise UsageError(f"checkpoint {folder} cannot be read: {error}: delete it to start over") from error
    if state.fingerprint != fingerprint:
        raise UsageError(
            f"checkpoint {folder} is of another target or other data ({state.fingerprint[:12]}, expected "
            f"{fingerprint[:12]}): choose another --out or delete it"
        )
    return Saved(state.dtype, state.recipe, state.position, tensors)


def restore(saved: Saved, head: Head, optimiser: torch.optim.AdamW) -> None:
    """Put a checkpoint's tensors into a head and its optimiser."""
    state = {}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(head.named_parameters()):
            parameter.copy_(saved.tensors[f"head.{name}"])
            if f"avg.{name}" in saved.tensors:
                moments = {theirs: saved.tensors[f"{prefix}.{name}"] for prefix, theirs in _PARTS.items()}
                state[number] = {"step": torch.tensor(float(saved.position.step)), **moments}
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
