"""The default model in every flavour: the same greedy text in fp32, and how much is lost below it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest

from starsd.edge.target import Target
from starsd.edge.target_onnx import open_bundle
from starsd.edge.text import Text
from starsd.export.bundle import Options, export_onnx
from starsd.shared.config import FLAVOURS, Engine
from starsd.shared.graph_contract import runs_on
from starsd.shared.home import parse_ref
from starsd.shared.manifest import FILE_NAME, read

pytestmark = pytest.mark.model

QUESTIONS = ("Why is the sea salty?", "Write a function that reverses a list.", "Name three birds that cannot fly.")
NEW_TOKENS = 32


def greedy(target: Target, prompt: list[int]) -> list[int]:
    target.truncate(0)
    target.prefill(prompt[:-1])
    tokens = [prompt[-1]]
    for _ in range(NEW_TOKENS):
        tokens.append(int(target.score([tokens[-1]], [-1])[0].argmax()))
        target.commit([0])
    return tokens[1:]


@pytest.fixture(scope="module")
def flavoured(smollm2_folder: Path) -> Callable[[str, str], Path]:
    def bundle(flavour: str, precision: str) -> Path:
        if not runs_on(flavour, ort.__version__):
            pytest.skip(f"onnxruntime {ort.__version__} has no {flavour}")
        folder = parse_ref("smollm2-135m").bundle(flavour, precision)
        if not (folder / FILE_NAME).is_file():
            export_onnx("smollm2-135m", Options(precision=precision, flavour=flavour))
        return folder

    return bundle


@pytest.mark.parametrize("flavour", FLAVOURS[1:])
def test_fp32_writes_what_ort_writes(
    flavour: str, smollm2_bundle: Callable[[str], Path], flavoured: Callable[[str, str], Path]
) -> None:
    usual, other = smollm2_bundle("fp32"), flavoured(flavour, "fp32")
    targets, text = [open_bundle(folder, Engine()) for folder in (usual, other)], Text.open(usual)
    print(f"{flavour}: {targets[1].padding}, noise {targets[1].noise:.1e}, branches {targets[1].branch_noise:.1e}")
    assert targets[1].branch_noise < 1e-3
    for question in QUESTIONS:
        prompt = text.encode_chat([{"role": "user", "content": question}])
        expected, got = (greedy(target, prompt) for target in targets)
        assert got == expected


@pytest.mark.exports
@pytest.mark.parametrize("flavour", FLAVOURS[1:])
@pytest.mark.parametrize(("precision", "top1", "kl"), [("int8", 0.95, 0.01), ("int4", 0.97, 0.003)])
def test_manifests_promise_enough(
    flavour: str, precision: str, top1: float, kl: float, flavoured: Callable[[str, str], Path]
) -> None:
    quality = read(flavoured(flavour, precision)).quality
    assert quality is not None
    print(f"{flavour} {precision}: {quality}")
    assert quality.top1 >= top1
    assert quality.kl <= kl
