"""Which execution provider a bundle gets, what sessions are told, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest
from fake_onnxruntime import CPU, CUDA, TENSORRT
from test_bundle import write_bundle

from starsd.edge import providers
from starsd.edge.providers import Choice, choose_provider, has_provider, lacks, session_options
from starsd.shared.config import FLAVOURS, PRECISIONS, PROVIDERS
from starsd.shared.cuda_runtime import Gpu
from starsd.shared.errors import DeviceError, UsageError
from starsd.shared.manifest import Manifest, read

ALL = [TENSORRT, CUDA, CPU]
NEW = "1.31.1"
NO_CARD = "no GPU can be used: CUDA finds no device"


def card() -> Gpu:
    return Gpu((9, 0), 2, 1)


def no_card() -> Gpu:
    raise DeviceError(NO_CARD)


@pytest.fixture(autouse=True)
def _x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers.platform, "machine", lambda: "x86_64")


@pytest.fixture
def about(tmp_path: Path) -> Callable[[str, str], Manifest]:
    """A bundle's manifest by flavour and precision."""
    from msgspec.structs import replace

    made = read(write_bundle(tmp_path / "bundle"))
    return lambda flavour, precision: replace(made, flavour=flavour, precision=precision)


@pytest.mark.parametrize(
    ("wanted", "flavour", "available", "find", "expected"),
    [
        ("auto", "decomposed", ALL, card, Choice("cuda")),
        ("auto", "decomposed", ALL, no_card, Choice("cpu", NO_CARD)),
        ("auto", "decomposed", [CPU], card, Choice("cpu")),
        ("auto", "ort", [CPU], card, Choice("cpu")),
        ("cpu", "ort", ALL, card, Choice("cpu")),
        ("cuda", "decomposed", ALL, card, Choice("cuda")),
        ("tensorrt", "decomposed", ALL, card, Choice("tensorrt")),
    ],
)
def test_what_is_chosen(
    wanted: str,
    flavour: str,
    available: list[str],
    find: Callable[[], Gpu],
    expected: Choice,
    about: Callable[[str, str], Manifest],
) -> None:
    assert choose_provider(wanted, about(flavour, "int8"), NEW, available, find) == expected


def test_boards_have_to_ask_for_cuda(about: Callable[[str, str], Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of onnxruntime for them say that they have it, and have no kernels for Orin or Thor."""
    monkeypatch.setattr(providers.platform, "machine", lambda: "aarch64")
    bundle = about("decomposed", "fp16")
    why_not = "onnxruntime's CUDA may have no kernels for aarch64: ask for it with --provider cuda"
    assert choose_provider("auto", bundle, NEW, ALL, card) == Choice("cpu", why_not)
    assert choose_provider("cuda", bundle, NEW, ALL, card) == Choice("cuda")


def test_what_is_refused(about: Callable[[str, str], Manifest]) -> None:
    bundle = about("decomposed", "fp16")
    with pytest.raises(UsageError, match=r"^provider is 'gpu', expected one of auto, cpu, cuda, tensorrt$"):
        choose_provider("gpu", bundle, NEW, ALL, card)
    with pytest.raises(UsageError, match=r"^provider cuda is not in this onnxruntime, expected one of cpu: "):
        choose_provider("cuda", bundle, NEW, [CPU, "AzureExecutionProvider"], card)
    with pytest.raises(DeviceError, match=f"^{NO_CARD}$"):
        choose_provider("cuda", bundle, NEW, ALL, no_card)
    with pytest.raises(
        UsageError, match=r"^provider cuda does not run this bundle: flavour ort runs there in fp16 alo"
    ):
        choose_provider("cuda", about("ort", "int4"), NEW, ALL, card)


@pytest.mark.parametrize(
    ("provider", "flavour", "precision", "version", "reason"),
    [
        ("cuda", "ort", "fp16", "1.29.0", ""),
        ("cuda", "portable", "fp32", "1.25.1", ""),
        ("cuda", "decomposed", "int8", "1.23.2", ""),
        (
            *("cuda", "decomposed", "int4", "1.23.2"),
            "flavour decomposed in int4 needs onnxruntime 1.24 or newer there, this is 1.23.2: "
            "update it, or export decomposed in fp16 instead",
        ),
        (
            *("cuda", "ort", "fp16", "1.28.0"),
            "flavour ort in fp16 needs onnxruntime 1.29 or newer there, this is 1.28.0: "
            "update it, or export decomposed in fp16 instead",
        ),
        (
            *("cuda", "ort", "int8", NEW),
            "flavour ort runs there in fp16 alone, this is int8: "
            "export portable or decomposed instead, or use provider cpu",
        ),
        (
            *("tensorrt", "ort", "fp16", NEW),
            "flavour ort runs there in no precision, this is fp16: "
            "export portable or decomposed instead, or use provider cpu",
        ),
        (
            *("tensorrt", "portable", "fp32", NEW),
            "flavour portable runs there in fp16 or int8 or int4 alone, this is fp32: "
            "export decomposed instead, or use provider cpu",
        ),
    ],
)
def test_what_lacks_kernels(provider: str, flavour: str, precision: str, version: str, reason: str) -> None:
    assert lacks(provider, flavour, precision, version) == reason


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_there_is_always_a_graph_that_runs(provider: str) -> None:
    for precision in PRECISIONS:
        assert [flavour for flavour in FLAVOURS if not lacks(provider, flavour, precision, NEW)]


def test_options_of_cuda() -> None:
    assert session_options("cpu", ALL) == [(CPU, {})]
    plain = session_options("cuda", ALL, 77)
    assert [name for name, _ in plain] == [CUDA, CPU]
    assert dict(plain)[CPU] == {}
    assert dict(plain)[CUDA] == {
        "device_id": "0",
        "user_compute_stream": "77",
        "use_tf32": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "0",
    }
    assert dict(session_options("cuda", ALL, 77, graphs=True))[CUDA]["enable_cuda_graph"] == "1"


def test_options_of_tensorrt(starsd_home: Path) -> None:
    """Shapes of inputs that are always the same are not told: they are the graph's."""
    profile = [{"ids": (rows,), "mask": (1, 1, rows, rows + 9), "write": (1,)} for rows in (1, 8, 64)]
    found = session_options("tensorrt", ALL, 5, profile=profile)
    assert [name for name, _ in found] == [TENSORRT, CUDA, CPU]
    options = dict(found)[TENSORRT]
    assert options["trt_engine_cache_path"] == str(starsd_home / "tensorrt" / "onnxruntime")
    assert options["trt_profile_min_shapes"] == "ids:1,mask:1x1x1x10"
    assert options["trt_profile_opt_shapes"] == "ids:8,mask:1x1x8x17"
    assert options["trt_profile_max_shapes"] == "ids:64,mask:1x1x64x73"
    assert [name for name, _ in session_options("tensorrt", [TENSORRT, CPU], profile=profile)] == [TENSORRT, CPU]


def test_a_session_may_go_without_what_it_was_opened_for() -> None:
    assert has_provider("cuda", [CUDA, CPU])
    assert not has_provider("cuda", [CPU])


def test_names_are_those_of_onnxruntime() -> None:
    assert set(ALL) <= set(ort.get_all_providers())
    assert set(PROVIDERS) == {"auto", *providers._NAMES}
