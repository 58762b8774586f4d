"""The part of an EAGLE-3 head that runs on the edge: tapped hidden states in, one fused row out.

Only committed rows go through it, before they are quantised and sent: a third of the bytes of raw taps, and the server
need not do it. It is a small file of its own beside the engine, so that a new head never rebuilds an engine. Written by
`starsd-server projector`, in safetensors:

    fc.weight            (hidden, taps · target width)         float16 or float32
    fc.bias              (hidden,)                             only where the head has one
    input_norm.weight    (taps · target width,)                RMS norm over the whole row, where the head has one
    fc_norm.{i}.weight   (target width,)                       RMS norm of tap i, where the head has them
    eps                  (1,) float32                          of these norms

The same arithmetic as `EagleLayer.fuse` in numpy float32, so that a device needs no further library.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starsd.shared.errors import ModelError
from starsd.shared.weights import TensorEntry, file_index

Floats = NDArray[np.float32]

_DTYPES: dict[str, type[np.floating]] = {"F16": np.float16, "F32": np.float32}


class Projector:
    """Call it with rows (n, `width`) float32; gives (n, `hidden`) float32."""

    def __init__(self, file: Path) -> None:
        """Raises ModelError when the file is not whole or is no projector."""
        if not file.is_file():
            raise ModelError(f"projector {file} is missing, write it with starsd-server projector")
        tensors = {name: _read(name, entry) for name, entry in file_index(file).items()}
        if "fc.weight" not in tensors or tensors["fc.weight"].ndim != 2:
            raise ModelError(f"{file} is no projector, expected fc.weight in two dimensions")
        self._weight = np.ascontiguousarray(tensors.pop("fc.weight").T)
        self.width, self.hidden = self._weight.shape
        self._bias = tensors.pop("fc.bias", None)
        self._input_norm = tensors.pop("input_norm.weight", None)
        eps = tensors.pop("eps", np.zeros(1, np.float32))
        taps = sum(name.startswith("fc_norm.") for name in tensors)
        self._tap_norms = [tensors.pop(f"fc_norm.{i}.weight", np.zeros(0, np.float32)) for i in range(taps)]
        sizes = [("fc.bias", self._bias, self.hidden), ("input_norm.weight", self._input_norm, self.width)]
        sizes += [(f"fc_norm.{i}.weight", norm, self.width // taps) for i, norm in enumerate(self._tap_norms)]
        for name, values, size in [*sizes, ("eps", eps, 1)]:
            if values is not None and values.shape != (size,):
                raise ModelError(f"projector {file} has {name} of shape {list(values.shape)}, expected {[size]}")
        if tensors:
            raise ModelError(f"projector {file} has {', '.join(sorted(tensors))} that nothing uses")
        self._eps = np.float32(eps[0])

    def __call__(self, rows: Floats) -> Floats:
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ModelError(f"features have shape {list(rows.shape)}, expected [rows, {self.width}]")
        x = np.asarray(rows, np.float32)
        if self._input_norm is not None:
            x = self._norm(x, self._input_norm)
        if self._tap_norms:
            parts = np.split(x, len(self._tap_norms), axis=1)
            x = np.concatenate([self._norm(p, gain) for p, gain in zip(parts, self._tap_norms, strict=True)], axis=1)
        out: Floats = x @ self._weight
        return out if self._bias is None else out + self._bias

    def _norm(self, x: Floats, gain: Floats) -> Floats:
        scaled: Floats = gain * (x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + self._eps))
        return scaled


def _read(name: str, entry: TensorEntry) -> Floats:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise ModelError(f"{entry.file} has {name} as {entry.dtype}, expected {' or '.join(_DTYPES)}")
    little = np.dtype(dtype).newbyteorder("<")
    size = math.prod(entry.shape) * little.itemsize
    held = entry.file.stat().st_size - entry.start
    if min(entry.shape, default=0) < 0 or size > held:
        raise ModelError(f"{entry.file} has {name} of shape {list(entry.shape)} in {held} bytes, expected {size}")
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        raw = stream.read(size)
    values: Floats = np.frombuffer(raw, little).reshape(entry.shape).astype(np.float32)
    return values
