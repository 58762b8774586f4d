"""What NVIDIA's driver tells of its GPUs: through NVML where its Python module is installed, else from `nvidia-smi`.

Of several GPUs: the power of all, the hottest, the mean load.
"""

from __future__ import annotations

import importlib
import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from starsd.edge.telemetry_reading import GPU, Reading, load, power, temperature
from starsd.shared.errors import StarsdError

SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # reasons of NVML: hardware, heat seen by software and by hardware, power brake
SMI_SECONDS = 10.0  # a call takes a share of a second of a core
SMI_TIMEOUT = 8.0
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", "")  # newest drivers' first
_TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU


class Nvml:
    """Opens the driver's library with the first sample; raises whatever that raises."""

    name = "nvml"

    def __init__(self, every: float) -> None:
        self.every = every
        self._nvml: Any = None

    def sample(self) -> Reading:
        if self._nvml is None:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return together(
            self.name,
            [power(_ask(nvml.nvmlDeviceGetPowerUsage, handle), 1e-3) for handle in handles],
            [temperature(_ask(nvml.nvmlDeviceGetTemperature, handle, _TEMPERATURE_GPU)) for handle in handles],
            [load(_ask(lambda one: nvml.nvmlDeviceGetUtilizationRates(one).gpu, handle), 1e-2) for handle in handles],
            [_ask(reasons, handle) for handle in handles],
        )


class Smi:
    """Asks the command; raises StarsdError when it has nothing to say."""

    name = "nvidia-smi"

    def __init__(self, every: float) -> None:
        self.every = max(every, SMI_SECONDS)
        self._reasons = list(_REASONS)

    def sample(self) -> Reading:
        while True:
            done = self._query(self._reasons[0])
            if done.returncode == 0:
                return read_smi(done.stdout)
            if len(self._reasons) == 1:
                raise StarsdError(f"nvidia-smi ended with {done.returncode}: {done.stdout.strip()[:200]}")
            del self._reasons[0]  # a driver that does not know this name

    def _query(self, reasons: str) -> subprocess.CompletedProcess[str]:
        fields = ["power.draw", "temperature.gpu", "utilization.gpu", *([reasons] if reasons else [])]
        argv = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=SMI_TIMEOUT, check=False)


class Driver:
    """Asks the first of these for as long as it answers, from then on the next."""

    name = "nvidia"

    def __init__(self, sources: Sequence[Nvml | Smi]) -> None:
        self._sources = list(sources)

    @property
    def every(self) -> float:
        return self._sources[0].every

    def sample(self) -> Reading:
        """Raises what the last one raises."""
        while True:
            try:
                return self._sources[0].sample()
            except Exception:  # NVML's errors, whatever they are, and a command's
                if len(self._sources) == 1:
                    raise
                del self._sources[0]


def find(every: float) -> Driver | None:
    """None: this machine has neither."""
    sources: list[Nvml | Smi] = [Nvml(every)] if find_spec("pynvml") is not None else []
    sources += [Smi(every)] if shutil.which("nvidia-smi") else []
    return Driver(sources) if sources else None


def read_smi(text: str) -> Reading:
    """A line a GPU: watts, degrees, per cent, and where it was asked for a mask of reasons. `[N/A]` is unknown."""
    columns: list[list[Any]] = [[], [], [], []]
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) in (3, 4):
            for column, word in zip(columns, [*words, ""], strict=False):
                column.append(_number(word))
    watts, degrees, shares, reasons = columns
    return together(
        Smi.name,
        [power(value) for value in watts],
        [temperature(value) for value in degrees],
        [load(value, 1e-2) for value in shares],
        reasons,
    )


def together(
    source: str,
    watts: Sequence[float | None],
    degrees: Sequence[float | None],
    shares: Sequence[float | None],
    reasons: Sequence[object],
) -> Reading:
    """Of all GPUs; the power is unknown where that of any is."""
    known = [int(reason) for reason in reasons if isinstance(reason, (int, float))]
    total = sum(value for value in watts if value is not None) if watts and None not in watts else None
    return Reading(
        source=source,
        power_w=total,
        power_of=None if total is None else GPU,
        temperature_c=max((value for value in degrees if value is not None), default=None),
        throttled=any(reason & SLOWED for reason in known) if known else None,
        gpu_load=fmean(found) if (found := [share for share in shares if share is not None]) else None,
    )


def _ask(call: Callable[..., Any], *args: Any) -> Any:
    """None where the driver has no answer: NVML's errors are many, and each means that."""
    try:
        return call(*args)
    except Exception:
        return None


def _number(word: str) -> float | None:
    try:
        value = float(int(word, 16)) if word.startswith("0x") else float(word)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None
