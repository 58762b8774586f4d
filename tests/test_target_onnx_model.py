"""The engine with the default model: exactness, parity, quality and memory at full size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_model import plain_logits
from tokenizers import Tokenizer

from starsd.edge.target_onnx import open_bundle
from starsd.shared import manifest, tree
from starsd.shared.config import Engine

pytestmark = pytest.mark.model

TEXT = (
    "The harbour lay still under a sky the colour of slate. Marta counted the boats twice, as her father had taught "
    "her, and wrote 17 in the log; then she walked along the quay to see which of them had come in during the night. "
)
ENGINE = Engine(initial_context=64)


def text_ids(bundle: Path, count: int) -> list[int]:
    ids = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode(TEXT * (count // 40 + 1)).ids
    return ids[:count]


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("past", [3, 60, 250])
def test_rows_do_not_depend_on_each_other(smollm2_bundle: Callable[[str], Path], precision: str, past: int) -> None:
    """To the last bit on the trunk, for any number of rows; behind it within a few times the measured noise."""
    bundle = smollm2_bundle(precision)
    target, ids = open_bundle(bundle, ENGINE), text_ids(bundle, 300)
    target.prefill(ids[:past])
    drafted = ids[past : past + 5] + text_ids(bundle, 40)[20:32]
    parents = [*tree.chain(5), 0, 5, 1, 2, 7, 3, 10, 4, 12, 13, 4, 15]
    whole = target.score(drafted, parents)
    assert target.noise == 0
    for count in (1, 2, 3, 4, 5, 8, 16):
        np.testing.assert_array_equal(target.score(drafted[:count], parents[:count]), whole[:count])
    np.testing.assert_array_equal(plain_logits(target, drafted[:5]), whole[:5])
    target.truncate(past)
    branch = tree.path_to(parents, 14)
    apart = np.abs(plain_logits(target, [drafted[row] for row in branch]) - whole[branch]).max()
    print(f"{precision} at {past}: a branch is {apart:.3f} logits from plain decoding, noise {target.branch_noise:.3f}")
    assert apart <= 5 * target.branch_noise


def test_fp32_equals_transformers(smollm2_folder: Path, smollm2_bundle: Callable[[str], Path]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    bundle = smollm2_bundle("fp32")
    ids = text_ids(bundle, 200)
    target = open_bundle(bundle, ENGINE)
    taps = target.features.taps
    features = target.prefill(ids[:190])
    logits = target.score(ids[190:], tree.chain(10))
    features = np.concatenate([features, target.commit(range(10))])
    model = transformers.LlamaForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True)
    np.testing.assert_allclose(logits, expected.logits[0, 190:].numpy(), atol=1e-3)
    hidden = np.concatenate([expected.hidden_states[tap][0].numpy() for tap in taps], axis=1)
    assert taps == (2, 15, 27)
    assert np.linalg.norm(features - hidden) < 1e-5 * np.linalg.norm(hidden)


@pytest.mark.parametrize(("precision", "top1"), [("int4", 0.90), ("int8", 0.95)])
def test_manifests_promise_enough(smollm2_bundle: Callable[[str], Path], precision: str, top1: float) -> None:
    quality = manifest.read(smollm2_bundle(precision), verify=True).quality
    assert quality is not None
    print(f"{precision}: {quality}")
    assert quality.tokens > 500
    assert quality.top1 >= top1
    assert quality.kl < 0.02


MEASURE = """
import re, sys
from pathlib import Path
from starsd.edge.target_onnx import open_bundle
from starsd.shared.config import Engine
target = open_bundle(Path(sys.argv[1]), Engine())
target.prefill([i % 40000 for i in range(2036)])
for _ in range(3):
    target.score([5] * 12, [-1, *range(11)])
print(*(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1] for name in ("VmHWM", "VmRSS")))
"""


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_memory_at_2048_tokens(smollm2_bundle: Callable[[str], Path], precision: str) -> None:
    bundle = smollm2_bundle(precision)
    argv = [sys.executable, "-c", MEASURE, str(bundle)]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    peak, now = (int(part) * 1024 / 1e6 for part in printed.split())
    weights = (bundle / "model.onnx.data").stat().st_size / 1e6
    print(f"{precision}: weights {weights:.0f} MB, peak {peak:.0f} MB, at rest {now:.0f} MB")
    assert peak < weights + 350
