"""Runs a bundle where only numpy, msgspec and an onnxruntime are installed: `python old_runtime.py BUNDLE OUT.npz`.

The steps are those of `steps`, which the test takes with its own runtime as well.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

TREE = (-1, 0, 0, 1, 2, 2, 5)
ACCEPTED = (0, 2, 5, 6)


def steps(bundle: Path) -> dict[str, Any]:
    """A prompt in chunks, a tree, a path of it committed, a plain pass: logits, features and measured noise."""
    from starsd.edge.target_onnx import open_bundle
    from starsd.shared.config import Engine

    target = open_bundle(bundle, Engine(threads=1, initial_context=4, prefill_chunk=50))
    vocab = target.shape.vocab
    features = target.prefill([(37 * i + 5) % vocab for i in range(70)])
    logits = target.score([(11 * i + 3) % vocab for i in range(len(TREE))], TREE)
    kept = target.commit(ACCEPTED)
    plain = target.score([9], [-1])
    return {
        "logits": np.concatenate([logits, plain]),
        "features": np.concatenate([features, kept]),
        "noise": np.array([target.noise, target.branch_noise]),
    }


if __name__ == "__main__":
    np.savez(sys.argv[2], **steps(Path(sys.argv[1])))
