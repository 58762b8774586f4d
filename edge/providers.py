"""Where onnxruntime computes: its execution providers, by the names that a user gives them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

from starsd.shared.cuda_runtime import Gpu, gpu, load_cudart
from starsd.shared.errors import DeviceError, UsageError
from starsd.shared.home import home

PROVIDERS = ("auto", "cpu", "cuda", "tensorrt")
_NAMES = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_X86 = ("x86_64", "AMD64")

Chosen = list[tuple[str, dict[str, str]]]


def choose_providers(
    wanted: str, available: Sequence[str], find_gpu: Callable[[], Gpu] = lambda: gpu(load_cudart())
) -> Chosen:
    """Names and options for a session of an onnxruntime that has the `available` ones, best first; the last is the CPU.

    `auto` is a graphics card on x86, if there is one, else the CPU: elsewhere a package of onnxruntime that says it has
    CUDA may have no kernels for the device, so there it has to be asked for. TensorRT has to be asked for everywhere:
    it builds for minutes first. Raises UsageError for a name that is unknown, or that this onnxruntime lacks, and
    DeviceError when no GPU can be used.
    """
    if wanted not in PROVIDERS:
        raise UsageError(f"provider is {wanted!r}, expected one of {', '.join(PROVIDERS)}")
    if wanted == "auto":
        wanted = "cuda" if _NAMES["cuda"] in available and platform.machine() in _X86 and _there(find_gpu) else "cpu"
    if _NAMES[wanted] not in available:
        raise UsageError(
            f"provider {wanted} is not in this onnxruntime, expected one of "
            f"{', '.join(name for name, provider in _NAMES.items() if provider in available)}: "
            "onnxruntime-gpu has it on x86, a build for the device elsewhere"
        )
    chosen = {"cpu": ["cpu"], "cuda": ["cuda", "cpu"], "tensorrt": ["tensorrt", "cuda", "cpu"]}[wanted]
    if wanted != "cpu":
        find_gpu()
    return [(_NAMES[name], _options(name)) for name in chosen if _NAMES[name] in available]


def _there(find_gpu: Callable[[], Gpu]) -> bool:
    try:
        find_gpu()
    except DeviceError:
        return False
    return True


def _options(name: str) -> dict[str, str]:
    if name == "cuda":  # TF32 would round float32 products to 10 bits
        return {"device_id": "0", "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
    if name == "tensorrt":
        cache = str(home() / "tensorrt" / "onnxruntime")
        return {
            "device_id": "0",
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": cache,
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": cache,
        }
    return {}
