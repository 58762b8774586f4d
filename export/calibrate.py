"""What the inputs of every linear layer look like over a text: the model in fp32, each layer's inputs handed out.

The graph is that of the checkpoint at hand, in its basis, so that what is learned fits the weights that are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from starsd.export.check import Runner
from starsd.export.checkpoint import Checkpoint
from starsd.export.flavour_ort import OrtFlavour
from starsd.export.graph import GraphWriter
from starsd.export.graph_decoder import build
from starsd.export.linear import add_bias
from starsd.export.recipe import Recipe
from starsd.export.rounding import Curvature
from starsd.export.train_data import Chats
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import UsageError
from starsd.shared.manifest import FeatureSpec

TOKENS = 4096  # of a text
LONGEST = 512  # tokens of one chat that are read
MAX_MEGABYTES = 4096  # of sums of squares, all layers' together
_READING = "reading calibration text"

Floats = NDArray[np.float32]


def calibrate(
    checkpoint: Checkpoint, chats: Chats, place: Path, progress: Progress = no_progress
) -> dict[str, Curvature]:
    """The curvature of every linear layer's inputs, by its weight's name, over the first `TOKENS` of `chats`.

    `place` has room for the weights in fp32 meanwhile. Raises UsageError when the sums would take too much memory.
    """
    spec = FeatureSpec((), False, checkpoint.shape.hidden)
    texts = _texts(chats, min(LONGEST, checkpoint.shape.context))
    with TemporaryDirectory(dir=place) as folder:
        recorder = _Recorder(checkpoint)
        recipe = Recipe(OrtFlavour, np.float32, recorder, recorder, recorder, np.float32)
        with GraphWriter(Path(folder), OrtFlavour.opsets, OrtFlavour.ir_version) as graph:
            build(graph, checkpoint, recipe, spec, max(map(len, texts)))
            graph.save("calibration")
        megabytes = 4 * sum(width**2 for width in recorder.widths.values()) >> 20
        if megabytes > MAX_MEGABYTES:
            raise UsageError(f"calibration of this model takes {megabytes} MB, expected at most {MAX_MEGABYTES}")
        sums = {x: np.zeros((width, width), np.float32) for x, width in recorder.widths.items()}
        shape = checkpoint.architecture.within(max(map(len, texts))).shape
        runner = Runner(Path(folder), shape, shape.context, mapped=True)
        for done, tokens in enumerate(texts):
            outputs = runner.run(tokens, 0)
            for x in sums:
                sums[x] += outputs[x].T @ outputs[x]
            progress(_READING, done + 1, len(texts))
        del runner
    curvatures = {x: Curvature(total) for x, total in sums.items()}
    return {weight: curvatures[x] for weight, x in recorder.inputs.items()}


def _texts(chats: Chats, longest: int) -> list[list[int]]:
    """Chats in their order, each cut to `longest`, `TOKENS` in all."""
    texts: list[list[int]] = []
    room = TOKENS
    for chat in range(len(chats)):
        tokens = chats.tokens[chats.rows(chat)][: min(longest, room)].tolist()
        if tokens:
            texts.append(tokens)
            room -= len(tokens)
    if not texts:
        raise UsageError("calibration chats hold no tokens")
    return texts


class _Recorder:
    """A linear layer in fp32 that hands out what it reads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.widths: dict[str, int] = {}  # of inputs by the name of the value
        self.inputs: dict[str, str] = {}  # that value by the weight's name

    def __call__(self, graph: GraphWriter, x: str, weights: Sequence[str], to: str) -> str:
        weight = np.concatenate([self._checkpoint.tensor(name) for name in weights])
        if x not in self.widths:
            self.widths[x] = weight.shape[1]
            graph.output(x, np.float32, ["rows", weight.shape[1]])
        self.inputs |= dict.fromkeys(weights, x)
        y = graph.node("Gemm", x, graph.constant(weights[0] + ".turned", weight), to=to, transB=1)
        return add_bias(graph, self._checkpoint, y, weights, np.float32)
