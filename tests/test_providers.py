"""Which execution providers a session gets."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from starsd.edge import providers
from starsd.edge.providers import choose_providers
from starsd.shared.cuda_runtime import Gpu
from starsd.shared.errors import DeviceError, UsageError

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
ALL = [TENSORRT, CUDA, CPU]


def card() -> Gpu:
    return Gpu((9, 0), 2, 1)


def no_card() -> Gpu:
    raise DeviceError("no GPU can be used: CUDA finds no device")


@pytest.mark.parametrize(
    ("wanted", "available", "find", "machine", "expected"),
    [
        ("auto", ALL, card, "x86_64", [CUDA, CPU]),
        ("auto", ALL, no_card, "x86_64", [CPU]),
        ("auto", ALL, card, "aarch64", [CPU]),
        ("auto", [CPU], card, "x86_64", [CPU]),
        ("cpu", ALL, card, "x86_64", [CPU]),
        ("cuda", ALL, card, "aarch64", [CUDA, CPU]),
        ("tensorrt", ALL, card, "x86_64", [TENSORRT, CUDA, CPU]),
        ("tensorrt", [TENSORRT, CPU], card, "x86_64", [TENSORRT, CPU]),
    ],
)
def test_what_is_chosen(
    wanted: str, available: list[str], find: object, machine: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers.platform, "machine", lambda: machine)
    assert [name for name, _ in choose_providers(wanted, available, find)] == expected  # type: ignore[arg-type]


def test_options(starsd_home: Path) -> None:
    found = dict(choose_providers("tensorrt", ALL, card))
    assert found[CPU] == {}
    assert found[CUDA]["use_tf32"] == "0"
    assert found[TENSORRT]["trt_engine_cache_path"] == str(starsd_home / "tensorrt" / "onnxruntime")


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^provider is 'gpu', expected one of auto, cpu, cuda, tensorrt$"):
        choose_providers("gpu", ALL, card)
    with pytest.raises(UsageError, match=r"^provider cuda is not in this onnxruntime, expected one of cpu: "):
        choose_providers("cuda", [CPU, "AzureExecutionProvider"], card)
    with pytest.raises(DeviceError, match=r"^no GPU can be used: CUDA finds no device$"):
        choose_providers("cuda", ALL, no_card)


def test_names_are_those_of_onnxruntime() -> None:
    assert set(ALL) <= set(ort.get_all_providers())
