"""Bundles on the onnxruntime that boards with Python 3.10 end at, in an environment of its own, against this one's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from old_runtime import steps
from tiny_families import TAPS, write_family
from tiny_model import export

from starsd.shared.config import PRECISIONS

pytestmark = pytest.mark.ort123

OLD = "1.23.2"
ROOT = Path(__file__).parent.parent
CASES = ("llama", "qwen3", "gemma2")
# shares of the largest value: releases round alike but for the last bits, which int8 activations amplify
SHARES = {"fp32": 1e-5, "fp16": 2e-3, "int8": 0.05, "int4": 0.05}


@pytest.fixture(scope="session")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the old release and what the edge needs to compute, and no more."""
    if ort.__version__ == OLD:
        return Path(sys.executable)
    place = tmp_path_factory.mktemp("old")
    subprocess.run([sys.executable, "-m", "venv", place], check=True, capture_output=True)
    python = place / "bin" / "python"
    wanted = [f"onnxruntime=={OLD}", "numpy", "msgspec"]
    done = subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"onnxruntime {OLD} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return python


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path on which the source is importable as `starsd`."""
    place = tmp_path_factory.mktemp("path")
    (place / "starsd").mkdir()
    for name in ("edge", "shared"):
        (place / "starsd" / name).symlink_to(ROOT / name)
    return place


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {case: write_family(place / case / "m", case) for case in CASES}


def run_old(python: Path, package: Path, bundle: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, ROOT / "tests" / "old_runtime.py", bundle, out],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package)},
    )


@pytest.mark.parametrize("flavour", ["ort", "decomposed"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_old_release_computes_the_same(
    case: str,
    precision: str,
    flavour: str,
    old_python: Path,
    package: Path,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    bundle = export(folders[case], tmp_path / "b", precision, flavour=flavour, taps=TAPS, last_hidden=True)
    done = run_old(old_python, package, bundle, tmp_path / "old.npz")
    assert done.returncode == 0, done.stderr
    got, expected = np.load(tmp_path / "old.npz"), steps(bundle)
    for name in ("logits", "features"):
        atol = SHARES[precision] * np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=atol)
    trunk, branch = got["noise"]
    print(f"{case} | {flavour} | {precision} | noise {trunk:.1e} | branches {branch:.1e}")
    if flavour == "ort":
        assert trunk == 0


def test_portable_is_refused_by_name(old_python: Path, package: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    done = run_old(
        old_python, package, export(folders["llama"], tmp_path / "b", flavour="portable"), tmp_path / "n.npz"
    )
    assert done.stderr.strip().endswith(
        f"flavour portable needs onnxruntime 1.25.1 or newer, this is {OLD}: export ort or decomposed instead"
    )
