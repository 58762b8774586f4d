"""What every Linux tells: memory and processor load, from /proc and the control groups of /sys."""

from __future__ import annotations

import math
from typing import NamedTuple

from starsd.edge.telemetry_files import Files, whole
from starsd.edge.telemetry_reading import Reading, load

_CGROUPS = "sys/fs/cgroup"


class Memory(NamedTuple):
    """Bytes; `available` is what a program can still get without swapping."""

    total: int
    available: int


def memory(files: Files) -> Memory | None:
    """This system's, or that of the tightest control group around this process (version 2). None: not told."""
    text = files.text("proc/meminfo") or ""
    kilobytes: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and (count := whole(words[0])) is not None:
            kilobytes[name] = count
    total = kilobytes.get("MemTotal")
    if total is None:
        return None
    parts = ("MemFree", "Buffers", "Cached")  # what MemAvailable is about, before Linux 3.14
    available = kilobytes.get("MemAvailable", sum(kilobytes.get(part, 0) for part in parts))
    found = Memory(1024 * total, 1024 * min(available, total))
    for group in _groups(files):
        found = _within(found, files, group)
    return found


def _groups(files: Files) -> list[str]:
    """Folders of this process's control group and those around it."""
    for line in (files.text("proc/self/cgroup") or "").splitlines():
        if line.startswith("0::/"):
            parts = line.removeprefix("0::/").split("/")
            return ["/".join([_CGROUPS, *filter(None, parts[:count])]) for count in range(len(parts) + 1)]
    return []


def _within(found: Memory, files: Files, group: str) -> Memory:
    most, used = files.number(f"{group}/memory.max"), files.number(f"{group}/memory.current")
    if most is None or used is None or most < 0:  # the outermost has none; "max" is no number
        return found
    cached = 0
    for line in (files.text(f"{group}/memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            cached = whole(value) or 0
    free = max(0, int(most - used) + cached)
    return Memory(min(found.total, int(most)), min(found.available, free))


class System:
    """Asked again and again: a processor's load is that since the last time, at first that of the last minute."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._ticks: tuple[int, int] | None = None

    def sample(self) -> Reading:
        known = memory(self._files)
        return Reading(
            source="proc",
            memory_used=None if known is None else known.total - known.available,
            memory_total=None if known is None else known.total,
            cpu_load=self._cpu_load(),
        )

    def _cpu_load(self) -> float | None:
        before, self._ticks = self._ticks, self._read_ticks()
        if self._ticks is not None and before is not None and self._ticks[1] > before[1]:
            busy, all_ = self._ticks[0] - before[0], self._ticks[1] - before[1]
            return load(min(1.0, max(0.0, busy / all_)))
        words = (self._files.text("proc/loadavg") or "").split()
        cores = sum(line.startswith("processor") for line in (self._files.text("proc/cpuinfo") or "").splitlines())
        try:
            share = float(words[0]) / cores
            return load(min(1.0, share)) if math.isfinite(share) else None
        except (IndexError, ValueError, ZeroDivisionError):
            return None

    def _read_ticks(self) -> tuple[int, int] | None:
        """Busy ones and all, of all cores since the start."""
        text = self._files.text("proc/stat") or ""
        words = text.partition("\n")[0].split()
        known = [whole(word) for word in words[1:9]]  # what guests took is in user time already
        ticks = [count for count in known if count is not None]
        if len(words) < 5 or words[0] != "cpu" or len(ticks) < len(known):
            return None
        idle = sum(ticks[3:5])
        return sum(ticks) - idle, sum(ticks)
