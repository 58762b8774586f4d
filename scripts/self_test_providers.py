"""ONNX Runtime's providers for GPUs in the self-test, each on the first of a model's bundles that it runs.

Those that cannot be tested here are named with the reason; one that is here and fails is a complaint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from starsd.edge.onnx_graph import VERSION, available
from starsd.edge.providers import choose_provider, lacks
from starsd.edge.target import Target
from starsd.edge.target_onnx import open_bundle
from starsd.scripts.agreement import OnProvider, compare
from starsd.shared import manifest
from starsd.shared.config import Engine
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import BundleError, CapacityError, DeviceError, UsageError

GPU_PROVIDERS = ("cuda", "tensorrt")


def _readable(bundles: Path) -> Iterator[tuple[Path, manifest.Manifest]]:
    for file in sorted(bundles.glob(f"[!.]*/{manifest.FILE_NAME}")):
        try:
            yield file.parent, manifest.read(file.parent)
        except BundleError:  # of another version, or damaged: others may do
            continue


def on_providers(
    model: str, reference_folder: Path, reference: Target, prompt: Sequence[int], progress: Progress = no_progress
) -> tuple[list[OnProvider], dict[str, str], list[str]]:
    """How near each comes to the reference in `reference_folder`; which were skipped, and why; complaints."""
    tested: list[OnProvider] = []
    skipped: dict[str, str] = {}
    complaints: list[str] = []
    bundles = dict(_readable(reference_folder.parent))
    for name in GPU_PROVIDERS:
        runs = (folder for folder, about in bundles.items() if not lacks(name, about.flavour, about.precision, VERSION))
        folder = next(runs, reference_folder)
        about, called = bundles[folder], f"{model}/{folder.name}"
        try:
            choose_provider(name, about, VERSION, available())
        except (UsageError, DeviceError) as error:
            skipped[name] = str(error)
            continue
        try:
            target = open_bundle(folder, Engine(provider=name))
            top1, kl, largest = compare(reference, target, prompt, progress)
        except (DeviceError, CapacityError) as error:
            complaints.append(f"{called} on provider {name}: {error}")
            continue
        found = OnProvider(
            bundle=called,
            top1=top1,
            kl=kl,
            largest=largest,
            noise=target.noise,
            branch_noise=target.branch_noise,
            provider=name,
            cuda_graphs=target.captures,
        )
        tested.append(found)
        if complaint := found.complaint(about.precision):
            complaints.append(f"provider {name}: {complaint}")
    return tested, skipped, complaints
