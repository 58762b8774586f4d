"""The projector file: written from a head, read without torch, equal to what the server computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_builder import base_config, random_tensors, rows, speculators_config, write_head
from safetensors.numpy import load_file, save_file
from torch_helpers import GOLDEN, golden_target, tiny_llama

from starsd.edge.projector import Projector
from starsd.server.batch import BatchDrafter
from starsd.server.cli import main
from starsd.server.drafter import DynamicTree, SlotLimits
from starsd.server.drafter_eagle import open_drafter
from starsd.server.eagle_heads import HeadWeights, load_head
from starsd.server.eagle_layer import EagleLayer
from starsd.server.projector import save_projector
from starsd.shared.errors import ModelError, UsageError

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "EAGLE-3": ({}, base_config(draft_vocab_size=48), True),
    "speculators, one norm": ({"input_norm": True}, speculators_config(norm_before_fc=True), False),
    "speculators, a norm for each tap": ({"fc_norm": True}, speculators_config(fc_norm=True), False),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("projector")
    tiny_llama().save_pretrained(folder)
    return str(folder)


def head(folder: Path, target: str, kind: str) -> HeadWeights:
    flags, config, midlayer = KINDS[kind]
    write_head(folder, config, random_tensors(**flags), midlayer=midlayer)
    return load_head(str(folder), target)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 3e-6), ("fp16", 2e-3)])
def test_it_equals_the_servers_own(tmp_path: Path, target: str, kind: str, dtype: str, tolerance: float) -> None:
    weights = head(tmp_path / "head", target, kind)
    assert save_projector(weights, tmp_path / "p.safetensors", dtype) == (tmp_path / "p.safetensors").stat().st_size
    project = Projector(tmp_path / "p.safetensors")
    assert (project.width, project.hidden) == (96, 32)
    features, _ = rows(7, 96)
    features *= 3
    got, wanted = project(features), EagleLayer(weights).fuse(torch.from_numpy(features)).numpy()
    assert got.dtype == np.float32
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max())


def test_drafts_from_projected_rows_are_the_same(tmp_path: Path, target: str) -> None:
    weights = head(tmp_path / "head", target, "speculators, one norm")
    save_projector(weights, tmp_path / "p.safetensors", "fp32")
    shape = DynamicTree(24, 4, 5)
    batch = BatchDrafter(EagleLayer(weights), SlotLimits(2, 64, 40), shape)
    raw, projected = batch.open(), batch.open(projected=True)
    features, following = rows(20, 96)
    for session, given in ((raw, features), (projected, Projector(tmp_path / "p.safetensors")(features))):
        session.commit([0, *following.tolist()])
        session.feed(0, given)
    one, other = batch.trees([raw, projected], shape)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(one.scores, other.scores, atol=3e-5)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variant, out = "e3_gqa_d2t", tmp_path / "new" / "p.safetensors"
    folders = ["--head", str(GOLDEN / variant / "head"), "--target", str(golden_target(variant))]
    assert main(["projector", *folders, "--out", str(out), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row == {"file": str(out), "bytes": out.stat().st_size, "dtype": "fp16"}
    weights = open_drafter(folders[1], folders[3]).layer.spec
    assert Projector(out).width == weights.features.width
    variant = "e1_mha_bias"
    folders = ["--head", str(GOLDEN / variant / "head"), "--target", str(golden_target(variant))]
    assert main(["projector", *folders, "--out", str(out)]) == 1
    assert "EAGLE-1 heads have no projector: their features are sent as they are" in capsys.readouterr().err


def test_values_that_do_not_fit_are_refused(tmp_path: Path, target: str) -> None:
    weights = head(tmp_path / "head", target, "EAGLE-3")
    weights.tensors["fc.weight"][0, 0] = 1e5
    with pytest.raises(UsageError, match=r"fc.weight reaches 100000, too large for fp16: use fp32"):
        save_projector(weights, tmp_path / "p.safetensors")
    with pytest.raises(UsageError, match="projector dtype 'int4' is unknown, expected one of fp32, fp16"):
        save_projector(weights, tmp_path / "p.safetensors", "int4")


def test_other_files_are_refused(tmp_path: Path, target: str) -> None:
    file = tmp_path / "p.safetensors"
    with pytest.raises(ModelError, match="is missing, write it with starsd-server projector"):
        Projector(file)
    save_projector(head(tmp_path / "head", target, "speculators, a norm for each tap"), file, "fp32")
    whole = load_file(file)
    project = Projector(file)
    with pytest.raises(ModelError, match=r"features have shape \[2, 95\], expected \[rows, 96\]"):
        project(np.zeros((2, 95), np.float32))
    cases: list[tuple[dict[str, np.ndarray], str]] = [
        ({k: v for k, v in whole.items() if k != "fc.weight"}, "is no projector, expected fc.weight"),
        (whole | {"lm_head.weight": np.zeros(3, np.float32)}, "lm_head.weight that nothing uses"),
        (whole | {"fc_norm.1.weight": np.zeros(5, np.float32)}, r"fc_norm.1.weight of shape \[5\]"),
        (whole | {"fc.bias": np.zeros(3, np.float32)}, r"fc.bias of shape \[3\], expected \[32\]"),
        (whole | {"eps": np.zeros(1, np.float64)}, "has eps as F64, expected F16 or F32"),
    ]
    for tensors, message in cases:
        save_file(tensors, file)
        with pytest.raises(ModelError, match=message):
            Projector(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="bytes, expected"):
        Projector(file)


def test_the_edge_needs_no_torch() -> None:
    code = "import sys, starsd.edge.projector; print(*sorted({'torch', 'safetensors'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
