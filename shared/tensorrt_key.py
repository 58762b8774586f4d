"""What a TensorRT engine was built from, and for what: `engine.json` beside `engine.plan`, in its bundle's `tensorrt/`.

A plan fits one build of TensorRT on one kind of GPU and one graph; nothing but its record says which. Whoever opens it
compares the record with what is here now, and a difference means building again: a name is never trusted. Exporting a
bundle anew removes its engine with it.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from starsd.shared.errors import BundleError
from starsd.shared.manifest import GRAPH_FILE, WEIGHTS_FILE, FileEntry, Manifest

FOLDER, PLAN_FILE, RECORD_FILE = "tensorrt", "engine.plan", "engine.json"
FORMAT = 1
MAX_ROWS = 64  # of a pass over a tree; as many rows of K/V lie behind the context, for passes at its end
_RELEASE = re.compile(r"# R(\d+) \(release\), REVISION: ([\d.]+)")


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has to be the same where an engine is built and where it runs."""

    tensorrt: str  # the whole version, such as 10.3.0.30
    l4t: str  # such as 36.5.0; empty where this is no Jetson
    gpu: str  # compute capability, such as sm87


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one optimisation profile: the fewest, the likeliest and the most rows of a pass, and of logits."""

    rows: tuple[int, int, int]
    wanted: tuple[int, int, int]


class EngineKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that an engine depends on. Profile 0 reads prompts, profile 1 runs trees."""

    machine: Machine
    graph: str  # SHA-256 of the bundle's graph
    weights: str  # and of its weights
    capacity: int  # rows of K/V
    profiles: tuple[Point, ...]
    flags: tuple[str, ...]

    @property
    def context(self) -> int:
        """Most tokens of a conversation."""
        return self.capacity - MAX_ROWS

    @property
    def chunk(self) -> int:
        """Most tokens of a pass over a prompt."""
        return self.profiles[0].rows[2]


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: EngineKey
    plan: FileEntry
    seconds: float  # that building took
    format: int = FORMAT


def key_for(about: Manifest, machine: Machine, context: int, chunk: int) -> EngineKey:
    """The key of an engine of this bundle, to be built here."""
    return EngineKey(
        machine=machine,
        graph=about.files[GRAPH_FILE].sha256,
        weights=about.files[WEIGHTS_FILE].sha256,
        capacity=context + MAX_ROWS,
        profiles=(
            Point((1, chunk, chunk), (1, 1, 1)),
            Point((1, 8, MAX_ROWS), (1, 8, MAX_ROWS)),
        ),
        flags=("strongly_typed",),
    )


def differences(built: EngineKey, here: EngineKey) -> list[str]:
    """How they differ, in words; empty when the engine fits."""
    pairs = {
        "TensorRT": (built.machine.tensorrt, here.machine.tensorrt),
        "L4T": (built.machine.l4t, here.machine.l4t),
        "GPU": (built.machine.gpu, here.machine.gpu),
        "graph": (built.graph[:12], here.graph[:12]),
        "weights": (built.weights[:12], here.weights[:12]),
        "context": (built.context, here.context),
        "chunk": (built.chunk, here.chunk),
        "profiles": (built.profiles, here.profiles),
        "flags": (built.flags, here.flags),
    }
    return [f"{what} {was or 'none'}, here {now or 'none'}" for what, (was, now) in pairs.items() if was != now]


def has_engine(bundle: Path) -> bool:
    """Whether one was built for the bundle in this folder, be it of use here or not."""
    return (bundle / FOLDER / RECORD_FILE).is_file()


def read_record(bundle: Path) -> EngineRecord | None:
    """Of the engine of the bundle in this folder; None when there is none.

    Raises BundleError when the record cannot be read, or the plan beside it has another size than it says.
    """
    path, plan = bundle / FOLDER / RECORD_FILE, bundle / FOLDER / PLAN_FILE
    if not has_engine(bundle):
        return None
    try:
        record = msgspec.json.decode(path.read_bytes(), type=EngineRecord)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    if record.format != FORMAT:
        raise BundleError(f"{path} has format {record.format}, expected {FORMAT}")
    size = plan.stat().st_size if plan.is_file() else 0
    if size != record.plan.bytes:
        raise BundleError(f"{plan} has {size} bytes, expected {record.plan.bytes}")
    return record


def l4t_release(file: Path = Path("/etc/nv_tegra_release")) -> str:
    """The release of Jetson Linux, such as 36.5.0; empty where this is none."""
    if not file.is_file():
        return ""
    found = _RELEASE.search(file.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        return ""
    parts = [found[1], *found[2].split(".")]
    return ".".join([*parts, *["0"] * (3 - len(parts))][:3])
