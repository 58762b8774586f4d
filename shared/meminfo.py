"""What the system says of its memory."""

from __future__ import annotations

from pathlib import Path


def meminfo(file: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo; empty where there is none."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
