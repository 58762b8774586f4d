"""`starsd doctor --self-test`: this device's engine against fp32, and what its passes take, as a profile to plan with.

The reference writes an answer; the engine reads the same text token by token, as plain decoding does. On a device with
an engine that is TensorRT's, elsewhere ONNX Runtime's on the CPU: the test is the same.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from starsd.edge.target import Target, open_target
from starsd.edge.target_tensorrt import open_engine
from starsd.export.staging import replace
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_PRECISION, Engine
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import DeviceError, UsageError
from starsd.shared.home import ModelRef, home, parse_ref
from starsd.shared.profiles import Profile
from starsd.shared.tensorrt_key import has_engine

TOKENS = 64
ROWS = (1, 2, 4, 8, 16, 32, 64)
LEAST_TOP1 = {"fp32": 0.98, "fp16": 0.95, "int8": 0.85, "int4": 0.7}  # below, an engine computes wrong
_REPEATS = 7  # of a pass; the first two, which prepare and capture it, do not count
_PROMPT = 128  # most tokens read before passes are timed


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """How near the engine came to fp32 on text that fp32 wrote, and what it took."""

    bundle: str
    device: str
    tensorrt: bool
    why_not: str  # why TensorRT was not used; empty when it was
    tokens: int
    top1: float  # share of equal argmaxes
    kl: float  # mean, in nats
    largest: float  # difference in a logit
    noise: float
    branch_noise: float
    profile: str  # the file
    pass_ms: list[tuple[int, float]]
    prefill_tok_s: float

    def complaint(self, precision: str) -> str | None:
        """What shows that the engine computes wrong; None when nothing does."""
        if not np.isfinite(self.kl) or not np.isfinite(self.largest):
            return f"{self.bundle} computes logits that are not finite"
        if self.top1 < LEAST_TOP1[precision]:
            share, least = 100 * self.top1, 100 * LEAST_TOP1[precision]
            return f"{self.bundle} agrees with fp32 in {share:.1f} % of argmaxes, expected {least:.0f} % in {precision}"
        return None


def self_test(model: str, progress: Progress = no_progress) -> tuple[SelfTest, str | None]:
    """Compare and measure; the complaint, if there is one. Writes the profile below `$STARSD_HOME/profiles`.

    Raises UsageError when the model has no bundle, or none in fp32 to compare with.
    """
    from starsd.edge.text import Text
    from starsd.export.check import PROMPTS

    ref = parse_ref(model)
    reference_folder = _reference(ref, model)
    target, folder, device, why_not = _open(ref, model)
    about = manifest.read(folder)
    reference = open_target("onnx", reference_folder, Engine())
    prompt = Text.open(folder).encode_chat([{"role": "user", "content": PROMPTS[0]}])
    top1, kl, largest = compare(reference, target, prompt, progress)
    profile = measure(target, f"{device}-{ref.slug}-{about.precision}", device, progress)
    path = home() / "profiles" / f"{profile.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, msgspec.json.format(msgspec.json.encode(profile)))
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
    )
    return result, result.complaint(about.precision)


def compare(
    reference: Target, target: Target, prompt: Sequence[int], progress: Progress = no_progress
) -> tuple[float, float, float]:
    """Share of equal argmaxes, mean KL divergence and largest difference of a logit, over the reference's answer."""
    for one in (reference, target):
        one.truncate(0)
        one.prefill(prompt[:-1])
    token, equal, divergence, largest = prompt[-1], 0, 0.0, 0.0
    for done in range(TOKENS):
        expected, got = (one.score([token], [-1])[0].astype(np.float64) for one in (reference, target))
        for one in (reference, target):
            one.commit([0])
        token = int(expected.argmax())
        equal += int(got.argmax()) == token
        theirs, ours = (row - row.max() - np.log(np.exp(row - row.max()).sum()) for row in (expected, got))
        divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        largest = max(largest, float(np.abs(expected - got).max()))
        progress("comparing with fp32", done + 1, TOKENS)
    return equal / TOKENS, divergence / TOKENS, largest


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


def _reference(ref: ModelRef, model: str) -> Path:
    folder = ref.bundle("ort", "fp32")
    if not (folder / manifest.FILE_NAME).is_file():
        raise UsageError(
            f"{model} has no bundle in fp32 to compare with: run starsd-export onnx {model} --precision fp32"
        )
    return folder


def _open(ref: ModelRef, model: str) -> tuple[Target, Path, str, str]:
    """An engine with its bundle, its device, and why it is not TensorRT's."""
    bundles = ref.bundle("ort", DEFAULT_PRECISION).parent
    built = sorted(folder for folder in bundles.glob("[!.]*") if has_engine(folder))
    why_not = f"{model} has no engine here"
    for folder in built:
        try:
            return open_engine(folder, Engine()), folder, device_name(), ""
        except DeviceError as error:
            why_not = str(error)
    folder = ref.bundle("ort", DEFAULT_PRECISION)
    if not (folder / manifest.FILE_NAME).is_file():
        raise UsageError(f"{model} has no bundle in {DEFAULT_PRECISION}: run starsd-export onnx {model}")
    return open_target("onnx", folder, Engine()), folder, f"{platform.machine()}-cpu", why_not


def device_name(model: Path = Path("/proc/device-tree/model")) -> str:
    """Of a board its own, such as nvidia-jetson-orin-nano-developer-kit; else that of the system's processor."""
    text = model.read_text(errors="replace") if model.is_file() else f"{platform.machine()}-gpu"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
