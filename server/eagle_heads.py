"""Loads published EAGLE heads as they are on disk, and of the target only `embed_tokens` and `lm_head`.

Nothing is loaded leniently: a missing, unused or misshapen tensor is an error that names it, since a head with one
random or forgotten tensor still drafts, only badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from starsd.server.eagle_formats import normalise, read_spec
from starsd.server.eagle_spec import HeadSpec
from starsd.shared.architecture import Architecture
from starsd.shared.errors import ModelError, UnsupportedModelError, UsageError
from starsd.shared.families import read_architecture
from starsd.shared.home import parse_ref
from starsd.shared.weights import INDEX_FILE, SINGLE_FILE, check_tensors, read_config, tensor_index

# int8: products as in `products.Linear`, everything else in float32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.float32}
TORCH_FILE = "pytorch_model.bin"
_TARGET_EMBEDDING = "model.embed_tokens.weight"
_TARGET_LM_HEAD = "lm_head.weight"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HeadWeights:
    """A head ready to run. `tensors` are named as in `HeadSpec.expected_tensors`, with `embed_tokens.weight` and
    `lm_head.weight` always there (borrowed from the target where the head has none), all on one device in one dtype.

    `to_target` (draft_vocab,) int64 maps draft ids to target ids; None when they are the same.
    """

    spec: HeadSpec
    tensors: Tensors
    to_target: torch.Tensor | None
    precision: str = "fp32"  # one of DTYPES


def load_head(head: str, target: str, *, dtype: str = "fp32", device: str = "cpu") -> HeadWeights:
    """Load a head for a target, each a local folder or an already pulled model reference.

    Raises ModelError naming tensors and shapes when the head is not whole or does not fit, UsageError for an unknown
    reference, dtype or device.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown, expected one of {', '.join(DTYPES)}")
    place = _device(device)
    if dtype == "int8" and place.type != "cpu":
        raise UsageError(f"int8 runs on the cpu only, got device {device!r}: load the head as bf16")
    folder, target_folder = _resolve(head), _resolve(target)
    # how the target's layers are stored is no concern of a head's
    architecture = read_architecture({**read_config(target_folder), "quantization_config": None})
    tensors = _read_head(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    spec = read_spec(read_config(folder), shapes, architecture.shape)
    check_tensors(f"head {folder}", shapes, spec.expected_tensors())
    to_target = _target_ids(spec, tensors.pop("d2t", None), tensors.pop("t2d", None))
    tensors |= _borrow(spec, target_folder, architecture)
    return HeadWeights(
        spec,
        {name: tensor.to(place, DTYPES[dtype]) for name, tensor in tensors.items()},
        None if to_target is None else to_target.to(place),
        dtype,
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _resolve(reference: str) -> Path:
    ref = parse_ref(reference)
    if not ref.folder.is_dir():
        raise UsageError(f"{reference} is not here yet: run starsd pull {reference}")
    return ref.folder


def _read_head(folder: Path) -> Tensors:
    """Every tensor that a head's folder holds, under our names."""
    raw: Mapping[str, torch.Tensor]
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        index = tensor_index(folder)
        raw = {name: _read_tensor(entry.file, name) for name, entry in index.items()}
    elif (folder / TORCH_FILE).is_file():
        raw = _read_torch_file(folder / TORCH_FILE)
    else:
        raise ModelError(f"{folder} has neither {SINGLE_FILE}, {INDEX_FILE} nor {TORCH_FILE}")
    tensors: Tensors = {}
    for name, tensor in raw.items():
        ours = normalise(name)
        if ours in tensors:
            raise ModelError(f"head {folder} has {name} twice, as {ours}")
        if ours is not None:
            tensors[ours] = tensor
    return tensors


def _read_tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as stream:
        tensor: torch.Tensor = stream.get_tensor(name)
    return tensor


def _read_torch_file(file: Path) -> Mapping[str, torch.Tensor]:
    try:
        raw = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling refuses with many types; none of them may run or pass
        raise UnsupportedModelError(f"{file} holds more than tensors or is broken: {_first_line(error)}") from error
    if not isinstance(raw, dict) or not all(isinstance(value, torch.Tensor) for value in raw.values()):
        raise UnsupportedModelError(f"{file} holds more than named tensors")
    return raw


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _target_ids(spec: HeadSpec, d2t: torch.Tensor | None, t2d: torch.Tensor | None) -> torch.Tensor | None:
    """Target id of each draft id. `d2t` holds offsets: target id = draft id + d2t[draft id]."""
    if d2t is None:
        return None
    ids = torch.arange(spec.draft_vocab) + d2t.long()
    if bool(((ids < 0) | (ids >= spec.vocab)).any()):
        raise ModelError(f"d2t maps to ids {int(ids.min())} to {int(ids.max())}, expected 0 to {spec.vocab - 1}")
    if (distinct := len(set(ids.tolist()))) != len(ids):
        raise ModelError(f"d2t maps {len(ids)} draft ids to {distinct} target ids, expected as many")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise ModelError("d2t and t2d disagree about which target ids can be drafted")
    return ids


def _borrow(spec: HeadSpec, folder: Path, target: Architecture) -> Tensors:
    """What the head lacks and its target has. The rest of the target is never read."""
    shape = target.shape
    wanted: dict[str, str] = {}
    if not spec.own_embedding:
        wanted["embed_tokens.weight"] = _TARGET_EMBEDDING
    if not spec.eagle3:
        wanted["lm_head.weight"] = _TARGET_EMBEDDING if target.tied_head else _TARGET_LM_HEAD
    if not wanted:
        return {}
    if target.embedding_scale != 1 or target.logit_cap:
        raise UnsupportedModelError(
            f"a head cannot borrow {', '.join(wanted)} of a {target.family}, which scales or caps: expected its own"
        )
    index = tensor_index(folder)
    needed = set(wanted.values())
    found = {name: entry for name, entry in index.items() if name in needed}
    check_tensors(f"target {folder}", found, dict.fromkeys(needed, (shape.vocab, shape.hidden)))
    read = {name: _read_tensor(entry.file, name) for name, entry in found.items()}
    return {ours: read[theirs] for ours, theirs in wanted.items()}
