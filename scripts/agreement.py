"""How near an engine comes to fp32 on text that fp32 writes, token by token as plain decoding reads it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from starsd.edge.target import Target
from starsd.shared.console import Progress, no_progress

TOKENS = 64
LEAST_TOP1 = {"fp32": 0.98, "fp16": 0.95, "int8": 0.85, "int4": 0.7}  # below, an engine computes wrong


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How near an engine came to fp32 on text that fp32 wrote."""

    bundle: str
    top1: float  # share of equal argmaxes
    kl: float  # mean, in nats
    largest: float  # difference in a logit
    noise: float
    branch_noise: float

    def complaint(self, precision: str) -> str | None:
        """What shows that the engine computes wrong; None when nothing does."""
        if not np.isfinite(self.kl) or not np.isfinite(self.largest):
            return f"{self.bundle} computes logits that are not finite"
        if self.top1 < LEAST_TOP1[precision]:
            share, least = 100 * self.top1, 100 * LEAST_TOP1[precision]
            return f"{self.bundle} agrees with fp32 in {share:.1f} % of argmaxes, expected {least:.0f} % in {precision}"
        return None


class OnProvider(Agreement, frozen=True, kw_only=True):
    """Of ONNX Runtime on a GPU."""

    provider: str
    cuda_graphs: bool


def compare(
    reference: Target, target: Target, prompt: Sequence[int], progress: Progress = no_progress
) -> tuple[float, float, float]:
    """Share of equal argmaxes, mean KL divergence and largest difference of a logit, over the reference's answer."""
    for one in (reference, target):
        one.truncate(0)
        one.prefill(prompt[:-1])
    token, equal, divergence, largest = prompt[-1], 0, 0.0, 0.0
    for done in range(TOKENS):
        expected, got = (one.score([token], [-1])[0].astype(np.float64) for one in (reference, target))
        for one in (reference, target):
            one.commit([0])
        token = int(expected.argmax())
        equal += int(got.argmax()) == token
        theirs, ours = (row - row.max() - np.log(np.exp(row - row.max()).sum()) for row in (expected, got))
        divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        largest = max(largest, float(np.abs(expected - got).max()))
        progress("comparing with fp32", done + 1, TOKENS)
    return equal / TOKENS, divergence / TOKENS, largest
