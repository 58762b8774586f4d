"""`starsd-export tensorrt`: a bundle's engine, built on the device that will run it, or kept when it still fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from starsd.export.staging import replace, size_text, staged
from starsd.export.tensorrt_builder import ProfileShapes, Shape, build_plan
from starsd.export.tensorrt_graph import with_capacity
from starsd.shared import manifest
from starsd.shared.config import Engine
from starsd.shared.console import Progress, no_progress
from starsd.shared.cuda_runtime import Gpu, gpu, load_cudart
from starsd.shared.errors import BundleError, DeviceError, UsageError
from starsd.shared.graph_contract import Pass, contract_of
from starsd.shared.home import home
from starsd.shared.manifest import GRAPH_FILE, WEIGHTS_FILE, Manifest
from starsd.shared.meminfo import meminfo
from starsd.shared.tensorrt_bindings import flavour_for, load_tensorrt
from starsd.shared.tensorrt_key import (
    FOLDER,
    MAX_ROWS,
    PLAN_FILE,
    RECORD_FILE,
    EngineKey,
    EngineRecord,
    Machine,
    Point,
    differences,
    key_for,
    l4t_release,
    read_record,
)

DEFAULT_CONTEXT = 4096  # tokens, where the model has as many: K/V of every conversation are as long
MIN_CONTEXT = 16  # an engine measures its noise with a pass of 8 rows behind 8
_LEAST, _MOST = 3, 4  # times the model's bytes that building takes
_PLAN_SHARE = 1.2  # of the weights' bytes, for the disk that is asked for

Say = Callable[[str], None]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`context` 0 means the model's own, or DEFAULT_CONTEXT when that is less."""

    context: int = 0
    chunk: int = Engine().prefill_chunk
    rebuild: bool = False  # though the engine there fits
    force: bool = False  # though memory seems not to suffice


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was built, or found to fit."""

    engine: str
    built: bool
    why: list[str]  # how the engine that was there did not fit; empty when there was none
    tensorrt: str
    l4t: str
    gpu: str
    context: int
    bytes: int
    seconds: float  # that building took, now or then
    forecast: list[int]  # bytes of memory that building takes, at least and at most


def export_tensorrt(
    bundle: str, options: Options, progress: Progress = no_progress, say: Say = lambda line: None
) -> Report:
    """Build the engine of a bundle (its folder, or its name in the store) on this machine's GPU.

    Raises UsageError for a bundle of a flavour that this TensorRT does not take and for options out of range,
    DeviceError without TensorRT, GPU or memory enough, BundleError for a bundle that is damaged or does not build.
    """
    if (found := manifest.find(bundle)) is None:
        raise UsageError(
            f"bundle {bundle!r} is unknown, expected a bundle's folder or a name that starsd models list shows"
        )
    folder = found.resolve()
    about = manifest.read(folder)
    trt = load_tensorrt()
    _check_flavour(about, trt, bundle)
    device = gpu(load_cudart())
    machine = Machine(tensorrt=trt.__version__, l4t=l4t_release(), gpu=device.name)
    context = _context(about, options.context)
    key = key_for(about, machine, context, min(_chunk(options.chunk), context))
    forecast = [_LEAST * _weights(about), _MOST * _weights(about)]
    why: list[str] = []
    if (record := _record(folder, say)) is not None:
        why = differences(record.key, key)
        if not why and not options.rebuild:
            return _report(folder, record, False, [], forecast)
        if why:
            say(f"building again: {'; '.join(why)}")
    _check_memory(forecast, device, options.force, say)
    manifest.read(folder, verify=True)  # the record will vouch for these bytes
    record = _build(trt, folder, about, key, progress)
    return _report(folder, record, True, why, forecast)


def _check_flavour(about: Manifest, trt: Any, bundle: str) -> None:
    wanted = flavour_for(trt)
    if about.flavour != wanted:
        raise UsageError(
            f"bundle {bundle} is of flavour {about.flavour}, TensorRT {trt.__version__} takes {wanted}: "
            f"run starsd-export onnx {about.source} --flavour {wanted} --precision {about.precision}"
        )
    if (about.flavour, about.precision) == ("portable", "fp32"):
        raise UsageError(
            f"bundle {bundle} is in fp32, which TensorRT's attention does not compute: "
            f"run starsd-export onnx {about.source} --flavour {wanted} --precision fp16"
        )


def _context(about: Manifest, asked: int) -> int:
    most = about.shape.context
    context = asked or min(most, DEFAULT_CONTEXT)
    if not MIN_CONTEXT <= context <= most:
        raise UsageError(f"context is {context}, expected {MIN_CONTEXT} to {most} tokens, or 0 to choose")
    return context


def _chunk(chunk: int) -> int:
    if not MAX_ROWS <= chunk <= 4096:
        raise UsageError(f"chunk is {chunk} tokens, expected {MAX_ROWS} to 4096")
    return chunk


def _weights(about: Manifest) -> int:
    return about.files[GRAPH_FILE].bytes + about.files[WEIGHTS_FILE].bytes


def _record(folder: Path, say: Say) -> EngineRecord | None:
    try:
        return read_record(folder)
    except BundleError as error:
        say(f"building again: {error}")
        return None


def _check_memory(forecast: list[int], device: Gpu, force: bool, say: Say) -> None:
    """On a Jetson the GPU's memory is the system's; elsewhere the finished engine has to fit into its own."""
    least, most = forecast
    available = meminfo().get("MemAvailable", most)
    needed = f"building takes {size_text(least)} to {size_text(most)} of memory"
    found = f"{size_text(available)} are available, {size_text(device.free)} on the GPU"
    short = available < least or device.free < least // _LEAST
    if short and not force:
        raise DeviceError(f"{needed}, {found}: end other programs, add swap space, or try it all the same with --force")
    say(f"{needed}; {found}")


def _build(trt: Any, folder: Path, about: Manifest, key: EngineKey, progress: Progress) -> EngineRecord:
    started, timing = time.monotonic(), _timing_file(key.machine)
    shapes = [profile_shapes(about, key.capacity, point) for point in key.profiles]
    with staged(folder / FOLDER, bytes_needed=int(_weights(about) * _PLAN_SHARE)) as place:
        graph_file = folder / GRAPH_FILE
        known = timing.read_bytes() if timing.is_file() else b""
        built = build_plan(trt, with_capacity(graph_file, key.capacity), graph_file, shapes, known, progress)
        plan = place / PLAN_FILE
        with plan.open("wb") as file:
            file.write(built.plan)
        record = EngineRecord(key=key, plan=manifest.entry(plan), seconds=round(time.monotonic() - started, 1))
        (place / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    if built.timing:
        timing.parent.mkdir(parents=True, exist_ok=True)
        replace(timing, built.timing)
    return record


def _timing_file(machine: Machine) -> Path:
    """Kept apart from bundles: other models, and the same one exported anew, build faster with it."""
    return home() / "tensorrt" / f"timing-{machine.tensorrt}-{machine.gpu}.cache"


def profile_shapes(about: Manifest, capacity: int, point: Point) -> ProfileShapes:
    """Shapes of every input at the fewest, the likeliest and the most rows."""
    shape = about.shape
    cache: Shape = (1, shape.kv_heads, capacity, shape.head_dim)
    fixed = {f"past_{kind}_{layer}": cache for layer in range(shape.layers) for kind in "kv"}
    three = [
        fixed | _fed_shapes(about, capacity, rows, wanted)
        for rows, wanted in zip(point.rows, point.wanted, strict=True)
    ]
    return {name: (three[0][name], three[1][name], three[2][name]) for name in three[0]}


def _fed_shapes(about: Manifest, capacity: int, rows: int, wanted: int) -> dict[str, Shape]:
    """What the engine will feed for a pass of so many rows has the shapes that it may have."""
    one = Pass([0] * rows, None, 0, rows, rows, capacity, wanted)
    feeds = contract_of(about.flavour).feeds(one, about.shape.window)
    return {name: array.shape for name, array in feeds.items()}


def _report(folder: Path, record: EngineRecord, built: bool, why: list[str], forecast: list[int]) -> Report:
    machine = record.key.machine
    return Report(
        engine=str(folder / FOLDER),
        built=built,
        why=why,
        tensorrt=machine.tensorrt,
        l4t=machine.l4t,
        gpu=machine.gpu,
        context=record.key.context,
        bytes=record.plan.bytes,
        seconds=record.seconds,
        forecast=forecast,
    )
