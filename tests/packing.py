"""Random layers packed as GPTQ and AWQ store them, number by number as their formats say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class PackedLayer:
    """What lies in the file under `<name>.`, and the weight (outputs, inputs) that it stands for."""

    tensors: dict[str, np.ndarray]
    weight: np.ndarray


def config(method: str, bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, "bits": bits, "group_size": group, **more}}


def pack(
    outputs: int,
    inputs: int,
    *,
    method: str = "gptq",
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    shuffled: bool = False,
    version: int = 1,
    size: float = 0.02,
    seed: int = 0,
) -> PackedLayer:
    """A layer of random quants, zeros (the middle one if `symmetric`) and float16 scales around `size`.

    `shuffled` gives inputs to groups in an order of the seed's; `version` is GPTQ's, the first stores zeros less one.
    """
    values = np.random.default_rng(seed)
    group = inputs if group == -1 else group
    groups = inputs // group
    quants = values.integers(0, 1 << bits, (inputs, outputs))
    zeros = values.integers(0, 1 << bits, (groups, outputs))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = (size * values.uniform(0.5, 1.5, (groups, outputs))).astype(np.float16)
    index = np.arange(inputs) // group
    if shuffled:
        index = np.random.default_rng(seed).permutation(index)
    weight = (quants - zeros[index]) * scales[index].astype(np.float64)
    if method == "awq":
        tensors = {"qweight": _columns(quants, bits, AWQ_ORDER), "qzeros": _columns(zeros, bits, AWQ_ORDER)}
    else:
        in_order = tuple(range(32 // bits))
        stored = (zeros - 1) % (1 << bits) if version == 1 else zeros
        tensors = {
            "qweight": _columns(quants.T, bits, in_order).T.copy(),
            "qzeros": _columns(stored, bits, in_order),
            "g_idx": index.astype(np.int32),
        }
    return PackedLayer({**tensors, "scales": scales}, weight.T.astype(np.float32))


def _columns(numbers: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Several columns in each int32: the one named at place i of `order` in its bits from i * bits on."""
    words = np.zeros((len(numbers), numbers.shape[1] // len(order)), np.uint64)
    for row in range(len(numbers)):
        for word in range(words.shape[1]):
            for place, column in enumerate(order):
                number = int(numbers[row, word * len(order) + column])
                words[row, word] |= np.uint64(number << (place * bits))
    return words.astype(np.uint32).view(np.int32)
