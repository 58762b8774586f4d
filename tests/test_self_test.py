"""`starsd doctor --self-test`: the comparison, the measurement, and which engine they are of."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_onnxruntime import stand_in_gpu
from tensorrt_helpers import build, stand_in
from test_bundle import outdated
from tiny_model import export, write_folder
from tiny_session import ToyTarget

from starsd.scripts import self_test as module
from starsd.scripts.agreement import LEAST_TOP1, TOKENS, OnProvider, compare
from starsd.scripts.cli import main
from starsd.scripts.self_test import ROWS, SelfTest, device_name, measure, self_test
from starsd.shared.config import DEFAULT_PRECISION, PRECISIONS
from starsd.shared.errors import UsageError
from starsd.shared.home import parse_ref
from starsd.shared.profiles import read_profile


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with bundles beside it."""
    place = tmp_path_factory.mktemp("self-test")
    source = write_folder(place / "source", num_hidden_layers=2)
    export(source, place / "ort-fp32")
    export(source, place / f"ort-{DEFAULT_PRECISION}", DEFAULT_PRECISION)
    export(source, place / "decomposed-fp32", flavour="decomposed")
    return place


@pytest.fixture
def model(exported: Path, starsd_home: Path) -> str:
    """The same in this store, without anything of TensorRT's."""
    ref = parse_ref(str(exported / "source"))
    for flavour, precision in (("ort", "fp32"), ("ort", DEFAULT_PRECISION)):
        shutil.copytree(exported / f"{flavour}-{precision}", ref.bundle(flavour, precision))
    return str(exported / "source")


def on_cuda() -> OnProvider:
    values: dict[str, Any] = {"bundle": "tiny/decomposed-fp16", "top1": 1.0, "kl": 0.0, "largest": 0.0}
    return OnProvider(**values, noise=0.0, branch_noise=0.0, provider="cuda", cuda_graphs=True)


def result(**changes: Any) -> SelfTest:
    values: dict[str, Any] = {"bundle": "tiny/ort-int8", "device": "cpu", "tensorrt": False, "why_not": "none"}
    values |= {"tokens": TOKENS, "top1": 1.0, "kl": 0.0, "largest": 0.0, "noise": 0.0, "branch_noise": 0.0}
    values |= {"providers": [], "skipped": {}}
    return SelfTest(**{**values, "profile": "p.json", "pass_ms": [(1, 1.0)], "prefill_tok_s": 1.0, **changes})


def test_an_engine_agrees_with_itself() -> None:
    one, other = ToyTarget(), ToyTarget()
    assert compare(one, other, [3, 4, 5]) == (1.0, 0.0, 0.0)
    assert one.length == other.length == 2 + TOKENS


def test_what_differs_is_counted() -> None:
    """Every fourth answer of the other engine is another token, by a logit that is 3 larger."""

    class Wrong(ToyTarget):
        asked = count()

        def score(self, tokens: Any, parents: Any) -> Any:
            logits = np.array(super().score(tokens, parents))
            if next(self.asked) % 4 == 0:
                logits[0, int(logits[0].argmin())] = logits[0].max() + 3
            return logits

    top1, kl, largest = compare(ToyTarget(), Wrong(), [3, 4, 5])
    assert top1 == 0.75
    assert kl > 0.1
    assert largest > 3


def test_a_measurement_is_a_profile() -> None:
    """A clock that has no time for wide passes: more rows never count as faster."""
    target, seen = ToyTarget(), []
    now = [0.0]
    score = target.score

    def timed(tokens: Any, parents: Any) -> Any:
        now[0] += 0.010 if len(tokens) != 8 else 0.001
        seen.append(len(tokens))
        return score(tokens, parents)

    target.score = timed  # type: ignore[method-assign]
    prefill = target.prefill
    target.prefill = lambda *a: (now.__setitem__(0, now[0] + 0.5), prefill(*a))[1]  # type: ignore[assignment]
    profile = measure(target, "toy", "cpu", clock=lambda: now[0])
    rows = [rows for rows in ROWS if rows + TOKENS <= target.context]
    assert [point[0] for point in profile.pass_ms] == rows == list(dict.fromkeys(seen))
    assert {point[1] for point in profile.pass_ms} == {10.0}
    tokens = int(profile.source.split(" on cpu, ")[1].split()[0])
    assert profile.prefill_tok_s == 2 * tokens
    assert target.length == 0


def test_on_a_machine_without_a_gpu(model: str, starsd_home: Path) -> None:
    found, complaint = self_test(model)
    assert (found.tensorrt, found.why_not) == (False, f"{model} has no engine here")
    assert found.bundle.endswith(f"/ort-{DEFAULT_PRECISION}")
    assert found.top1 > 0.8
    assert 0 < found.kl < 0.1
    assert complaint is None
    assert found.providers == []
    assert found.skipped.keys() == {"cuda", "tensorrt"}
    assert found.skipped["cuda"].startswith("provider cuda is not in this onnxruntime, expected one of cpu: ")
    profile = read_profile(found.profile)
    assert list(profile.pass_ms) == [tuple(point) for point in found.pass_ms]
    assert Path(found.profile).parent == starsd_home / "profiles"


