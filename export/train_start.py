"""Going on from a head that was trained before: its weights are where training starts, whatever draft ids it had."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from starsd.export.train_data import Ints
from starsd.export.train_head import Head
from starsd.shared.errors import ModelError

_FILE = "model.safetensors"


def start_from(head: Head, folder: Path, draft_ids: Ints) -> int:
    """Copy a folder of `save_head` into an initialised head whose draft vocabulary is `draft_ids`.

    Rows of `lm_head` for ids that the earlier head could not draft are moved as the others are on average; how many
    those are. Raises ModelError when the folder is no head of this shape.
    """
    try:
        tensors = load_file(folder / _FILE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / _FILE} cannot be read: {error}") from error
    own = dict(head.named_parameters())
    if missing := sorted(own.keys() - tensors.keys()):
        raise ModelError(f"{folder / _FILE} lacks {', '.join(missing)}, expected an EAGLE-3 head made here")
    earlier = tensors["lm_head.weight"]
    offsets = tensors.get("d2t", torch.zeros(len(earlier), dtype=torch.int64))
    place = {int(number + offset): number for number, offset in enumerate(offsets)}
    known = [(row, place[token]) for row, token in enumerate(draft_ids.tolist()) if token in place]
    with torch.no_grad():
        for name, parameter in own.items():
            got, expected = list(tensors[name].shape), list(parameter.shape)
            if name == "lm_head.weight":
                got, expected = got[1:], expected[1:]
            if got != expected:
                raise ModelError(f"{folder / _FILE} has {name} {got}, expected {expected}: it is another target's head")
            if name != "lm_head.weight":
                parameter.copy_(tensors[name])
        rows, theirs = ([pair[side] for pair in known] for side in (0, 1))
        if known:
            learnt = earlier[theirs].to(head.lm_head.weight.dtype)
            # what training did to all rows alike is done to the unknown ones, else their logits outbid all others
            head.lm_head.weight += (learnt - head.lm_head.weight[rows]).mean(0)
            head.lm_head.weight[rows] = learnt
    return len(draft_ids) - len(known)
