"""Where onnxruntime computes: its execution providers, by the names that a user gives them, and which graphs they run.

A provider that lacks a kernel leaves that node to the processor, and K/V or activations go there and back in every
pass: slower than the processor alone. So a graph runs on a GPU where every node has a kernel there, or not at all.
What has one was read from the kernels in the libraries of onnxruntime-gpu 1.23.2 to 1.31.1:

`ort`         GroupQueryAttention is in float16 alone, and takes a mask (attention_bias) from 1.29 on: so fp16. Of int8
              MatMulIntegerToFloat has no CUDA kernel, of int4 MatMulNBits has, but both compute attention in float32.
`portable`    TensorScatter, Attention, RotaryEmbedding and RMSNormalization have kernels since 1.25.1, in both types.
`decomposed`  everything has, of opset 20; of int4's opset 21 from 1.24 on. Weights of int8 and int4 are spread out as
              float16 on loading, as on the processor.

TensorRT's provider takes the graphs that TensorRT takes: not `ort`, and attention in fp32 only where it is decomposed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from starsd.shared.config import PROVIDERS
from starsd.shared.cuda_runtime import Gpu, gpu, load_cudart
from starsd.shared.errors import DeviceError, UsageError
from starsd.shared.graph_contract import version_numbers
from starsd.shared.home import home
from starsd.shared.manifest import Manifest

_NAMES = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_X86 = ("x86_64", "AMD64")

_SINCE: Mapping[str, Mapping[str, Mapping[str, str]]] = {  # provider → flavour → precision → the oldest onnxruntime
    "cuda": {
        "ort": {"fp16": "1.29"},
        "portable": dict.fromkeys(("fp32", "fp16", "int8", "int4"), "1.25.1"),
        "decomposed": {**dict.fromkeys(("fp32", "fp16", "int8"), "1.23"), "int4": "1.24"},
    },
    "tensorrt": {
        "portable": dict.fromkeys(("fp16", "int8", "int4"), "1.25.1"),
        "decomposed": dict.fromkeys(("fp32", "fp16", "int8", "int4"), "1.23"),
    },
}

Shapes = Mapping[str, Sequence[int]]  # of inputs, by name
Options = list[tuple[str, dict[str, str]]]


class Choice(NamedTuple):
    """A provider's name, and why `auto` takes the processor where this onnxruntime would have a GPU; else ""."""

    name: str
    why_not: str = ""


def choose_provider(
    wanted: str,
    bundle: Manifest,
    version: str,
    available: Sequence[str],
    find_gpu: Callable[[], Gpu] = lambda: gpu(load_cudart()),
) -> Choice:
    """Of an onnxruntime of this version that has the `available` ones, in onnxruntime's names, for a bundle's graph.

    `auto` is a graphics card on x86, if there is one that runs the graph, else the processor: elsewhere a package of
    onnxruntime that says it has CUDA may have no kernels for the device, so there it has to be asked for. TensorRT has
    to be asked for everywhere: it builds for minutes first. Raises UsageError for a name that is unknown, that this
    onnxruntime lacks, or that does not run this graph, and DeviceError when no GPU can be used.
    """
    if wanted not in PROVIDERS:
        raise UsageError(f"provider is {wanted!r}, expected one of {', '.join(PROVIDERS)}")
    if wanted == "auto":
        return Choice("cuda") if (why := _why_not(bundle, version, available, find_gpu)) is None else Choice("cpu", why)
    if _NAMES[wanted] not in available:
        raise UsageError(
            f"provider {wanted} is not in this onnxruntime, expected one of "
            f"{', '.join(name for name, provider in _NAMES.items() if provider in available)}: "
            "onnxruntime-gpu has it on x86, a build for the device elsewhere"
        )
    if wanted != "cpu":
        if lack := lacks(wanted, bundle.flavour, bundle.precision, version):
            raise UsageError(f"provider {wanted} does not run this bundle: {lack}")
        find_gpu()
    return Choice(wanted)


def lacks(provider: str, flavour: str, precision: str, version: str) -> str:
    """Why onnxruntime `version` does not run a graph whole on this provider, and what to do; "" where it does."""
    flavours = _SINCE[provider]
    runs = flavours.get(flavour, {})
    if precision in runs:
        if version_numbers(version) >= version_numbers(runs[precision]):
            return ""
        return (
            f"flavour {flavour} in {precision} needs onnxruntime {runs[precision]} or newer there, this is {version}: "
            "update it, or export decomposed in fp16 instead"
        )
    others = " or ".join(name for name in flavours if name != flavour and precision in flavours[name])
    here = f"in {' or '.join(runs)} alone" if runs else "in no precision"
    return f"flavour {flavour} runs there {here}, this is {precision}: export {others} instead, or use provider cpu"


def _why_not(bundle: Manifest, version: str, available: Sequence[str], find_gpu: Callable[[], Gpu]) -> str | None:
    """Why `auto` is not CUDA; "" where nobody would expect it to be, None where it is."""
    if _NAMES["cuda"] not in available:
        return ""
    if (machine := platform.machine()) not in _X86:
        return f"onnxruntime's CUDA may have no kernels for {machine}: ask for it with --provider cuda"
    if lack := lacks("cuda", bundle.flavour, bundle.precision, version):
        return lack
    try:
        find_gpu()
    except DeviceError as error:
        return str(error)
    return None


def session_options(
    name: str, available: Sequence[str], stream: int = 0, *, graphs: bool = False, profile: Sequence[Shapes] = ()
) -> Options:
    """Names and options of the providers for a session, best first; the last is the processor.

    They compute in `stream`, a CUDA stream, and capture CUDA `graphs` of it. `profile` is for TensorRT: shapes of the
    smallest, the usual and the largest pass.
    """
    if name == "cpu":
        return [(_NAMES["cpu"], {})]
    common = {"device_id": "0", "user_compute_stream": str(stream)}
    # TF32 would round float32 products to 10 bits
    cuda = {
        **common,
        "use_tf32": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": str(int(graphs)),
    }
    found = [(_NAMES["cuda"], cuda), (_NAMES["cpu"], {})]
    if name == "tensorrt":
        found.insert(0, (_NAMES["tensorrt"], {**common, **_tensorrt(profile)}))
    return [(provider, options) for provider, options in found if provider in available]


def _tensorrt(profile: Sequence[Shapes]) -> dict[str, str]:
    cache = str(home() / "tensorrt" / "onnxruntime")
    kept = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": cache}
    kept |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": cache}
    moving = [name for name in profile[0] if len({tuple(shapes[name]) for shapes in profile}) > 1]
    for kind, shapes in zip(("min", "opt", "max"), profile, strict=True):
        kept[f"trt_profile_{kind}_shapes"] = ",".join(f"{n}:{'x'.join(map(str, shapes[n]))}" for n in moving)
    return kept


def has_provider(name: str, found: Sequence[str]) -> bool:
    """Whether a session that was opened for provider `name` has it: without its libraries onnxruntime goes without."""
    return _NAMES[name] in found
