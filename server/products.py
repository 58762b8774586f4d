"""Matrix products for the few rows that a drafter's pass has.

Below about 64 rows reading the weights is what costs. So float32 weights lie transposed (MKL is twice as fast that way
for 2 to 32 rows), and int8 weights are a quarter of the bytes. int8 quantises each output's weights and each *row* of
activations by its own largest value: the products are exact integers, so a row's result does not depend on the rows
beside it, whatever their number (DESIGN promise 2 for drafts).
"""

from __future__ import annotations

import torch

_STEPS = 127
_TINY = 1e-20  # keeps a row or column of zeros from dividing by zero


class Linear:
    """x Wᵀ + b for x (n, in) → (n, out), in x's dtype; `weight` is (out, in)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False) -> None:
        self._bias = bias
        self._scale: torch.Tensor | None = None
        if int8:
            scale = weight.float().abs().amax(1).clamp(min=_TINY) / _STEPS
            self._scale = scale
            self._weight = (weight.float() / scale[:, None]).round().to(torch.int8).t()
        elif weight.dtype == torch.float32 and weight.device.type == "cpu":
            self._weight = weight.t().contiguous()
        else:
            self._weight = weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._scale is None:
            return x @ self._weight if self._bias is None else torch.addmm(self._bias, x, self._weight)
        largest = x.abs().amax(1, keepdim=True).clamp_(min=_TINY)  # stays NaN where x is: the result must show it
        steps = (x * (_STEPS / largest)).round_().to(torch.int8)
        out = torch._int_mm(steps, self._weight).float().mul_(self._scale).mul_(largest / _STEPS)
        return out if self._bias is None else out + self._bias