def test_on_a_device_with_an_engine(model: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = stand_in(monkeypatch, "10.3.0.30")
    bundle = parse_ref(model).bundle("decomposed", "fp32")
    shutil.copytree(exported / "decomposed-fp32", bundle)
    build(bundle, context=400, chunk=256)
    monkeypatch.setattr(module, "device_name", lambda: "a-board")
    found, complaint = self_test(model)
    assert (found.tensorrt, found.why_not, found.device, complaint) == (True, "", "a-board", None)
    assert (found.top1, found.bundle.rpartition("/")[2]) == (1.0, "decomposed-fp32")
    assert found.largest < 1e-4
    assert [rows for rows, _ in found.pass_ms] == list(ROWS)
    machine.cuda.capability = (9, 0)
    found, _ = self_test(model)
    assert found.why_not.startswith(f"{bundle} has an engine for GPU sm87, here sm90: run starsd-export tensorrt ")


def test_providers_for_gpus_read_the_same_text(
    model: str, exported: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine, ref = stand_in_gpu(monkeypatch), parse_ref(model)
    outdated(ref.bundle("ort", "fp32").with_name("another"))
    found, complaint = self_test(model)
    assert found.skipped["cuda"].startswith("provider cuda does not run this bundle: flavour ort runs there in fp16 al")
    shutil.copytree(exported / "decomposed-fp32", ref.bundle("decomposed", "fp32"))
    found, complaint = self_test(model)
    assert (complaint, found.skipped) == (None, {})
    assert [(one.provider, one.cuda_graphs, one.top1) for one in found.providers] == [
        ("cuda", True, 1.0),
        ("tensorrt", False, 1.0),
    ]
    assert all(one.bundle.endswith("/decomposed-fp32") and one.largest < 1e-4 for one in found.providers)
    machine.left_over = ["Cast"]
    found, complaint = self_test(model)
    assert found.providers == []
    assert complaint is not None
    assert "/decomposed-fp32 on provider cuda: " in complaint
    assert complaint.endswith("it has no kernel for Cast")
    assert capfd.readouterr().err == ""


def test_complaints() -> None:
    assert set(LEAST_TOP1) == set(PRECISIONS)
    assert result().complaint("fp32") is None
    assert result(top1=0.71).complaint("int4") is None
    wrong = "tiny/ort-int8 agrees with fp32 in 71.0 % of argmaxes, expected 85 % in int8"
    assert result(top1=0.71).complaint("int8") == wrong
    assert result(kl=float("nan")).complaint("int8") == "tiny/ort-int8 computes logits that are not finite"


def test_what_is_missing_is_said(model: str, exported: Path) -> None:
    ref = parse_ref(model)
    shutil.rmtree(ref.bundle("ort", DEFAULT_PRECISION))
    with pytest.raises(UsageError, match=rf"has no bundle in {DEFAULT_PRECISION}: run starsd-export onnx "):
        self_test(model)
    shutil.rmtree(ref.bundle("ort", "fp32"))
    with pytest.raises(UsageError, match=r"has no bundle in fp32 to compare with: run starsd-export onnx .* fp32$"):
        self_test(model)


def test_a_bundle_is_compared_with_one_of_its_source(model: str, exported: Path, starsd_home: Path) -> None:
    ref, given = parse_ref(model), exported / "decomposed-fp32"
    found, complaint = self_test(str(given))
    assert (found.why_not, complaint) == (f"{given} has no engine here", None)
    assert (found.top1, found.bundle.rpartition("/")[2]) == (1.0, "decomposed-fp32")
    name = f"{ref.slug}/ort-{DEFAULT_PRECISION}"
    shutil.rmtree(ref.bundle("ort", "fp32"))
    with pytest.raises(UsageError, match=rf"to compare with: run starsd-export onnx {model} --precision fp32$"):
        self_test(name)
    path = ref.bundle("ort", DEFAULT_PRECISION) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "source": "elsewhere"}))
    with pytest.raises(UsageError, match=r"was exported from what is not here, .*: model 'elsewhere' is unknown"):
        self_test(name)


def test_the_name_of_a_board(tmp_path: Path) -> None:
    board = tmp_path / "model"
    board.write_text("NVIDIA Jetson Orin Nano Developer Kit\0")
    assert device_name(board) == "nvidia-jetson-orin-nano-developer-kit"
    assert device_name(tmp_path / "none").endswith("-gpu")


def test_the_doctor_tells(
    starsd_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(model: str, progress: Any) -> tuple[SelfTest, str | None]:
        if model == "none":
            raise UsageError("none has no bundle")
        return (
            result(providers=[on_cuda()], skipped={"tensorrt": "no GPU can be used"}),
            f"{model} is wrong" if model == "wrong" else None,
        )

    monkeypatch.setattr("starsd.scripts.doctor.run_self_test", answer)
    monkeypatch.setattr("starsd.scripts.doctor._try_model", lambda model, problems: (None, None))
    main(["doctor", "--self-test"])
    told = capsys.readouterr().out
    assert "self-test    tiny/ort-int8 on ONNX Runtime: none\n" in told
    assert "against fp32 100.0 % of argmaxes equal, KL 0.0000, logits within 0, over 64 tokens\n" in told
    assert "rows: ms     1: 1.0\n" in told
    agreed = "100.0 % of argmaxes equal, KL 0.0000, logits within 0"
    assert f"provider     cuda, with CUDA graphs: tiny/decomposed-fp16, {agreed}\n" in told
    assert "skipped      provider tensorrt: no GPU can be used\n" in told
    assert main(["doctor", "--self-test", "--model", "wrong"]) == 1
    assert "BROKEN       wrong is wrong: export its bundle again" in capsys.readouterr().out
    assert main(["doctor", "--self-test", "--model", "none", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["self_test"] is None
    assert found["problems"][-1]["problem"] == "none has no bundle"
