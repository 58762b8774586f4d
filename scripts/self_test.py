"""`starsd doctor --self-test`: this device's engine against fp32, and what its passes take, as a profile to plan with.

The reference writes an answer; the engine reads the same text token by token, as plain decoding does. On a device with
an engine that is TensorRT's, elsewhere ONNX Runtime's on the CPU: the test is the same. So it is for ONNX Runtime's
providers for GPUs: `self_test_providers.py`.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from shlex import quote
from statistics import median

import msgspec

from starsd.edge.target import Target, open_target
from starsd.edge.target_tensorrt import open_engine
from starsd.export.staging import replace
from starsd.scripts.agreement import TOKENS, Agreement, OnProvider, compare
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_PRECISION, Engine
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import DeviceError, UsageError
from starsd.shared.home import ModelRef, home, parse_ref
from starsd.shared.profiles import Profile
from starsd.shared.tensorrt_key import has_engine

ROWS = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 7  # of a pass; the first two, which prepare and capture it, do not count
_PROMPT = 128  # most tokens read before passes are timed


class SelfTest(Agreement, frozen=True, kw_only=True):
    """Of the engine that this device would use, and what it took."""

    device: str
    tensorrt: bool
    why_not: str  # why TensorRT was not used; empty when it was
    tokens: int
    profile: str  # the file
    pass_ms: list[tuple[int, float]]
    prefill_tok_s: float
    providers: list[OnProvider]
    skipped: dict[str, str]  # providers that were not tested, and why not


def self_test(model: str, progress: Progress = no_progress) -> tuple[SelfTest, str | None]:
    """Compare and measure; the complaint, if there is one. Writes the profile below `$STARSD_HOME/profiles`.

    `model` may be a bundle, which is compared with one in fp32 of what it was exported from. Raises UsageError when the
    model has no bundle, or none in fp32 to compare with.
    """
    from starsd.edge.text import Text
    from starsd.export.check import PROMPTS

    given = manifest.find(model)
    ref = parse_ref(model) if given is None else _source(given)
    reference_folder = _reference(ref)
    target, folder, device, why_not = _open(ref, given)
    about = manifest.read(folder)
    reference = open_target("onnx", reference_folder, Engine(provider="cpu"))
    prompt = Text.open(folder).encode_chat([{"role": "user", "content": PROMPTS[0]}])
    top1, kl, largest = compare(reference, target, prompt, progress)
    profile = measure(target, f"{device}-{ref.slug}-{about.precision}", device, progress)
    path = home() / "profiles" / f"{profile.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, msgspec.json.format(msgspec.json.encode(profile)))
    from starsd.scripts.self_test_providers import on_providers  # with onnxruntime, which was found by now

    providers, skipped, wrong = on_providers(ref.slug, reference_folder, reference, prompt, progress)
    result = SelfTest(
        bundle=f"{ref.slug}/{folder.name}",
        device=device,
        tensorrt=not why_not,
        why_not=why_not,
        tokens=TOKENS,
        top1=top1,
        kl=kl,
        largest=largest,
        noise=target.noise,
        branch_noise=target.branch_noise,
        profile=str(path),
        pass_ms=list(profile.pass_ms),
        prefill_tok_s=profile.prefill_tok_s or 0.0,
        providers=providers,
        skipped=skipped,
    )
    complaints = [complaint for complaint in (result.complaint(about.precision), *wrong) if complaint]
    return result, "; ".join(complaints) or None


def measure(
    target: Target,
    name: str,
    device: str,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """What passes of 1 to 64 rows take behind a prompt, and how fast that is read. More rows never count as faster."""
    rows = [count for count in ROWS if count + TOKENS <= target.context]
    prompt = [(7 * i + 1) % target.shape.vocab for i in range(min(_PROMPT, target.context - rows[-1]))]
    target.truncate(0)
    target.prefill(prompt)
    target.truncate(0)
    began = clock()
    target.prefill(prompt)
    prefill = clock() - began
    took: list[float] = []
    for done, count in enumerate(rows):
        tokens, parents = prompt[:count], [-1, *[0] * (count - 1)]
        times = []
        for _ in range(_REPEATS):
            began = clock()
            target.score(tokens, parents)
            times.append(clock() - began)
        took.append(round(1e3 * median(times[2:]), 3))
        progress("timing passes", done + 1, len(rows))
    target.truncate(0)
    return Profile(
        name=name,
        hidden=target.shape.hidden,
        pass_ms=tuple(zip(rows, accumulate(took, max), strict=True)),
        interpolation="linear",
        prefill_tok_s=round(len(prompt) / prefill, 1),
        source=f"starsd doctor --self-test on {device}, {len(prompt)} tokens before each pass",
    )


def _source(bundle: Path) -> ModelRef:
    """What a bundle was exported from."""
    try:
        return parse_ref(manifest.read(bundle).source)
    except UsageError as error:
        raise UsageError(f"{bundle} was exported from what is not here, and cannot be compared: {error}") from error


def _reference(ref: ModelRef) -> Path:
    folder, model = ref.bundle("ort", "fp32"), ref.text
    if not (folder / manifest.FILE_NAME).is_file():
        raise UsageError(
            f"{model} has no bundle in fp32 to compare with: run starsd-export onnx {quote(model)} --precision fp32"
        )
    return folder


def _open(ref: ModelRef, given: Path | None) -> tuple[Target, Path, str, str]:
    """An engine with its bundle, which may be given, its device, and why it is not TensorRT's."""
    model, folder = ref.text, given or ref.bundle("ort", DEFAULT_PRECISION)
    candidates = folder.parent.glob("[!.]*") if given is None else [given]
    why_not = f"{model if given is None else given} has no engine here"
    for built in sorted(filter(has_engine, candidates)):
        try:
            return open_engine(built, Engine()), built, device_name(), ""
        except DeviceError as error:
            why_not = str(error)
    if not (folder / manifest.FILE_NAME).is_file():
        raise UsageError(f"{model} has no bundle in {DEFAULT_PRECISION}: run starsd-export onnx {quote(model)}")
    return open_target("onnx", folder, Engine(provider="cpu")), folder, f"{platform.machine()}-cpu", why_not


def device_name(model: Path = Path("/proc/device-tree/model")) -> str:
    """Of a board its own, such as nvidia-jetson-orin-nano-developer-kit; else that of the system's processor."""
    text = model.read_text(errors="replace") if model.is_file() else f"{platform.machine()}-gpu"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
