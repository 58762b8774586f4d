"""Writes the part of an EAGLE-3 head that runs on the edge; `starsd.edge.projector` documents the file and reads it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from starsd.server.eagle_heads import HeadWeights
from starsd.shared.errors import UsageError

PROJECTOR_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_NORMS = ("input_norm.", "fc_norm.")


def save_projector(weights: HeadWeights, file: Path, dtype: str = "fp16") -> int:
    """Write a head's `fc` and the norms before it; bytes written.

    fp16 halves the file and moves a projected value by about 1e-3 of its size, less than any codec does. Norms and
    epsilon stay float32. Raises UsageError for EAGLE-1, whose features go as they are, and for values fp16 cannot hold.
    """
    if not weights.spec.eagle3:
        raise UsageError(f"{weights.spec.layout} heads have no projector: their features are sent as they are")
    if dtype not in PROJECTOR_DTYPES:
        raise UsageError(f"projector dtype {dtype!r} is unknown, expected one of {', '.join(PROJECTOR_DTYPES)}")
    tensors = {"eps": torch.tensor([weights.spec.eps], dtype=torch.float32)}
    for name, tensor in weights.tensors.items():
        if name.startswith("fc."):
            tensors[name] = tensor.to("cpu", PROJECTOR_DTYPES[dtype]).contiguous()
            if not tensors[name].isfinite().all():
                raise UsageError(f"{name} reaches {float(tensor.abs().max()):g}, too large for {dtype}: use fp32")
        elif name.startswith(_NORMS):
            tensors[name] = tensor.to("cpu", torch.float32).contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"layout": weights.spec.layout})
    return file.stat().st_size
